"""The devices of a pipeline's stages, and the number of micro-batches that go through it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeGuard

from strategies.argument_checks import integer, positive, wrong_type
from strategies.errors import FailedPreconditionError
from strategies.pipelines.schedules import PipelineSchedule, Schedule, schedule_named, serialized
from strategies.pipelines.timetable import Places, Timetable
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


def refuse_idle_devices(device_mapping: DeviceMapping) -> None:
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
