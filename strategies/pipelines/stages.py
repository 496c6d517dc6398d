"""The stages of a pipeline: their marks in a loss function, their cut, and their devices."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias, TypeGuard

import jax

from strategies.argument_checks import integer, positive, wrong_type
from strategies.errors import FailedPreconditionError
from strategies.jax.programs.jaxpr import (
    Atom,
    Equation,
    EquationGroup,
    Graph,
    ProgramSegment,
    Variable,
    bodies,
    cut,
    every_equation,
    variables,
)
from strategies.pipelines.timetable import PipelineSchedule, Places, Schedule, Timetable, schedule_named, serialized
from strategies.typing import Function

_ALL_DEVICES = -1
"""In a device mapping: the stage is on all devices of the replica, and may shard its work over them."""

GREATEST_COUNT = 2**31 - 1

Stage = Function | Sequence[Function]
"""A function, or a list of functions that run at the same time, with the same arguments."""

DeviceMapping = Sequence[int | Sequence[int]]
"""The device of each stage; for a stage that is a list of functions, the list of their devices."""


def places_of(
    stages: Sequence[Stage],
    device_mapping: DeviceMapping | None,
    ipus_per_replica: int,
    batch_serialization_iterations: int = 1,
) -> Places:
    """Return the devices of each stage: one for each of its functions, or all devices if it is mapped to -1.

    Some devices may have no stage. Semantics: the original's `device_mapping`.

    Args:
        stages: The stages of the pipeline.
        device_mapping: The devices; None for one device per stage, or for device 0 with batch serialization.
        ipus_per_replica: The number of devices.
        batch_serialization_iterations: Number of micro-batches that a stage takes one after another.

    Raises:
        TypeError: If the stages are no functions or lists of functions, or the mapping is no list of whole numbers.
        ValueError: If there are fewer than two stages, a list contains lists, or the mapping lacks a device for a stage
            or has a device that does not exist.
    """
    if not _is_list(stages):
        raise wrong_type("computational_stages", stages, "it must be a list of functions, one for each stage")
    widths = [_width(number, stage) for number, stage in enumerate(stages)]
    if len(widths) < 2:
        raise ValueError(f"Pipeline requires at least two computational stages, but has {len(widths)}; add a stage")
    if device_mapping is None:
        device_mapping = _default(widths, batch_serialization_iterations > 1)
    if not _is_list(device_mapping):
        raise wrong_type("device_mapping", device_mapping, "it must be a list of devices, one for each stage")
    if len(device_mapping) != len(widths):
        raise ValueError(
            f"Each stage must be mapped to an IPU: there are {len(widths)} stages, but device_mapping has "
            f"{len(device_mapping)} devices: {list(device_mapping)}"
        )
    return tuple(
        _devices_of(number, width, devices, ipus_per_replica)
        for number, (width, devices) in enumerate(zip(widths, device_mapping, strict=True))
    )


def stages_like(device_mapping: DeviceMapping | None, number: int) -> list[Stage]:
    """Return one placeholder per stage, if only the number of stages and the mapping of a pipeline are known."""
    given = list(device_mapping)[:number] if isinstance(device_mapping, Sequence) else []
    known: list[Stage] = [
        [_unknown] * len(devices) if isinstance(devices, Sequence) and devices else _unknown for devices in given
    ]
    return known + [_unknown] * (number - len(known))


def _unknown() -> None:
    """Do nothing, in place of a function of a stage."""


def num_devices(device_mapping: DeviceMapping | None, num_stages: int) -> int:
    """Return the number of devices of a mapping; without a mapping, the number of stages."""
    if not isinstance(device_mapping, Sequence):
        return max(num_stages, 1)
    return 1 + max([0, *(integer(one) or 0 for _, one in _flat(device_mapping))])


def check_no_idle_devices(device_mapping: DeviceMapping) -> None:
    """Raise if a mapping leaves out a device before its last one.

    Raises:
        TypeError: If the mapping contains other values than whole numbers.
        ValueError: If devices are left out; the message names them.
    """
    numbers = {_device(stage, one) for stage, one in _flat(device_mapping) if not _is_list(one)}
    gaps = sorted(set(range(max(numbers, default=0))) - numbers)
    if gaps and _ALL_DEVICES not in numbers:
        raise ValueError(
            f"device_mapping is {list(device_mapping)}, and leaves out device{'s' if len(gaps) > 1 else ''} "
            f"{', '.join(map(str, gaps))}, which would be idle; number the devices without gaps, or set "
            "allow_idle_devices=True"
        )


def _flat(device_mapping: DeviceMapping) -> Iterator[tuple[int, object]]:
    for stage, each in enumerate(device_mapping):
        yield from ((stage, one) for one in (each if _is_list(each) else (each,)))


def schedule_for(schedule: PipelineSchedule | str | None, batch_serialization_iterations: int = 1) -> Schedule:
    """Return the requested schedule. The default is Grouped, or Sequential with batch serialization.

    Raises:
        TypeError: If the schedule is neither a member of the enum nor a string, or the iterations are no whole number.
        ValueError: If there is no such schedule, or the iterations are not positive.
        NotImplementedError: If another schedule than Sequential is combined with batch serialization.
    """
    serializes = positive("batch_serialization_iterations", batch_serialization_iterations) > 1
    if schedule is None:
        schedule = PipelineSchedule.Sequential if serializes else PipelineSchedule.Grouped
    found = schedule_named(schedule)
    if serializes and found is not schedule_named(PipelineSchedule.Sequential):
        raise NotImplementedError(
            f"batch_serialization_iterations is {batch_serialization_iterations}, but the pipeline schedule is "
            f"{found.name}; batch serialization is for the Sequential schedule: use that, or no iterations"
        )
    return found


def checked_count(
    gradient_accumulation_count: object, schedule: Schedule, mapping: Places, training: bool = True
) -> int:
    """Return the number of micro-batches, if the original's schedule takes it.

    Raises:
        TypeError: If the count is no whole number.
        ValueError: If the count is missing, not positive, or above the greatest number of 32 bits.
        FailedPreconditionError: If the count is no multiple of the number of micro-batches in the pipeline at once.
    """
    if gradient_accumulation_count is None:
        raise ValueError(
            "gradient_accumulation_count is missing; set it to the number of micro-batches that go through the pipeline"
        )
    count = positive("gradient_accumulation_count", gradient_accumulation_count)
    if count > GREATEST_COUNT:
        raise ValueError(
            f"gradient_accumulation_count is {count}; it must be at most {GREATEST_COUNT}: make fewer micro-batches"
        )
    overlap = schedule.overlap(mapping, training)
    if count % overlap:
        below = count - count % overlap
        use = f"{below} or {below + overlap}" if below else str(overlap)
        raise FailedPreconditionError(
            f"The number of iterations of the pipeline must be a multiple of {overlap}: {len(mapping)} stages under "
            f"the {schedule.name} schedule {'train' if training else 'run'} with that many micro-batches at once. "
            f"gradient_accumulation_count is {count}; use {use} (in Keras, this holds for steps_per_execution too)"
        )
    return count


def timetable_for(
    schedule: Schedule, places: Places, count: object, training: bool = True, batch_serialization_iterations: int = 1
) -> Timetable:
    """Return the timetable of an update with `count` micro-batches. Raises the errors of `checked_count`."""
    number = checked_count(count, schedule, places, training)
    if batch_serialization_iterations > 1:
        return serialized(places, number, training, batch_serialization_iterations)
    return schedule.timetable(places, number, training)


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _width(number: int, stage: Stage) -> int | None:
    """Return the number of functions in a stage that is a list; None for a single function."""
    if callable(stage):
        return None
    if not _is_list(stage):
        raise TypeError(f"stage {number} is {stage!r}, a {type(stage).__name__}; use a function or a list of functions")
    if any(map(_is_list, stage)):
        raise ValueError(
            f"stage {number} has a list within its list of functions; concurrent stages cannot be nested: use one list"
        )
    if odd := [one for one in stage if not callable(one)]:
        raise TypeError(
            f"stage {number} has {odd[0]!r} among its functions, a {type(odd[0]).__name__}; use functions only"
        )
    if not stage:
        raise ValueError(f"stage {number} is an empty list; put a function into it, or leave the stage out")
    return len(stage)


def _default(widths: Sequence[int | None], serializes: bool) -> list[int | list[int]]:
    if not serializes and any(widths):
        number = next(number for number, width in enumerate(widths) if width)
        raise ValueError(
            f"Each stage must be mapped to an IPU: stage {number} is a list of functions, but there is no "
            "device_mapping; give one, with a list of devices for this stage"
        )
    return [[0] * width if width else 0 if serializes else number for number, width in enumerate(widths)]


def _devices_of(number: int, width: int | None, devices: object, ipus_per_replica: int) -> tuple[int, ...]:
    if width is None:
        if _is_list(devices):
            raise ValueError(
                f"Each stage must be mapped to an IPU: stage {number} is one function, but mapped to {devices!r}; "
                "give it one device, or make it a list of functions"
            )
        if integer(devices) == _ALL_DEVICES:
            return tuple(range(ipus_per_replica))
        return (_checked(number, devices, ipus_per_replica),)
    if not isinstance(devices, Sequence) or len(devices) != width:
        raise ValueError(
            f"Each stage must be mapped to an IPU: stage {number} is a list of {width} functions, but mapped to "
            f"{devices!r}; give it a list of {width} devices"
        )
    if any(map(_is_list, devices)):
        raise ValueError(
            f"stage {number} is mapped to {devices!r}, lists within a list; concurrent stages cannot be nested: use "
            "one list"
        )
    return tuple(_checked(number, device, ipus_per_replica) for device in devices)


def _device(number: int, device: object) -> int:
    found = integer(device)
    if found is None:
        raise TypeError(
            f"stage {number} is mapped to {device!r}, a {type(device).__name__}; a device is a whole number from 0"
        )
    return found


def _checked(number: int, device: object, ipus_per_replica: int) -> int:
    found = _device(number, device)
    if not 0 <= found < ipus_per_replica:
        raise ValueError(
            f"stage {number} is mapped to device {found}, but a replica spans {ipus_per_replica} devices: use devices "
            f"0 to {ipus_per_replica - 1}, or a larger ipus_per_replica (poprun --ipus-per-replica)"
        )
    return found


# ---- marks

Place: TypeAlias = tuple[int, int]
"""A stage, and the number of a function in it."""

_SCOPE = "pipeline_stage_"
_FUNCTION = "_function_"
_MARK = re.compile(rf"{_SCOPE}(\d+)(?:{_FUNCTION}(\d+))?")
_SHARD = "ipu_shard_"
_ON_SHARD = re.compile(rf"{_SHARD}(\d+)")


def pipeline_stage(stage: int) -> AbstractContextManager[None]:
    """Assign the computations in the block to this stage of a pipeline. Without a pipeline, do nothing.

        def loss_fn(variables, batch, key):
            with strategies.pipeline_stage(0):
                hidden = jnp.tanh(batch["x"] @ variables["first"])
            with strategies.pipeline_stage(1):
                return jnp.mean((hidden @ variables["second"] - batch["y"]) ** 2)

    Code between two stages belongs to the earlier one. Code that depends on no stage belongs to the stages that use its
    results. A scalar that depends on variables alone, such as a penalty, belongs to the stage of these variables.

    Args:
        stage: The number of the stage. Stages must be marked in their order.

    Raises:
        TypeError: If `stage` is no whole number.
        ValueError: If `stage` is negative.
    """
    return jax.named_scope(f"{_SCOPE}{_number('pipeline_stage', 'stages', stage)}")


def ipu_shard(index: int) -> AbstractContextManager[None]:
    """Assign the computations in the block to this device of the replica, in a stage mapped to all of them (-1).

    Semantics: the original's `ipu_shard`. Here the index is only checked: the first device of a stage computes all of
    it, with the same results. Without a pipeline it does nothing.

    Args:
        index: The index of the device.

    Raises:
        TypeError: If `index` is no whole number.
        ValueError: If `index` is negative; or, when the pipeline is traced, if the stage is not on that device.
    """
    return jax.named_scope(f"{_SHARD}{_number('ipu_shard', 'devices', index)}")


def _number(name: str, things: str, given: int) -> int:
    number = integer(given)
    if number is None:
        raise TypeError(f"{name}({given!r}): {things} are numbered with whole numbers, from 0")
    if number < 0:
        raise ValueError(f"{name}({number}): {things} are numbered from 0")
    return number


def function_of_stage(stage: int, function: int) -> AbstractContextManager[None]:
    """Mark one of several functions of a stage that run at the same time; see `pipeline_stage`."""
    return jax.named_scope(f"{_SCOPE}{stage}{_FUNCTION}{function}")


def cut_in_stages(
    graph: Graph, widths: Sequence[int], without: Collection[int] = frozenset(), weights: Collection[int] = ()
) -> tuple[tuple[ProgramSegment, ...], ...]:
    """Cut a loss function at its marks.

    Args:
        graph: The graph of the function.
        widths: The number of functions of each stage.
        without: The numbers of results that no stage computes.
        weights: The numbers of arguments that are weights. Penalties on them belong to the stage that uses them.

    Returns:
        For each stage its segments, one for each of its functions.

    Raises:
        ValueError: If marks are missing, too many, out of order, nested or in a loop; or if a stage reads a result of a
            later one.
    """
    homes = _homes(graph, _marks(graph, len(widths)))
    last = len(widths) - 1, 0
    homes |= _homes_of_penalties(graph, homes, weights, last)
    again = {id(equation) for number, equation in enumerate(graph.equations) if number not in homes}
    places = [(stage, function) for stage, width in enumerate(widths) for function in range(width)]
    results: dict[Place, dict[int, Atom]] = {place: {} for place in places}
    for number, atom in enumerate(graph.results):
        if number not in without:
            results[homes.get(graph.place(atom), last)][number] = atom
    groups = [
        EquationGroup({number for number, home in homes.items() if home == place}, results[place]) for place in places
    ]
    segments = iter(cut(graph, groups, lambda equation: id(equation) in again))
    return tuple(tuple(next(segments) for _ in range(width)) for width in widths)


def check_shard_marks(graph: Graph, mapping: Places) -> None:
    """Raise if an `ipu_shard` names a device that its stage is not on.

    Raises:
        ValueError: For the first such mark.
    """
    for number, (stage, _) in _homes(graph, _marks(graph, len(mapping))).items():
        for device in _shards(graph.equations[number]):
            if device not in mapping[stage]:
                raise ValueError(
                    f"stage {stage} computes something in ipu_shard({device}), but is on "
                    f"{'devices' if len(mapping[stage]) > 1 else 'device'} {', '.join(map(str, mapping[stage]))}; map "
                    "it to all devices, -1, or take the ipu_shard away"
                )


def _shards(equation: Equation) -> list[int]:
    stacks = [str(one.source_info.name_stack) for one in (equation, *_inside(equation))]
    return [int(found) for stack in stacks for found in _ON_SHARD.findall(stack)]


def _inside(equation: Equation) -> Iterator[Equation]:
    return (one for body in bodies(equation) for one in every_equation(body))


def _marks(graph: Graph, stages: int) -> dict[int, Place]:
    """Return the stage of each equation inside a mark."""
    found: dict[int, Place] = {}
    last = 0
    for number, equation in enumerate(graph.equations):
        place = _mark_of(equation)
        if place is None:
            continue
        if place[0] >= stages:
            raise ValueError(
                f"the loss function marks stage {place[0]}, but device_mapping has {stages} stages, numbered from 0; "
                "give it a device for each stage"
            )
        if place[0] < last:
            raise ValueError(
                f"stage {place[0]} is marked after stage {last}, but each stage reads the results of earlier ones; "
                "mark them in their order"
            )
        found[number] = place
        last = place[0]
    if missing := set(range(stages)) - {stage for stage, _ in found.values()}:
        raise ValueError(
            f"stage {min(missing)} is marked nowhere in the loss function, but device_mapping has {stages} stages; "
            f"compute something in `with strategies.pipeline_stage({min(missing)}):`, or take its device out"
        )
    return found


def _mark_of(equation: Equation) -> Place | None:
    marks = _MARK.findall(str(equation.source_info.name_stack))
    if len(marks) > 1:
        raise ValueError(
            f"stage {marks[1][0]} is marked within stage {marks[0][0]}; end a stage before the next one begins"
        )
    if marks:
        return int(marks[0][0]), int(marks[0][1] or 0)
    for inside in _inside(equation):
        if within := _MARK.findall(str(inside.source_info.name_stack)):
            raise ValueError(
                f"stage {within[0][0]} is marked in a {equation.primitive.name}; a stage is run once for each "
                "micro-batch: mark it outside of loops, branches and functions with derivatives of their own"
            )
    return None


def _homes(graph: Graph, marked: Mapping[int, Place]) -> dict[int, Place]:
    """Return the stage of each equation, except of equations that read no value of any stage.

    An equation between stages belongs to the last stage that it reads from. An equation with effects that reads from no
    stage belongs to the first.
    """
    homes: dict[int, Place] = {}
    for number, equation in enumerate(graph.equations):
        read = [homes[place] for place in map(graph.place, variables(equation.invars)) if place in homes]
        if number in marked:
            homes[number] = marked[number]
        elif read or equation.effects:
            homes[number] = max(read, default=(0, 0))
    return homes


def _homes_of_penalties(
    graph: Graph, homes: Mapping[int, Place], weights: Collection[int], last: Place
) -> dict[int, Place]:
    """Return the stage of each equation of a penalty: a scalar of weights alone that only later stages use.

    Equations that depend on a penalty come with it. Keras sums the penalties of its regularizers after the last stage,
    which would have to read the weights of all stages.
    """
    needed = _needed(graph, homes, last)
    behind: dict[Variable, Place] = {  # of a weight the first stage that reads it, of other values the latest of these
        graph.arguments[number]: min(needed[graph.arguments[number]])
        for number in weights
        if needed[graph.arguments[number]]
    }
    found: dict[int, Place] = {}
    for number, equation in enumerate(graph.equations):
        own = max((behind[read] for read in variables(equation.invars) if read in behind), default=None)
        if number in homes or own is None:
            continue
        behind.update(dict.fromkeys(equation.outvars, own))
        before = [found[place] for place in map(graph.place, variables(equation.invars)) if place in found]
        if before or _is_penalty(equation, own, needed):
            found[number] = max([own, *before])
    return found


def _needed(graph: Graph, homes: Mapping[int, Place], last: Place) -> dict[Variable, set[Place]]:
    """Return the stages that read each value, directly or through equations without a stage."""
    needed: dict[Variable, set[Place]] = defaultdict(set)
    for result in variables(graph.results):
        needed[result].add(last)
    for number, equation in reversed(list(enumerate(graph.equations))):
        places = {homes[number]} if number in homes else set().union(*(needed[made] for made in equation.outvars))
        for read in variables(equation.invars):
            needed[read] |= places
    return needed


def _is_penalty(equation: Equation, own: Place, needed: Mapping[Variable, set[Place]]) -> bool:
    places: set[Place] = set().union(*(needed[made] for made in equation.outvars))
    is_number = all(math.prod(made.aval.shape) == 1 for made in equation.outvars)
    return is_number and bool(places) and all(place[0] > own[0] for place in places)
