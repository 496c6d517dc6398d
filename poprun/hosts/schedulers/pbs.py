"""PBS (OpenPBS, PBS Professional and Torque), whose node file has a line for each slot."""

from __future__ import annotations

from collections.abc import Mapping

from poprun.hosts.schedulers.scheduler import (
    Allocation,
    ReadText,
    Scheduler,
    check_slots,
    host_for_each_line,
    read_file,
)

FILE = "PBS_NODEFILE"
JOB = "PBS_JOBID"
SLOTS = "PBS_NP"
"""A variable that only Torque sets."""


class PbsScheduler(Scheduler):
    """The hosts of `qsub -l select=2:mpiprocs=4`, or of Torque's `-l nodes=2:ppn=4`."""

    variables = (FILE,)

    def allocation(self, environ: Mapping[str, str], read_text: ReadText) -> Allocation:
        """Read the node file."""
        hosts = host_for_each_line(read_file(environ, FILE, read_text).splitlines())
        check_slots(environ, "PBS", (FILE, SLOTS), hosts)
        return Allocation(
            hosts=hosts,
            source=f"PBS job {environ.get(JOB, 'of unknown number')}",
            way_to_more="ask PBS for more (-l select=N:mpiprocs=M, Torque: -l nodes=N:ppn=M)",
        )
