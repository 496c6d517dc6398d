"""The PopDist queries. Without a launcher they describe one instance with one replica."""

from __future__ import annotations

import os

from popdist.context import instance
from popdist.environments.environment import read_whole_number
from popdist.environments.poprun import DEVICE, TOTAL
from popdist.records.recording import note_question


def isPopdistEnvSet() -> bool:
    """Return whether poprun started this process."""
    return TOTAL in os.environ


def getNumTotalReplicas() -> int:
    """Return the number of replicas of all instances."""
    return instance().total_replicas


def getNumLocalReplicas() -> int:
    """Return the number of replicas of this instance."""
    note_question("popdist.getNumLocalReplicas")
    return instance().local_replicas


def getReplicaIndexOffset() -> int:
    """Return the global index of this instance's first replica."""
    note_question("popdist.getReplicaIndexOffset")
    return instance().replica_offset


def getNumIpusPerReplica() -> int:
    """Return the number of devices that one replica spans."""
    return instance().ipus_per_replica


def checkNumIpusPerReplica(num_ipus_per_replica: int) -> bool:
    """Return whether the job was launched with this number of devices per replica."""
    return getNumIpusPerReplica() == num_ipus_per_replica


def getNumInstances() -> int:
    """Return the number of instances of the job."""
    note_question("popdist.getNumInstances")
    return instance().count


def getInstanceIndex() -> int:
    """Return the index of this instance, 0 to `getNumInstances() - 1`."""
    note_question("popdist.getInstanceIndex")
    return instance().index


def getLocalInstanceIndex() -> int:
    """Return the index of this instance among the instances of its host."""
    note_question("popdist.getLocalInstanceIndex")
    return instance().local_index


def getDeviceId(ipusPerReplica: int = 0) -> int:
    """Return the id of a device for this instance. The instances of a host get consecutive ids.

    The id is a device of the partition that poprun was given, otherwise the instance's index on its host.

    Args:
        ipusPerReplica: Number of devices that one replica needs; 0 stands for the launched number.

    Raises:
        ValueError: The job was launched with another number.
        EnvironmentMismatchError: The variable that names the device holds no number.
    """
    if ipusPerReplica and not checkNumIpusPerReplica(ipusPerReplica):
        raise ValueError(
            f"a device for {ipusPerReplica} IPUs per replica was asked for, but the job was launched with "
            f"{getNumIpusPerReplica()}; give poprun --ipus-per-replica {ipusPerReplica}"
        )
    if DEVICE in os.environ:
        return read_whole_number(os.environ, DEVICE, 0)
    return getLocalInstanceIndex()
