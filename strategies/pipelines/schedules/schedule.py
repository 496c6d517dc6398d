"""What a schedule is, and the pieces of which schedules are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from strategies.pipelines.timetable import PARTS, Action, Kind, Places, Timetable


class MakeTimetable(Protocol):
    """A pure function: the same arguments give the same timetable."""

    def __call__(self, mapping: Places, num_micro_batches: int, training: bool) -> Timetable:
        """Raises ValueError or NotImplementedError for what the schedule cannot do."""


@dataclass(frozen=True)
class Schedule:
    """A way to order the actions of a pipeline. Each file of this folder has one, with the name `SCHEDULE`.

    Attributes:
        name: by which it is found.
        timetable: makes the timetable.
        overlap: (mapping, training) -> of what number of micro-batches the original takes multiples only.
    """

    name: str
    timetable: MakeTimetable
    overlap: Callable[[Places, bool], int]


def any_number(mapping: Places, training: bool) -> int:
    """Number of micro-batches that a schedule without rounds needs multiples of: 1."""
    return 1


def stages_after(mapping: Places, stage: int) -> int:
    """How many stages come behind a stage."""
    return len(mapping) - 1 - stage


def visits(mapping: Places, training: bool) -> list[frozenset[int]]:
    """The devices that a micro-batch visits, one place after another: forward, and back again where it trains."""
    there = [frozenset(devices) for devices in mapping]
    return [*there, *reversed(there)] if training else there


def in_slots(mapping: Places, num_micro_batches: int, training: bool, begins: Sequence[int]) -> Timetable:
    """A timetable in lock-step: a micro-batch makes one visit in each slot.

    A device that is visited several times in a slot takes the older micro-batch first: what it has kept for the
    backward pass is freed before more is kept.

    Args:
        mapping: of stages to devices.
        num_micro_batches: as many as `begins`.
        training: whether they come back.
        begins: the slots in which micro-batches begin.
    """
    last = 2 * len(mapping) - 1
    slots: list[tuple[int, int, Action]] = []
    for micro_batch, begin in enumerate(begins):
        for stage in range(len(mapping)):
            slots.append((begin + stage, micro_batch, Action(Kind.FORWARD, stage, micro_batch)))
            if training:
                slots.append((begin + last - stage, micro_batch, Action(Kind.BACKWARD, stage, micro_batch)))
    ordered = [action for *_, action in sorted(slots, key=lambda slot: slot[:2])]
    return from_order(ordered, mapping, num_micro_batches, training)


def from_order(
    actions: Iterable[Action], mapping: Places, num_micro_batches: int, training: bool, in_turn: bool = False
) -> Timetable:
    """A timetable in which devices have these actions in this order, and updates behind them."""
    updates = [Action(Kind.UPDATE, stage, None) for stage in range(len(mapping))] if training else []
    devices: list[list[Action]] = [[] for _ in range(1 + max(max(devices) for devices in mapping))]
    for action in [*actions, *updates]:
        for device in sorted(set(mapping[action.stage])):
            devices[device].append(action)
    return Timetable(tuple(map(tuple, devices)), mapping, num_micro_batches, training, in_turn)


def forwards(mapping: Places, num_micro_batches: int) -> list[list[Action]]:
    """For each stage its forward passes."""
    return [
        [Action(Kind.FORWARD, stage, number) for number in range(num_micro_batches)] for stage in range(len(mapping))
    ]


def merged(sequences: Sequence[Sequence[Action]], mapping: Places, num_micro_batches: int, training: bool) -> Timetable:
    """A timetable that keeps the order of each stage's actions.

    A device with several stages does what is ready first; of several the backward pass first, and the oldest
    micro-batch. There is always one, if there is one for sequences on devices of their own.
    """
    apart = from_order(
        [action for sequence in sequences for action in sequence],
        tuple((stage,) for stage in range(len(mapping))),
        num_micro_batches,
        training,
    )
    devices = [0.0] * (1 + max(max(devices) for devices in mapping))
    place = [0] * len(mapping)
    ended: dict[Action, float] = {action: float("inf") for sequence in sequences for action in sequence}
    order: list[Action] = []
    while len(order) < len(ended):
        ready = []
        for stage, sequence in enumerate(sequences):
            if place[stage] < len(sequence):
                action = sequence[place[stage]]
                times = [ended[one] for one in apart.dependencies(action)]
                begin = max([*times, *[devices[device] for device in mapping[stage]]])
                ready.append((begin, action.kind is Kind.FORWARD, action.micro_batch or 0, -stage, action))
        begin, *_, action = min(ready, key=lambda one: one[:4])
        end = begin + PARTS.get(action.kind, 1)
        for device in mapping[action.stage]:
            devices[device] = end
        ended[action] = end
        place[action.stage] += 1
        order.append(action)
    return from_order(order, mapping, num_micro_batches, training)
