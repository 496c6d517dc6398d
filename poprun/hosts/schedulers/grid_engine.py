"""Grid Engine (SGE and its descendants), whose host file has a line for each host and queue (sge_pe(5))."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from poprun.errors import UsageError
from poprun.hosts.hosts import Host
from poprun.hosts.schedulers.scheduler import NAME_HOSTS, Allocation, ReadText, Scheduler, check_slots, read_file

FILE = "PE_HOSTFILE"
SLOTS = "NSLOTS"
JOB = "JOB_ID"

BY_SSH = (("PRTE_MCA_plm_ssh_disable_qrsh", "1"),)
"""Otherwise PRRTE 3 starts its daemons with `qrsh`, and hands it the options for ssh."""


class GridEngineScheduler(Scheduler):
    """The hosts of `qsub -pe mpi 8`."""

    variables = (FILE,)

    def allocation(self, environ: Mapping[str, str], read_text: ReadText) -> Allocation:
        """Read the host file; if several queues give slots of one host, they add up."""
        slots: Counter[str] = Counter()
        for number, line in enumerate(read_file(environ, FILE, read_text).splitlines(), start=1):
            words = line.split()
            if words:
                slots[words[0]] += _slots_in(words, f"{FILE}={environ[FILE]}, line {number}")
        hosts = tuple(Host(name, number) for name, number in slots.items())
        check_slots(environ, "Grid Engine", (FILE, SLOTS), hosts)
        return Allocation(
            hosts=hosts,
            source=f"Grid Engine job {environ.get(JOB, 'of unknown number')}",
            way_to_more="ask Grid Engine for more (qsub -pe NAME N)",
            variables=BY_SSH,
        )


def _slots_in(words: list[str], where: str) -> int:
    if len(words) < 2 or not words[1].isdecimal() or not int(words[1]):
        raise UsageError(f"{where}: {' '.join(words)!r} is not a host with its slots; {NAME_HOSTS}, or unset {FILE}")
    return int(words[1])
