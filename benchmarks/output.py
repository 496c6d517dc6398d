"""The cost of showing a job's output: instances that write 1 MB/s each, against silent instances.

All instances compute the same number of steps. They print the same lines through poprun (`shown`), into /dev/null
(`nowhere`, the program's own cost of printing), or not at all (`silent`). The number of lines gives the requested rate
on an idle machine; on a busy machine a job takes longer, and ratios of times mean little. Two more kinds of instances
only sleep, and print at the requested rate in any case (`paced`) or nothing (`resting`). They give the share of the
machine's processor time that poprun and its agents take at this rate.

The output is checked: every line is there, whole and in order. Usage:

    python benchmarks/output.py [--instances 8] [--rate 1e6] [--line-bytes 100] [--seconds 4] [--repeats 5] [--files]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from statistics import median

from timing import Machine, command_line, environment

BLOCK_BYTES = 1 << 20
SETTINGS = ("instances", "rate", "line_bytes", "seconds", "repeats", "files")
PROGRAM = """\
import hashlib, os, sys, time
steps, lines, line_bytes = map(int, sys.argv[1:4])
seconds, kind, folder = float(sys.argv[4]), *sys.argv[5:]
rank = os.environ["OMPI_COMM_WORLD_RANK"]
block, filling, line = bytes(1 << 20), "x" * (line_bytes - 11), 0
show = print if kind in ("nowhere", "shown", "paced") else lambda line: None
def compute():
    for step in range(steps):
        hashlib.sha256(block).digest()
        yield (step + 1) / steps
def sleep():
    while time.monotonic() < began + seconds:
        time.sleep(0.005)
        yield min(1.0, (time.monotonic() - began) / seconds)
    yield 1.0
if kind == "nowhere":
    sys.stdout = open(os.devnull, "w", buffering=1)
began, computed = time.monotonic(), time.process_time()
for done in sleep() if kind in ("resting", "paced") else compute():
    while line < int(lines * done):
        show(f"{line:010d}{filling}")
        line += 1
with open(f"{folder}/{rank}", "w") as file:
    print(time.monotonic() - began, time.process_time() - computed, file=file)
"""
KINDS = ("silent", "nowhere", "shown", "resting", "paced")
SHOWN = ("shown", "paced")


@dataclass(frozen=True)
class Job:
    """The times of one job, in seconds.

    Attributes:
        took_s: Time of the slowest instance from its first step to its last.
        programs_s: Processor time of the programs meanwhile.
        other_s: Processor time of poprun and of all other processes that it started.
    """

    took_s: float
    programs_s: float
    other_s: float


def main() -> None:
    options = read_options()
    machine = Machine()
    steps = count_steps(options.seconds, options.instances)
    jobs: dict[str, list[Job]] = {kind: [] for kind in KINDS}
    for _ in range(options.repeats):
        for kind in KINDS:
            jobs[kind].append(run_job(kind, steps, options))
    medians = {kind: median_job(each) for kind, each in jobs.items()}
    ratios = compare(medians, jobs)
    print_table(medians, ratios)
    machine.write(options, SETTINGS, ratios=ratios, jobs={kind: asdict(job) for kind, job in medians.items()})


def read_options() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--instances", type=int, default=8, help="instances of a job (%(default)s)")
    parser.add_argument("--rate", type=float, default=1e6, help="bytes per second of each instance (%(default)s)")
    parser.add_argument("--line-bytes", type=int, default=100, help="bytes of a line (%(default)s)")
    parser.add_argument("--seconds", type=float, default=4.0, help="approximate length of a job (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="jobs of each kind (%(default)s)")
    parser.add_argument("--files", action="store_true", help="let poprun also write into --output-dir")
    return parser.parse_args()


def count_steps(seconds: float, instances: int) -> int:
    """Return the number of steps that every instance can compute in that time on this machine when it is idle."""
    block = bytes(BLOCK_BYTES)
    began = time.process_time()
    for _ in range(200):
        hashlib.sha256(block).digest()
    step_s = (time.process_time() - began) / 200
    share = min(1.0, len(os.sched_getaffinity(0)) / instances)
    return max(1, int(seconds * share / step_s))


def run_job(kind: str, steps: int, options: argparse.Namespace) -> Job:
    """Run one job, and check its output."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "times").mkdir()
        lines = int(options.rate * options.seconds / options.line_bytes)
        arguments = [steps, lines, options.line_bytes, options.seconds, kind, folder / "times"]
        extra = ["--output-dir", str(folder / "output")] if options.files and kind in SHOWN else []
        before = children_s()
        with open(folder / "shown", "wb") as shown:
            command = poprun_command(options.instances, extra, map(str, arguments))
            finished = subprocess.run(command, env=environment(), stdin=subprocess.DEVNULL, stdout=shown, check=False)
        all_s = children_s() - before
        if finished.returncode:
            raise SystemExit(f"poprun ended with {finished.returncode}; the reason is above")
        rows = [list(map(float, (folder / "times" / str(n)).read_text().split())) for n in range(options.instances)]
        if kind in SHOWN:
            check(folder / "shown", [lines] * options.instances, options.line_bytes)
    took_s, programs_s = zip(*rows, strict=True)
    return Job(max(took_s), sum(programs_s), all_s - sum(programs_s))


def poprun_command(instances: int, extra: Sequence[str], arguments: Sequence[str] | map[str]) -> list[str]:
    numbers = ["--num-instances", str(instances), "--num-replicas", str(instances)]
    return [sys.executable, "-m", "poprun", *numbers, *extra, sys.executable, "-c", PROGRAM, *arguments]


def children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def check(shown: Path, counts: Sequence[int], line_bytes: int) -> None:
    """Check that every line of every instance is there, whole and in order.

    Raises:
        SystemExit: If a line is missing, torn or in the wrong place.
    """
    due = [count() for _ in counts]
    filling = b"x" * (line_bytes - 11) + b"\n"
    with open(shown, "rb") as lines:
        for line in lines:
            instance = int(line[3 : line.index(b"]")])
            if line != b"[1,%d]<stdout>:%010d" % (instance, next(due[instance])) + filling:
                raise SystemExit(f"a line of instance {instance} is torn or in the wrong place: {line[:60]!r}")
    missing = [written - next(shown) for written, shown in zip(counts, due, strict=True)]
    if any(missing):
        raise SystemExit(f"lines are missing, by instance: {missing}")


def median_job(jobs: Sequence[Job]) -> Job:
    rows = [asdict(job) for job in jobs]
    return Job(**{name: median(row[name] for row in rows) for name in rows[0]})


def compare(medians: dict[str, Job], jobs: dict[str, list[Job]]) -> dict[str, float]:
    """Return ratios; ratios of times are medians over pairs of consecutive jobs.

    The cost of starting a job counts on neither side: `other_s` is the difference to a silent job.
    """
    silent = medians["silent"]
    spent = {kind: job.programs_s + job.other_s - silent.other_s for kind, job in medians.items()}
    return {
        "time, shown / silent": paired(jobs, "shown", "silent"),
        "time, shown / nowhere": paired(jobs, "shown", "nowhere"),
        "processor time, shown / silent": spent["shown"] / spent["silent"],
        "processor time, nowhere / silent": spent["nowhere"] / spent["silent"],
        "processor time, shown / nowhere": spent["shown"] / spent["nowhere"],
        "share of the machine, poprun and agents": share_of_machine(medians["paced"], medians["resting"]),
    }


def share_of_machine(paced: Job, resting: Job) -> float:
    """Return the share of all cores' time that poprun and its agents take to show the output, at the requested rate."""
    return (paced.other_s - resting.other_s) / (paced.took_s * len(os.sched_getaffinity(0)))


def paired(jobs: dict[str, list[Job]], loud: str, quiet: str) -> float:
    return median(one.took_s / other.took_s for one, other in zip(jobs[loud], jobs[quiet], strict=True))


def print_table(medians: dict[str, Job], ratios: dict[str, float]) -> None:
    print("medians       s  programs, CPU s  all else, CPU s")
    for kind, job in medians.items():
        print(f"{kind:<8}{job.took_s:>7.2f}{job.programs_s:>17.2f}{job.other_s:>17.2f}")
    print()
    for name, ratio in ratios.items():
        print(f"{name:<40}{ratio:>6.3f}")


if __name__ == "__main__":
    main()
