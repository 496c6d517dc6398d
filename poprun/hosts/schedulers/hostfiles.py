"""The default hostfiles of Open MPI, which mpirun too uses outside of a batch system, and of Kubernetes.

The operators of Kubeflow (https://github.com/kubeflow/mpi-operator, v2beta1, and https://github.com/kubeflow/trainer)
mount a hostfile in the launcher of an MPIJob or TrainJob, and name it in a variable of Open MPI 4, which Open MPI 5
ignores.
"""

from __future__ import annotations

from collections.abc import Mapping

from poprun.errors import UsageError
from poprun.hosts.hosts import Host, parse_hostfile
from poprun.hosts.schedulers.scheduler import NAME_HOSTS, Allocation, ReadText, Scheduler, read_file

VARIABLES = (
    "PRTE_MCA_prte_default_hostfile",  # Open MPI 5
    "OMPI_MCA_orte_default_hostfile",  # Open MPI 4
)
NO_FILE = "none"
"""The value with which mpirun reads no hostfile, not even that of the installation."""

ROLE = "K_MPI_JOB_ROLE"
LAUNCHER = "launcher"
DEFAULT_PATH = "/etc/mpi/hostfile"

SHORT_NAMES = (("PRTE_MCA_prte_keep_fqdn_hostnames", "0"),)
"""If Open MPI 5 keeps the domains, it takes the launcher's own name in the hostfile for another host, and calls ssh
(https://github.com/kubeflow/trainer/issues/4028). The names of pods differ before the first dot."""


class KubernetesScheduler(Scheduler):
    """The pods of an MPIJob or a TrainJob; the launcher is among them only if the job runs it as a node."""

    variables = (ROLE, *VARIABLES)

    def allocation(self, environ: Mapping[str, str], read_text: ReadText) -> Allocation | None:
        """Read the operator's hostfile; only the MPI Operator sets a variable for the role."""
        variable = hostfile_variable(environ)
        if environ.get(ROLE) != LAUNCHER and (variable is None or environ[variable] != DEFAULT_PATH):
            return None
        if variable is None:
            raise UsageError(
                f"this is the launcher of an MPIJob ({ROLE}={LAUNCHER}), but the MPIJob is not for Open MPI; "
                f"set `mpiImplementation: OpenMPI` in it, or {NAME_HOSTS}"
            )
        return Allocation(
            hosts=read_hosts(environ, variable, read_text),
            source="the MPI job of Kubernetes",
            way_to_more="raise slotsPerWorker of the MPIJob, or numProcPerNode of the TrainJob",
            variables=SHORT_NAMES,
            may_be_starting=True,
        )


class OpenMPIHostfile(Scheduler):
    """The hostfile that a variable of Open MPI names."""

    variables = VARIABLES

    def allocation(self, environ: Mapping[str, str], read_text: ReadText) -> Allocation | None:
        """Read the file; `slots=` is the number of instances that a host takes."""
        variable = hostfile_variable(environ)
        if variable is None:
            return None
        path = environ[variable]
        return Allocation(
            hosts=read_hosts(environ, variable, read_text),
            source=f"the hostfile {path} ({variable})",
            way_to_more=f"raise slots= in {path}",
        )


def hostfile_variable(environ: Mapping[str, str]) -> str | None:
    """Return the variable that names the default hostfile; if both are set, the newer Open MPI's counts."""
    return next((name for name in VARIABLES if environ.get(name, NO_FILE) not in ("", NO_FILE)), None)


def read_hosts(environ: Mapping[str, str], variable: str, read_text: ReadText) -> tuple[Host, ...]:
    """Return the hosts in the hostfile that a variable names."""
    return parse_hostfile(read_file(environ, variable, read_text), environ[variable])
