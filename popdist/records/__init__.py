"""Notes of an instance about itself for others, and what they ask of it.

Nothing here imports numpy, MPI or JAX.
"""

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
