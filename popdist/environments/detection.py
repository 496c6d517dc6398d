"""Detection of the instance that this process is, by all launchers in order."""

from __future__ import annotations

from collections.abc import Mapping

from popdist.environments.environment import Environment
from popdist.environments.flux import FluxTaskEnvironment
from popdist.environments.open_mpi import OpenMPIEnvironment
from popdist.environments.poprun import LEFT_OUT_VARIABLE, PopRunEnvironment
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


def describe_left_out_replicas(instance: Instance, num_replicas: int | None, environ: Mapping[str, str]) -> str:
    """Describe in one line that nobody fixes the number of replicas of several instances; "" if somebody does.

    Args:
        instance: The instance, as `detect_instance` returns it.
        num_replicas: Total number of replicas that the program asks for, or None.
        environ: Environment variables of the process.
    """
    is_poprun = instance.launcher == "poprun"
    is_fixed = num_replicas is not None or (is_poprun and environ.get(LEFT_OUT_VARIABLE) != "1")
    if is_fixed or instance.count == 1:
        return ""
    replicas = instance.total_replicas
    way_out = f"poprun --num-replicas {replicas}" if is_poprun else f"popdist.init({replicas})"
    if instance.launcher == "tf_config":
        way_out += ", or with num_local_replicas of the strategy"
    return (
        f"R = {replicas}: one replica for each of {instance.count} instances, because the number of replicas R was "
        f"left out; another number of instances then trains other results; fix R with {way_out}"
    )


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
