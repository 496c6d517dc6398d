"""Random failures of small jobs, one after another, with a check that each job ends as promised.

Usage:

    python benchmarks/soak.py [--count 200] [--seed 0] [--first 0]

The seed determines the kind, phase, step, instance, number of instances and poprun's reaction. A job that completes,
even without lost instances, must have the variables of one process, to the bit. A job that fails must have the status
of the failure and name the instance. If instance 0 is lost after all others have finished, its output is missing: the
job must say so and fail. No process may be left. Prints one line for each failure, and ends with status 1
if a promise was broken.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from timing import ROOT, environment

PROGRAM = ROOT / "tests" / "jobs" / "programs" / "surviving_training.py"
STEPS_PER_EPOCH = 4
STEPS = 2 * STEPS_PER_EPOCH
REPLICAS = {2: 8, 3: 6, 4: 8}
STATUS = {"cut": 137, "kill": 137, "exit": 3, "raise": 1, "stop": 124, "delay": 0}
PHASES = ("data", "forward", "all_reduce", "update")
LIMIT_S = 120.0
STUCK_S = 10
"""Timeout for stuck instances, in seconds; others wait that long while one compiles in its first step."""
WITHOUT_CHIEF = "instance 0 was lost when all others had finished"
MARKER, MINE = "POPDIST_SOAK", uuid.uuid4().hex
"""A variable in the environment of all processes of a job; other runs on this machine have other values."""


@dataclass(frozen=True)
class Case:
    """A job and its failures.

    Attributes:
        mode: `stop` or `shrink`.
        instances: Number of instances.
        faults: Kind, instance, step and phase of each failure.
    """

    mode: str
    instances: int
    faults: tuple[tuple[str, int, int, str], ...]

    @property
    def words(self) -> list[str]:
        """The options for poprun."""
        faults = [f"{kind}:instance={i},step={step},phase={phase}" for kind, i, step, phase in self.faults]
        replicas = REPLICAS[self.instances]
        return [
            *("--on-failure", self.mode, "--stuck-timeout-s", str(STUCK_S)),
            *("--num-instances", str(self.instances), "--num-replicas", str(replicas)),
            *(word for fault in faults for word in ("--inject", fault)),
        ]

    @property
    def lost(self) -> set[int]:
        """The instances that do not complete."""
        return {instance for kind, instance, *_ in self.faults if kind != "delay"}


def draw(random_: random.Random) -> Case:
    """Draw a case; in the mode `shrink` at least one instance survives."""
    mode = random_.choice(["shrink", "shrink", "stop"])
    instances = random_.choice(sorted(REPLICAS))
    count = random_.randint(1, min(2, instances - 1)) if mode == "shrink" else 1
    faults = []
    for instance in random_.sample(range(instances), count):
        phase = random_.choice(PHASES)
        kind, step = random_.choice(sorted(STATUS)), random_.randrange(STEPS)
        faults.append((kind, instance, step, phase))
    return Case(mode, instances, tuple(faults))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, metavar="N", help="number of failures (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the failures (%(default)s)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first failure (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:  # jobs share their compiled programs
        os.environ |= {
            "JAX_COMPILATION_CACHE_DIR": folder,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        return soak(options.count, options.seed, options.first)


def soak(count: int, seed: int, first: int) -> int:
    """Run the jobs with their failures.

    Args:
        count: Number of failures.
        seed: Seed of the failures.
        first: Number of the first failure to run.

    Returns:
        1 if a promise was broken, otherwise 0.
    """
    random_ = random.Random(seed)
    cases = [draw(random_) for _ in range(count)]
    expected = {replicas: found_by(run(["--num-replicas", str(replicas)])) for replicas in set(REPLICAS.values())}
    broken = 0
    for number, case in enumerate(cases[first:], first):
        began_s = time.monotonic()
        try:
            ended = run(case.words)
        except subprocess.TimeoutExpired as error:
            print(f"{number:4} {case}: BROKEN: no end within {LIMIT_S:g} s: {error.stderr}", flush=True)
            broken += 1
            continue
        fault = fault_of(case, ended, expected[REPLICAS[case.instances]])
        broken += bool(fault)
        what = ", ".join(f"{kind} instance {i} in step {s}, {phase}" for kind, i, s, phase in case.faults)
        end = f"BROKEN: {fault}" if fault else "as promised"
        print(f"{number:4} {case.mode:>6} {case.instances} instances, {what}: {end}", end="")
        print(f" ({time.monotonic() - began_s:.1f} s)", flush=True)
        if fault:
            print(ended.stderr, flush=True)
    print(f"{len(cases) - first} failures, {broken} promises broken")
    return int(broken > 0)


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "poprun", *words, sys.executable, str(PROGRAM), str(STEPS_PER_EPOCH)]
    return subprocess.run(
        command, env=environment(**{MARKER: MINE}), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def found_by(ended: subprocess.CompletedProcess[str]) -> list[tuple[str, list[list[float]]]]:
    """Return the fingerprint, and the means of all steps, of each instance that completed."""
    # Lines of a job of one instance have no tag.
    lines = [line[line.index("{") :] for line in ended.stdout.splitlines() if "{" in line]
    return [(found["fingerprint"], found["losses"]) for found in map(json.loads, lines)]


def fault_of(case: Case, ended: subprocess.CompletedProcess[str], expected: list[tuple[str, list[list[float]]]]) -> str:
    """Return the broken promise, or "" if all were kept."""
    if left := processes_left():
        return f"processes are left: {left}"
    if case.mode == "shrink" or not case.lost:
        if ended.returncode == 1 and 0 in case.lost and WITHOUT_CHIEF in ended.stderr:
            return ""
        if ended.returncode:
            return f"status {ended.returncode}"
        if found_by(ended) != expected * (case.instances - len(case.lost)):
            return "wrong variables, wrong means, or too few instances"
        end = f"the job completed without {len(case.lost)} instance" if case.lost else ""
        return "" if end in ended.stderr else "the last line does not name the lost instances"
    kind, instance, *_ = case.faults[0]
    first = next((line for line in ended.stderr.splitlines() if " POPRUN [E] " in line), "")
    if ended.returncode != STATUS[kind]:
        return f"status {ended.returncode}, not {STATUS[kind]}"
    return "" if f"instance {instance} on host" in first else f"instance {instance} is not named"


def processes_left() -> list[str]:
    """Return the commands of processes that a job has left."""
    mark = f"{MARKER}={MINE}".encode()
    left = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                left.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return left


if __name__ == "__main__":
    sys.exit(main())
