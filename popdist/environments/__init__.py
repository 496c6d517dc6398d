"""Who am I: how a process learns which instance it is, one file per launcher.

Nothing here imports numpy, MPI or JAX.
"""

from __future__ import annotations

from collections.abc import Mapping

from popdist.environments.environment import Environment
from popdist.environments.faults import with_faults
from popdist.environments.open_mpi import OpenMPIEnvironment
from popdist.environments.poprun import PopRunEnvironment
from popdist.environments.progress import NoProgress, ProgressPage, ProgressRecord, parse_progress
from popdist.environments.single import SingleEnvironment
from popdist.environments.slurm import SlurmEnvironment, SlurmWithoutPMIxEnvironment
from popdist.environments.stack import show_stack_when_asked
from popdist.environments.sums import complain_of_sums, right_sums_setting
from popdist.environments.tf_config import Cluster, TFConfigEnvironment, read_cluster
from popdist.environments.threads import thread_pool_setting, thread_pool_size
from popdist.instance import Instance

__all__ = [
    "ENVIRONMENTS",
    "Cluster",
    "Environment",
    "NoProgress",
    "OpenMPIEnvironment",
    "PopRunEnvironment",
    "ProgressPage",
    "ProgressRecord",
    "SingleEnvironment",
    "SlurmEnvironment",
    "SlurmWithoutPMIxEnvironment",
    "TFConfigEnvironment",
    "complain_of_sums",
    "detect_instance",
    "parse_progress",
    "read_cluster",
    "right_sums_setting",
    "show_stack_when_asked",
    "thread_pool_setting",
    "thread_pool_size",
    "with_faults",
]

ENVIRONMENTS: tuple[Environment, ...] = (
    PopRunEnvironment(),
    OpenMPIEnvironment(),
    SlurmEnvironment(),
    TFConfigEnvironment(),
    SlurmWithoutPMIxEnvironment(),
    SingleEnvironment(),
)
"""The known environments in the order in which they are tried: the first active one is asked."""


def detect_instance(environ: Mapping[str, str], num_replicas: int | None = None) -> Instance:
    """The instance that this process is.

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
