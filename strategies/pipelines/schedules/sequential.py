"""One micro-batch after another goes through all stages, and all the way back."""

from __future__ import annotations

from strategies.pipelines.schedules.schedule import Schedule, any_number, from_order
from strategies.pipelines.timetable import Action, Kind, Places, Timetable


def sequential(mapping: Places, num_micro_batches: int, training: bool) -> Timetable:
    """The least memory, and no two devices at work: a stage keeps 1 micro-batch.

    Semantics: the original's `PipelineSchedule.Sequential`.
    """
    return from_order(_order(mapping, num_micro_batches, 1, training), mapping, num_micro_batches, training, True)


def serialized(mapping: Places, num_micro_batches: int, training: bool, iterations: int) -> Timetable:
    """Every stage, on its turn, takes this many micro-batches one after another, and keeps as many.

    Semantics: the original's `batch_serialization_iterations`.

    Raises:
        NotImplementedError: if the stages are on several devices.
        ValueError: if the number of micro-batches is no multiple of `iterations`.
    """
    if len({device for devices in mapping for device in devices}) > 1:
        raise NotImplementedError(
            f"batch serialization with stages on devices {list(mapping)}: all must be on one; map all stages to "
            "device 0, or leave batch_serialization_iterations at 1"
        )
    if num_micro_batches % iterations:
        below = num_micro_batches - num_micro_batches % iterations
        raise ValueError(
            f"there are {num_micro_batches} micro-batches, and batch_serialization_iterations is {iterations}; use a "
            f"multiple of it, such as {below or iterations}"
        )
    order = _order(mapping, num_micro_batches, iterations, training)
    return from_order(order, mapping, num_micro_batches, training)


def _order(mapping: Places, num_micro_batches: int, iterations: int, training: bool) -> list[Action]:
    there = [(Kind.FORWARD, stage) for stage in range(len(mapping))]
    back = [(Kind.BACKWARD, stage) for stage in reversed(range(len(mapping)))] if training else []
    return [
        Action(kind, stage, number)
        for first in range(0, num_micro_batches, iterations)
        for kind, stage in there + back
        for number in range(first, first + iterations)
    ]


SCHEDULE = Schedule("sequential", sequential, any_number)
