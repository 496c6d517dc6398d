"""Launch times of poprun against mpirun alone: time to the first line of output, and to the end.

Both run the same program in turns on the same machine. Usage:

    python benchmarks/launch.py [--instances 2] [--repeats 9] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from poprun.launch.program import find_mpirun  # noqa: E402

PROGRAMS = {
    "echo": ["echo", "first"],
    "python": [sys.executable, "-c", "print('first', flush=True)"],
    "mpi4py": [
        sys.executable,
        "-c",
        "from mpi4py import MPI; print('first', MPI.COMM_WORLD.rank, flush=True)",
    ],
}
LIMIT_MS = 150.0


@dataclass(frozen=True)
class Times:
    """The times of one launch, in milliseconds from the start of the command."""

    first_line_ms: float
    total_ms: float


@dataclass(frozen=True)
class Row:
    """The medians of one program."""

    program: str
    instances: int
    repeats: int
    mpirun: Times
    poprun: Times
    added_first_line_ms: float
    added_total_ms: float
    ratio_first_line: float
    ratio_total: float


def main() -> None:
    options = read_options()
    rows = [measure(name, options.instances, options.repeats) for name in PROGRAMS]
    print_table(rows)
    if options.json:
        result = {"limit_ms": LIMIT_MS, "cores": os.cpu_count(), "rows": [asdict(row) for row in rows]}
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=2, help="instances of a launch (%(default)s)")
    parser.add_argument("--repeats", type=int, default=9, help="launches of each launcher (%(default)s)")
    parser.add_argument("--json", metavar="PATH", help="write the figures to this file")
    return parser.parse_args()


def measure(name: str, instances: int, repeats: int) -> Row:
    """Run both launchers in turns, once to warm up and then `repeats` times."""
    commands = {"mpirun": mpirun_command(name, instances), "poprun": poprun_command(name, instances)}
    times: dict[str, list[Times]] = {launcher: [] for launcher in commands}
    for _ in range(repeats + 1):
        for launcher, command in commands.items():
            times[launcher].append(time_launch(command))
    mpirun, poprun = (medians(times[launcher][1:]) for launcher in ("mpirun", "poprun"))
    return Row(
        program=name,
        instances=instances,
        repeats=repeats,
        mpirun=mpirun,
        poprun=poprun,
        added_first_line_ms=poprun.first_line_ms - mpirun.first_line_ms,
        added_total_ms=poprun.total_ms - mpirun.total_ms,
        ratio_first_line=poprun.first_line_ms / mpirun.first_line_ms,
        ratio_total=poprun.total_ms / mpirun.total_ms,
    )


def mpirun_command(name: str, instances: int) -> list[str]:
    mpirun = find_mpirun(sys.executable, os.environ)
    return [mpirun, "--bind-to", "none", "--oversubscribe", "-np", str(instances), *PROGRAMS[name]]


def poprun_command(name: str, instances: int) -> list[str]:
    count = str(instances)
    options = ["--num-instances", count, "--num-replicas", count]
    return [sys.executable, "-m", "poprun", *options, *PROGRAMS[name]]


def time_launch(command: list[str]) -> Times:
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    began = time.perf_counter()
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | allowed,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        first = time.perf_counter()
        process.stdout.read()
    total = time.perf_counter()
    if process.returncode or b"first" not in line:
        raise SystemExit(f"{command} ended with {process.returncode} after {line!r}")
    return Times(1000 * (first - began), 1000 * (total - began))


def medians(times: list[Times]) -> Times:
    return Times(median(each.first_line_ms for each in times), median(each.total_ms for each in times))


def print_table(rows: list[Row]) -> None:
    print("ms, medians                 first line                         end")
    print("program  instances  mpirun  poprun   added  ratio   mpirun  poprun   added  ratio")
    for row in rows:
        print(
            f"{row.program:<8} {row.instances:>9}"
            f"{row.mpirun.first_line_ms:>8.0f}{row.poprun.first_line_ms:>8.0f}"
            f"{row.added_first_line_ms:>8.0f}{row.ratio_first_line:>7.1f}"
            f"{row.mpirun.total_ms:>9.0f}{row.poprun.total_ms:>8.0f}"
            f"{row.added_total_ms:>8.0f}{row.ratio_total:>7.1f}"
        )


if __name__ == "__main__":
    main()
