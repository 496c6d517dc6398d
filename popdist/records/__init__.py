"""An instance's records for its supervisor and tools, and their requests to the instance.

This package does not import NumPy, MPI or JAX.
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
