"""The identity of a process: which instance it is, one file per launcher.

Nothing here imports numpy, MPI or JAX.
"""

from __future__ import annotations

from collections.abc import Mapping

from popdist.environments.environment import Environment
from popdist.environments.open_mpi import OpenMPIEnvironment
from popdist.environments.poprun import PopRunEnvironment
from popdist.environments.single import AloneEnvironment, SingleEnvironment
from popdist.environments.slurm import SlurmEnvironment, SlurmWithoutPMIxEnvironment
from popdist.environments.tf_config import Cluster, TFConfigEnvironment, read_cluster
from popdist.instance import Instance

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

ENVIRONMENTS: tuple[Environment, ...] = (
    AloneEnvironment(),
    PopRunEnvironment(),
    OpenMPIEnvironment(),
    SlurmEnvironment(),
    TFConfigEnvironment(),
    SlurmWithoutPMIxEnvironment(),
    SingleEnvironment(),
)
"""The known environments in the order in which they are tried: the first active one is asked."""


def detect_instance(environ: Mapping[str, str], num_replicas: int | None = None) -> Instance:
    """Return the instance that this process is.

    Args:
        environ: the variables of the process; programs pass `os.environ`.
        num_replicas: the replicas of all instances that the program asks for. None: what the launcher says,
            otherwise one per instance.

    Raises:
        EnvironmentMismatchError: the variables are incomplete, unreadable, or contradict each other or
            `num_replicas`.
    """
    active = next(environment for environment in ENVIRONMENTS if environment.is_active(environ))
    return active.describe(environ, num_replicas)
