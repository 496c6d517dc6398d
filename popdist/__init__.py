"""The PopDist interface: the identity of an instance, and the joint operations of a job's instances.

The import is cheap: the first use of a public name loads the interface, and `init` loads NumPy, MPI and the
collectives.
"""

# ruff: noqa: F405 - type checkers find the names in `popdist.public`

from popdist.instance import Instance as Instance
from popdist.version import __version__ as __version__

TYPE_CHECKING = False  # replaces `typing.TYPE_CHECKING`: poprun loads parts of this package, and has to start fast
if TYPE_CHECKING:
    from popdist.public import *  # noqa: F403

__all__ = [
    "EnvironmentMismatchError",
    "Instance",
    "InstanceError",
    "LaunchError",
    "LifeCycleError",
    "NotInitializedError",
    "PopDistError",
    "TFConfigClusterResolver",
    "__version__",
    "allgather",
    "allreduce",
    "broadcast",
    "can_carry_on",
    "carry_on",
    "checkNumIpusPerReplica",
    "communicator",
    "defaultCommunicatorId",
    "execute_on_instances",
    "finalizeBackend",
    "getDeviceId",
    "getInstanceIndex",
    "getLocalInstanceIndex",
    "getNumInstances",
    "getNumIpusPerReplica",
    "getNumLocalReplicas",
    "getNumTotalReplicas",
    "getReplicaIndexOffset",
    "horovod",
    "init",
    "initializeBackend",
    "instance",
    "isBackendInitialized",
    "isPopdistEnvSet",
    "is_chief",
    "launch",
    "progress",
    "registerBackend",
    "registerCommunicator",
    "registerDefaultBackend",
    "synchronize",
    "thread_pool_size",
]

# The import of a submodule makes it an attribute of its package. This one would hide the function of the same name.
del globals()["instance"]


def __getattr__(name: str) -> object:
    """Load all public names at the first use of one."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import popdist.public as public

    globals().update({each: getattr(public, each) for each in __all__})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
