"""Kubernetes: the launcher of an MPIJob, https://github.com/kubeflow/mpi-operator (v2beta1).

The operator mounts a hostfile and sets Open MPI's variable for it; to Open MPI 5 that variable means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from poprun.errors import UsageError
from poprun.hosts.schedulers.open_mpi_hostfile import VARIABLES, hostfile_variable, read_hosts
from poprun.hosts.schedulers.scheduler import NAME_HOSTS, Allocation, ReadText, Scheduler

ROLE = "K_MPI_JOB_ROLE"
LAUNCHER = "launcher"
DEFAULT_PATH = "/etc/mpi/hostfile"


class KubernetesScheduler(Scheduler):
    """The workers of an MPIJob; the launcher itself is not one of them."""

    variables = (ROLE, *VARIABLES)

    def allocation(self, environ: Mapping[str, str], read_text: ReadText) -> Allocation | None:
        """Read the operator's hostfile; older operators set only the variable of the hostfile."""
        variable = hostfile_variable(environ)
        if environ.get(ROLE) != LAUNCHER and (variable is None or environ[variable] != DEFAULT_PATH):
            return None
        if variable is None:
            raise UsageError(
                f"this is the launcher of an MPIJob ({ROLE}={LAUNCHER}) that is not for Open MPI; "
                f"write `mpiImplementation: OpenMPI` into it, or {NAME_HOSTS}"
            )
        return Allocation(
            hosts=read_hosts(environ, variable, read_text),
            source="the MPIJob of Kubernetes",
            way_to_more="raise slotsPerWorker of the MPIJob",
        )
