"""Time of imports: of this project's packages, in ratio to the import of the library that they extend.

Each import runs in interpreters of its own, in turns with the other one. Usage:

    python benchmarks/imports.py [--repeats 5] [--only WORD ...] [--against FOLDER] [--json PATH]
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

from timing import ROOT, environment

NAMES = "import strategies; strategies.PopDistStrategy, strategies.Checkpoints, strategies."
OF_TORCH = "import strategies.torch as ours; ours.distribute_dataset, ours.DistributedModel, ours.Trainer"
PAIRS = (
    ("popdist", "pass", "import popdist"),
    ("collectives", "import numpy", "import collectives"),
    ("strategies", "import jax", "import strategies"),
    ("strategies, names", "import jax", f"{NAMES}Trainer"),
    ("strategies.torch", "import torch", "import strategies.torch"),
    ("strategies.torch, names", "import torch", f"{OF_TORCH}; {NAMES}PopDistStrategy"),
)
"""What is measured, the other library's import, and ours. Names are imported at their first use."""


@dataclass(frozen=True)
class Times:
    """The time of one interpreter from its start to its end, in milliseconds."""

    wall_ms: float
    cpu_ms: float


@dataclass(frozen=True)
class Row:
    """The medians of one pair."""

    name: str
    repeats: int
    other: Times
    ours: Times
    ratio_wall: float
    ratio_cpu: float
    against: Times | None


def main() -> None:
    options = read_options()
    chosen = [pair for pair in PAIRS if any(word in pair[0] for word in options.only or [""])]
    rows = [measure(*pair, options.repeats, options.against) for pair in chosen]
    print_table(rows)
    if options.json:
        result = {"cores": os.cpu_count(), "rows": [asdict(row) for row in rows]}
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="interpreters of each import (%(default)s)")
    parser.add_argument(
        "--only", nargs="*", metavar="WORD", help="measure imports with one of these words in their name"
    )
    parser.add_argument("--against", metavar="FOLDER", help="another checkout of this project to measure as well")
    parser.add_argument("--json", metavar="PATH", help="write the figures to this file")
    return parser.parse_args()


def measure(name: str, other: str, ours: str, repeats: int, against: str | None) -> Row:
    """Run both imports in turns, once to write bytecode and then `repeats` times."""
    programs = {"other": (other, str(ROOT)), "ours": (ours, str(ROOT))}
    if against:
        programs["against"] = ours, against
    times: dict[str, list[Times]] = {each: [] for each in programs}
    for _ in range(repeats + 1):
        for each, (program, folder) in programs.items():
            times[each].append(time_program(program, folder))
    found = {each: medians(those[1:]) for each, those in times.items()}
    of_other, of_ours = found["other"], found["ours"]
    return Row(
        name,
        repeats,
        of_other,
        of_ours,
        of_ours.wall_ms / of_other.wall_ms,
        of_ours.cpu_ms / of_other.cpu_ms,
        found.get("against"),
    )


def time_program(program: str, folder: str) -> Times:
    """Run a program with the packages of a checkout, and return its times."""
    environ = environment(PYTHONDONTWRITEBYTECODE="")
    environ["PYTHONPATH"] = os.pathsep.join([folder, environ["PYTHONPATH"]])
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", program], env=environ, cwd="/")
    _, status, used = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{program!r} ended with {process.returncode}")
    return Times(1000 * wall_s, 1000 * (used.ru_utime + used.ru_stime))


def medians(times: list[Times]) -> Times:
    return Times(median(each.wall_ms for each in times), median(each.cpu_ms for each in times))


def print_table(rows: list[Row]) -> None:
    print("ms, medians                    other            ours         ratio          against")
    print("import                     wall     cpu     wall     cpu   wall   cpu     wall     cpu")
    for row in rows:
        line = f"{row.name:<23}{row.other.wall_ms:>8.0f}{row.other.cpu_ms:>8.0f}"
        line += f"{row.ours.wall_ms:>9.0f}{row.ours.cpu_ms:>8.0f}{row.ratio_wall:>7.2f}{row.ratio_cpu:>6.2f}"
        print(line + (f"{row.against.wall_ms:>9.0f}{row.against.cpu_ms:>8.0f}" if row.against else ""))


if __name__ == "__main__":
    main()
