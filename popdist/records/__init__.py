"""Records that an instance keeps for its supervisor and tools, and the requests that it reads from them.

This package imports neither NumPy nor MPI nor JAX.
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
