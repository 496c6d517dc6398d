"""Detection of the instance that this process is: one file per launcher.

This package does not import NumPy, MPI or JAX. Its names are loaded at their first use, because poprun needs only the
names of variables.
"""

# ruff: noqa: F405 - type checkers find the names in `popdist.environments.detection`

TYPE_CHECKING = False  # replaces `typing.TYPE_CHECKING`: poprun loads parts of this package, and has to start fast
if TYPE_CHECKING:
    from popdist.environments.detection import *  # noqa: F403

__all__ = [
    "ENVIRONMENTS",
    "AloneEnvironment",
    "Cluster",
    "Environment",
    "OpenMPIEnvironment",
    "PopRunEnvironment",
    "SingleEnvironment",
    "SlurmEnvironment",
    "SlurmWithoutPMIxEnvironment",
    "TFConfigEnvironment",
    "detect_instance",
    "read_cluster",
]


def __getattr__(name: str) -> object:
    """Return a name of `popdist.environments.detection`."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import popdist.environments.detection as detection

    return getattr(detection, name)
