"""In every slot a device works on one micro-batch: on a forward pass, and in the next slot on a backward pass."""

from __future__ import annotations

from collections import Counter

from strategies.pipelines.schedules.schedule import Schedule, in_slots, visits
from strategies.pipelines.timetable import Places, Timetable


def interleaved(mapping: Places, num_micro_batches: int, training: bool) -> Timetable:
    """Less memory than grouped: a stage keeps N + 1 micro-batches, N stages being behind it.

    Semantics: the original's `PipelineSchedule.Interleaved`.

    Raises:
        NotImplementedError: in training, if a device is that of several stages.
    """
    repeated = [device for device, count in Counter(one for each in mapping for one in each).items() if count > 1]
    if training and repeated:
        raise NotImplementedError(
            f"The pipelining schedule 'Interleaved' trains with one stage on each device, and device {repeated[0]} "
            "has several; use 'Grouped', 'Sequential' or 'OneForwardOneBackward', or a device for each stage"
        )
    begins, round_length = offsets(mapping, training), len(visits(mapping, training))
    turns = [divmod(number, len(begins)) for number in range(num_micro_batches)]
    slots = [whole * round_length + begins[place] for whole, place in turns]
    return in_slots(mapping, num_micro_batches, training, slots)


def offsets(mapping: Places, training: bool) -> list[int]:
    """The slots of a round in which a micro-batch begins: as many as go without two visits of a device in a slot.

    An offset is taken if its visits, and those of the offsets before it, are never on one device at once.
    """
    there = visits(mapping, training)
    taken: list[int] = []
    for offset in range(len(there)):
        if all(_keep_apart(there, (offset - other) % len(there)) for other in taken):
            taken.append(offset)
    return taken


def _keep_apart(there: list[frozenset[int]], distance: int) -> bool:
    return all(not devices & there[place - distance] for place, devices in enumerate(there))


def overlap(mapping: Places, training: bool) -> int:
    """The number of `offsets`."""
    return len(offsets(mapping, training))


SCHEDULE = Schedule("interleaved", interleaved, overlap)
