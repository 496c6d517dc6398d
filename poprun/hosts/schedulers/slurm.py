"""Slurm (https://slurm.schedmd.com/sbatch.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from popdist.environments.environment import quote
from popdist.environments.slurm import STEP_SIZE, is_task
from poprun.errors import UsageError
from poprun.hosts.hosts import Host
from poprun.hosts.schedulers.scheduler import NAME_HOSTS, Allocation, ReadText, Scheduler
from poprun.hosts.ssh import SRUN

JOB = "SLURM_JOB_ID"
HOSTS, SLOTS, NUM_HOSTS = "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE", "SLURM_JOB_NUM_NODES"
CPUS = "SLURM_JOB_CPUS_PER_NODE"
STEP_HOSTS, STEP_SLOTS, STEP_NUM_HOSTS = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_NODES"
COMPONENTS = "SLURM_HET_SIZE"
TERMINAL = "SLURM_PTY_PORT"

FOR_MPIRUN = (("SLURM_OVERLAP", "1"), ("SLURM_EXPORT_ENV", "ALL"))
"""The variables with which mpirun's own step reaches the other hosts. Without the first, the step waits for ever inside
of an exclusive step; without the second, its daemons find no variables after `sbatch --export=NONE`."""


class SlurmScheduler(Scheduler):
    """The nodes of a job with the tasks of each; inside of a step, the nodes and tasks of the step."""

    variables = (JOB, HOSTS)

    def allocation(self, environ: Mapping[str, str], read_text: ReadText) -> Allocation:
        """Read the variables of sbatch, salloc or srun."""
        if COMPONENTS in environ:
            raise UsageError(
                f"the Slurm job has {environ[COMPONENTS]} different parts ({quote(environ, [COMPONENTS])}), "
                f"which poprun cannot divide evenly; {NAME_HOSTS}, or start the program with `srun --mpi=pmix`"
            )
        _refuse_several(environ)
        is_step = is_task(environ)
        slots_variable = CPUS if SLOTS not in environ and CPUS in environ else SLOTS
        names = (STEP_HOSTS, STEP_SLOTS, STEP_NUM_HOSTS) if is_step else (HOSTS, slots_variable, NUM_HOSTS)
        missing = [name for name in (JOB, *names) if name not in environ]
        if missing:
            raise UsageError(
                f"the variables of Slurm are incomplete ({quote(environ, (JOB, *names))}); "
                f"set {' and '.join(missing)}, or {NAME_HOSTS}"
            )
        hosts, slots = expand_nodes(environ[names[0]]), expand_counts(environ[names[1]])
        if not len(hosts) == len(slots) == _number(environ, names[2]):
            raise UsageError(
                f"the variables of Slurm contradict each other: {quote(environ, names)} list {len(hosts)} hosts and "
                f"the slots of {len(slots)}; {NAME_HOSTS}"
            )
        return Allocation(
            hosts=tuple(Host(name, number) for name, number in zip(hosts, slots, strict=True)),
            source=f"Slurm job {environ[JOB]}",
            way_to_more="ask Slurm for more tasks (--ntasks)",
            variables=FOR_MPIRUN,
            shell=SRUN,
        )


def expand_nodes(text: str) -> tuple[str, ...]:
    """Return the names in a list such as `gpu[01-03,7],login`, in the order of the list, which the slots follow.

    ClusterShell's NodeSet cannot do this, because it sorts.

    Raises:
        UsageError: The list cannot be understood.
    """
    try:
        return tuple(name for part in _parts(text) for name in _names(part))
    except ValueError:
        raise UsageError(f"the list of hosts {text!r} of Slurm cannot be understood; {NAME_HOSTS}") from None


def expand_counts(text: str) -> tuple[int, ...]:
    """Return the numbers in a list such as `2(x3),1`, one for each host.

    Raises:
        UsageError: The list cannot be understood.
    """
    entries = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry) for entry in text.split(",")]
    if not all(entries):
        raise UsageError(f"the slots {text!r} of Slurm cannot be understood; {NAME_HOSTS}")
    return tuple(int(entry[1]) for entry in entries if entry for _ in range(int(entry[2] or 1)))


def _refuse_several(environ: Mapping[str, str]) -> None:
    """Refuse to run once for each task of a step; a shell with a terminal runs alone, whatever the step's size."""
    if is_task(environ) and environ.get(STEP_SIZE) != "1" and TERMINAL not in environ:
        raise UsageError(
            f"srun started poprun as one of several tasks ({quote(environ, [STEP_SIZE])}), and each would start every "
            "instance; call poprun without srun, or the program with `srun --mpi=pmix`"
        )


def _number(environ: Mapping[str, str], name: str) -> int:
    return int(environ[name]) if environ[name].isdecimal() else -1


def _parts(text: str) -> list[str]:
    """Return the parts between the commas outside of brackets."""
    part = r"(?:[^,\[\]]|\[[\d,-]+\])+"
    if not re.fullmatch(f"{part}(?:,{part})*", text):
        raise ValueError(text)
    return re.findall(part, text)


def _names(part: str) -> Iterator[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    ranges, _, tail = rest.partition("]")
    for piece in ranges.split(","):
        first, _, last = piece.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield from (f"{head}{number:0{len(first)}}{end}" for end in _names(tail))
