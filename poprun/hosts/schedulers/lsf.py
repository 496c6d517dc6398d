"""LSF and the environment variables of its jobs (https://www.ibm.com/docs/en/spectrum-lsf)."""

from __future__ import annotations

from collections.abc import Mapping

from popdist.environments.environment import quote
from poprun.errors import UsageError
from poprun.hosts.hosts import Host
from poprun.hosts.schedulers.scheduler import (
    NAME_HOSTS,
    Allocation,
    ReadText,
    Scheduler,
    check_slots,
    host_for_each_line,
    read_file,
)

PAIRS = "LSB_MCPU_HOSTS"
FILE = "LSB_DJOB_HOSTFILE"
JOB = "LSB_JOBID"
SLOTS = "LSB_DJOB_NUMPROC"


class LsfScheduler(Scheduler):
    """The hosts of `bsub -n 8 -R 'span[ptile=4]'`."""

    variables = (PAIRS, FILE)

    def allocation(self, environ: Mapping[str, str], read_text: ReadText) -> Allocation:
        """Read the list of hosts and slots or, without it, the file with a line for each slot."""
        if PAIRS in environ:
            source, hosts = PAIRS, _read_pairs(environ)
        else:
            source, hosts = FILE, host_for_each_line(read_file(environ, FILE, read_text).splitlines())
        check_slots(environ, "LSF", (source, SLOTS), hosts)
        return Allocation(
            hosts=hosts,
            source=f"LSF job {environ.get(JOB, 'of unknown number')}",
            way_to_more="ask LSF for more (bsub -n)",
        )


def _read_pairs(environ: Mapping[str, str]) -> tuple[Host, ...]:
    words = environ[PAIRS].split()
    names, slots = words[::2], words[1::2]
    if len(names) != len(slots) or not all(number.isdecimal() and int(number) for number in slots):
        raise UsageError(f"{quote(environ, [PAIRS])} is not a list of hosts and slots; {NAME_HOSTS}, or unset {PAIRS}")
    return tuple(Host(name, int(number)) for name, number in zip(names, slots, strict=True))
