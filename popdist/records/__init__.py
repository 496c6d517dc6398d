"""An instance's records for its supervisor and tools, and their requests to the instance.

This package does not import NumPy, MPI or JAX. Its names are loaded at their first use, because poprun needs few.
"""

# ruff: noqa: F405 - type checkers find the names in `popdist.records.public`

TYPE_CHECKING = False  # replaces `typing.TYPE_CHECKING`: poprun loads parts of this package, and has to start fast
if TYPE_CHECKING:
    from popdist.records.public import *  # noqa: F403

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


def __getattr__(name: str) -> object:
    """Return a name of `popdist.records.public`."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import popdist.records.public as public

    return getattr(public, name)
