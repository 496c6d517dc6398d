"""The names of `popdist.records`, which the package loads at their first use."""

from popdist.records.faults import FaultInjector, due_faults
from popdist.records.progress import Made, NoProgress, Progress, ProgressPage, ProgressRecord, parse_progress
from popdist.records.watched import Waits, show_stack_when_asked

__all__ = [
    "FaultInjector",
    "Made",
    "NoProgress",
    "Progress",
    "ProgressPage",
    "ProgressRecord",
    "Waits",
    "due_faults",
    "parse_progress",
    "show_stack_when_asked",
]
