"""A default hostfile of Open MPI, which mpirun too uses where there is no batch system."""

from __future__ import annotations

from collections.abc import Mapping

from poprun.hosts.hosts import Host, parse_hostfile
from poprun.hosts.schedulers.scheduler import Allocation, ReadText, Scheduler, read_file

VARIABLES = (
    "PRTE_MCA_prte_default_hostfile",  # Open MPI 5
    "OMPI_MCA_orte_default_hostfile",  # Open MPI 4
)
NO_FILE = "none"
"""What the variables say to have mpirun read no file, not even that of the installation."""


class OpenMPIHostfile(Scheduler):
    """The hostfile that one of Open MPI's variables names."""

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
    """Return the variable that names the default hostfile; that of the newer Open MPI counts where both do."""
    return next((name for name in VARIABLES if environ.get(name, NO_FILE) not in ("", NO_FILE)), None)


def read_hosts(environ: Mapping[str, str], variable: str, read_text: ReadText) -> tuple[Host, ...]:
    """Return the hosts in the file that a variable names."""
    return parse_hostfile(read_file(environ, variable, read_text), environ[variable])
