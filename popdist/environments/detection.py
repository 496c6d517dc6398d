"""Detection of the instance that this process is, by all launchers in order."""

from __future__ import annotations

from collections.abc import Mapping

from popdist.environments.environment import Environment
from popdist.environments.flux import FluxTaskEnvironment
from popdist.environments.open_mpi import OpenMPIEnvironment
from popdist.environments.poprun import PopRunEnvironment
from popdist.environments.single import AloneEnvironment, SingleEnvironment
from popdist.environments.slurm import SlurmEnvironment, SlurmWithoutPMIxEnvironment
from popdist.environments.tf_config import TFConfigEnvironment
from popdist.instance import Instance

ENVIRONMENTS: tuple[Environment, ...] = (
    AloneEnvironment(),
    PopRunEnvironment(),
    OpenMPIEnvironment(),
    SlurmEnvironment(),
    TFConfigEnvironment(),
    SlurmWithoutPMIxEnvironment(),
    FluxTaskEnvironment(),
    SingleEnvironment(),
)
"""All environments in detection order: the first active environment describes the instance."""


def detect_instance(environ: Mapping[str, str], num_replicas: int | None = None) -> Instance:
    """Detect which instance of the job this process is.

    Args:
        environ: Environment variables of the process; programs pass `os.environ`.
        num_replicas: Total number of replicas that the program asks for. None: the launcher's number, or one replica
            per instance if the launcher gives none.

    Raises:
        EnvironmentMismatchError: The variables are incomplete or unreadable, or they contradict each other or
            `num_replicas`.
    """
    active = next(environment for environment in ENVIRONMENTS if environment.is_active(environ))
    return active.describe(environ, num_replicas)
