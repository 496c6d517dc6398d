"""The public names of `popdist`, which the package loads at their first use."""

from popdist import horovod
from popdist.cluster_resolver import TFConfigClusterResolver
from popdist.context import (
    communicator,
    finalizeBackend,
    init,
    initializeBackend,
    instance,
    is_chief,
    isBackendInitialized,
    progress,
    registerBackend,
    registerDefaultBackend,
)
from popdist.errors import (
    EnvironmentMismatchError,
    InstanceError,
    LaunchError,
    LifeCycleError,
    NotInitializedError,
    PopDistError,
)
from popdist.groups import defaultCommunicatorId, execute_on_instances, registerCommunicator, synchronize
from popdist.instance import Instance
from popdist.launcher import launch
from popdist.leaving import can_carry_on, carry_on
from popdist.queries import (
    checkNumIpusPerReplica,
    getDeviceId,
    getInstanceIndex,
    getLocalInstanceIndex,
    getNumInstances,
    getNumIpusPerReplica,
    getNumLocalReplicas,
    getNumTotalReplicas,
    getReplicaIndexOffset,
    isPopdistEnvSet,
)
from popdist.tensors import allgather, allreduce, broadcast
from popdist.version import __version__
from popdist.xla import thread_pool_size

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
