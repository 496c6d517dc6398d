"""Marks of stages in a loss function, and the cut of the function at these marks."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

import jax

from strategies.argument_checks import integer
from strategies.jax.programs.jaxpr import (
    Atom,
    Equation,
    EquationGroup,
    Graph,
    Variable,
    bodies,
    cut,
    every_equation,
    variables,
)
from strategies.jax.programs.segments import Part, ProgramSegment
from strategies.pipelines.timetable import Places

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
    parts: dict[Place, dict[Part, Atom]] = {place: {} for place in places}
    for number, atom in enumerate(graph.results):
        if number not in without:
            parts[homes.get(graph.place(atom), last)][Part(number)] = atom
    groups = [
        EquationGroup({number for number, home in homes.items() if home == place}, parts[place]) for place in places
    ]
    segments = iter(cut(graph, groups, lambda equation: id(equation) in again))
    return tuple(tuple(next(segments) for _ in range(width)) for width in widths)


def refuse_other_shards(graph: Graph, mapping: Places) -> None:
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
