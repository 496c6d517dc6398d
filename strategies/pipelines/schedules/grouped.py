"""All stages work in every slot, each on another micro-batch: first its backward passes, then its forward passes."""

from __future__ import annotations

from strategies.pipelines.schedules.schedule import Schedule, in_slots, visits
from strategies.pipelines.timetable import Places, Timetable


def grouped(mapping: Places, num_micro_batches: int, training: bool) -> Timetable:
    """The shortest time for the most memory: a stage keeps 2N + 1 micro-batches, N stages being behind it.

    A micro-batch begins in every slot. Semantics: the original's `PipelineSchedule.Grouped`.
    """
    return in_slots(mapping, num_micro_batches, training, range(num_micro_batches))


def overlap(mapping: Places, training: bool) -> int:
    """As many as a micro-batch makes visits."""
    return len(visits(mapping, training))


SCHEDULE = Schedule("grouped", grouped, overlap)
