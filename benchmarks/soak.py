"""Random failures, joins and resizes of small jobs, one after another, with a check that each job ends as promised.

Usage:

    python benchmarks/soak.py [--count 200] [--seed 0] [--first 0] [--prefix "nice"] [--limit-s 120]

The seed determines poprun's reaction, the numbers of instances and spares, and the events: faults (kind, phase, step,
instance; also in a spare that joins, and in the exchange of a recovery), the loss of a spare that sleeps, and
`poprun resize`. A job that completes must have the variables and metrics of one process, to the bit, on every instance
that is active at the end. A job that fails must have the status of the failure and name the instance. If instance 0 is
lost after all others have finished, its output is missing: the job must say so and fail. If no instance with variables
is left, the job must say so and fail. No process may be left. Prints one line for each job, and ends with status 1 if a
promise was broken.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from timing import ROOT, environment

PROGRAM = ROOT / "tests" / "jobs" / "programs" / "surviving_training.py"
STEPS_PER_EPOCH = 4
STEPS = 2 * STEPS_PER_EPOCH
REPLICAS = {2: 8, 3: 6, 4: 8, 5: 10}
STATUS = {"cut": 137, "kill": 137, "exit": 3, "raise": 1, "stop": 124, "delay": 0}
PHASES = ("data", "forward", "all_reduce", "update")
IN_RECOVERY = ("all_gather", "broadcast", "barrier", "forward")
"""The phases of a second fault, which strikes while the others recover from the first one."""
STUCK_S = 10
"""Timeout for stuck instances, in seconds; others wait that long while one compiles in its first step."""
PAUSE_S = 1.5
"""The length of a step in which something happens from outside."""
RESIZE_LIMIT_S = 60
WITHOUT_CHIEF = "instance 0 was lost when all others had finished"
WITHOUT_VARIABLES = ("all instances that had the variables are lost", "no instance is left that has the variables")
MARKER, MINE = "POPDIST_SOAK", uuid.uuid4().hex
"""A variable in the environment of all processes of a job; other runs on this machine have other values."""


@dataclass(frozen=True)
class Fault:
    """A failure inside of a job.

    Attributes:
        kind: Kind of the fault.
        instance: Instance or spare.
        step: Step; None for the first step that reaches the phase.
        phase: Phase of the step.
    """

    kind: str
    instance: int
    step: int | None
    phase: str

    def __str__(self) -> str:
        at = "" if self.step is None else f",step={self.step}"
        seconds = f",seconds={PAUSE_S}" if self.kind == "delay" else ""
        return f"{self.kind}:instance={self.instance}{at},phase={self.phase}{seconds}"


@dataclass(frozen=True)
class Outside:
    """An event from outside of a job.

    Attributes:
        number: Rank of the spare that is killed, or number of instances that are wanted.
        after_s: Time after the start of all processes.
        is_resize: Whether it is a resize.
    """

    number: int
    after_s: float
    is_resize: bool

    def __str__(self) -> str:
        what = f"resize to {self.number}" if self.is_resize else f"SIGKILL of spare {self.number}"
        return f"{what} after {self.after_s:.1f} s"


@dataclass(frozen=True)
class Case:
    """A job and its events.

    Attributes:
        mode: `stop`, `shrink` or `replace`.
        instances: Number of instances.
        spares: Number of spares.
        faults: The failures inside of it.
        outside: The events from outside.
    """

    mode: str
    instances: int
    spares: int
    faults: tuple[Fault, ...]
    outside: tuple[Outside, ...] = ()

    def __str__(self) -> str:
        events = ", ".join(map(str, (*self.faults, *self.outside)))
        return f"{self.mode:>7} {self.instances} instances, {self.spares} spares, {events}"

    @property
    def words(self) -> list[str]:
        """The options for poprun."""
        return [
            *("--on-failure", self.mode, "--stuck-timeout-s", str(STUCK_S), "--max-restarts", "0"),
            *("--num-instances", str(self.instances), "--num-replicas", str(REPLICAS[self.instances])),
            *(("--spares", str(self.spares)) if self.spares else ()),
            *(word for fault in self.faults for word in ("--inject", str(fault))),
        ]

    @property
    def lost(self) -> set[int]:
        """The instances and spares that a fault may end."""
        return {fault.instance for fault in self.faults if fault.kind != "delay"}

    @property
    def least_and_most(self) -> tuple[int, int]:
        """The least and the largest number of instances that may be active at the end."""
        lost = len({each for each in self.lost if each < self.instances})
        is_uncertain = self.outside or any(fault.step in (None, STEPS - 1) for fault in self.faults)
        if is_uncertain or any(each >= self.instances for each in self.lost):
            return 1, self.instances + self.spares
        left = self.instances - lost + min(self.spares, lost)
        return left, left


def draw(random_: random.Random) -> Case:
    """Draw a case; unless its mode is `stop`, at least one instance that has the variables should survive."""
    mode = random_.choice(["replace"] * 5 + ["shrink"] * 2 + ["stop"])
    instances = random_.choice([2, 2, 2, 3, 3, 4, 5])
    spares = random_.randint(1, 2) if mode == "replace" else 0
    if mode == "stop":
        return Case(mode, instances, 0, (draw_fault(random_, random_.randrange(instances)),))
    outside = tuple(draw_outside(random_, instances, spares)) if spares else ()
    most = min(3, instances - 1 + (spares if not outside else 0))
    least = 0 if outside else 1
    return Case(
        mode, instances, spares, tuple(draw_faults(random_, instances, spares, (least, most), bool(outside))), outside
    )


def draw_outside(random_: random.Random, instances: int, spares: int) -> Iterator[Outside]:
    """Draw events from outside: none in half of the cases."""
    for _ in range(random_.choice([0, 0, 1, 2])):
        is_resize = random_.random() < 0.6
        number = random_.randint(1, instances + spares) if is_resize else instances + random_.randrange(spares)
        yield Outside(number, random_.uniform(0.0, 8.0), is_resize)


def draw_faults(
    random_: random.Random, instances: int, spares: int, bounds: tuple[int, int], has_pauses: bool
) -> Iterator[Fault]:
    """Draw failures in different steps, perhaps with another one in the recovery from one; and pauses.

    Args:
        random_: Source of random numbers.
        instances: Number of instances.
        spares: Number of spares.
        bounds: The least and the largest number of failures.
        has_pauses: Whether some steps take longer, so that something from outside happens in them.
    """
    count = min(random_.randint(*bounds), instances)
    victims = random_.sample(range(instances), count)
    steps = sorted(random_.sample(range(STEPS), count))
    for number, (instance, step) in enumerate(zip(victims, steps, strict=True)):
        yield draw_fault(random_, instance, step)
        others = [*victims[number + 1 :], *range(instances, instances + spares)]
        if others and random_.random() < 0.3:
            other = random_.choice(others)
            is_spare = other >= instances
            if is_spare or count < instances:
                yield Fault("kill", other, None if is_spare else step, random_.choice(IN_RECOVERY))
    if has_pauses:
        for step in random_.sample(range(1, STEPS), 2):
            yield Fault("delay", random_.randrange(instances), step, "forward")


def draw_fault(random_: random.Random, instance: int, step: int | None = None) -> Fault:
    kind = random_.choice(sorted(STATUS))
    return Fault(kind, instance, random_.randrange(STEPS) if step is None else step, random_.choice(PHASES))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, metavar="N", help="number of jobs (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the events (%(default)s)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first job (%(default)s)")
    parser.add_argument("--prefix", default="", metavar="WORDS", help="words before the command of each job, e.g. nice")
    parser.add_argument("--limit-s", type=float, default=120.0, metavar="SECONDS", help="time limit (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:  # jobs share their compiled programs
        os.environ |= {
            "JAX_COMPILATION_CACHE_DIR": folder,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        return Soak(options.limit_s, shlex.split(options.prefix)).run(options.count, options.seed, options.first)


class Soak:
    """The runner of jobs.

    Args:
        limit_s: Time limit of a job.
        prefix: Words before the command of each job.
    """

    def __init__(self, limit_s: float, prefix: Sequence[str]) -> None:
        self._limit_s = limit_s
        self._prefix = prefix

    def run(self, count: int, seed: int, first: int) -> int:
        """Run the jobs with their events.

        Args:
            count: Number of jobs.
            seed: Seed of the events.
            first: Number of the first job to run.

        Returns:
            1 if a promise was broken, otherwise 0.
        """
        random_ = random.Random(seed)
        cases = [draw(random_) for _ in range(count)]
        expected: dict[int, list[tuple[str, list[list[float]]]]] = {}
        broken = 0
        for number, case in enumerate(cases[first:], first):
            replicas = REPLICAS[case.instances]
            if replicas not in expected:
                expected[replicas] = found_by(self.make(["--num-replicas", str(replicas)])[0])
            began_s = time.monotonic()
            try:
                ended, said = self.make(case.words, case)
            except subprocess.TimeoutExpired as error:
                print(f"{number:4} {case}: BROKEN: no end within {self._limit_s:g} s: {error.stderr}", flush=True)
                broken += 1
                continue
            fault = fault_of(case, ended, expected[replicas])
            broken += bool(fault)
            end = f"BROKEN: {fault}" if fault else "as promised"
            print(
                f"{number:4} {case}: {end} (status {ended.returncode}, {time.monotonic() - began_s:.1f} s)", flush=True
            )
            for each in said:
                print(f"       {each}", flush=True)
            if fault:
                print(f"{ended.stdout}\n{ended.stderr}", flush=True)
        print(f"{len(cases) - first} jobs, {broken} promises broken")
        return int(broken > 0)

    def make(
        self, words: Sequence[str], case: Case | None = None
    ) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        """Run a job; return its end, and what the commands from outside have said.

        Raises:
            subprocess.TimeoutExpired: The job has not ended within the limit. It is killed.
        """
        command = [*self._prefix, sys.executable, "-m", "poprun", *words]
        command += [sys.executable, str(PROGRAM), str(STEPS_PER_EPOCH)]
        environ = environment(**{MARKER: MINE})
        said: list[str] = []
        with subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as job:
            disturbing = threading.Thread(target=disturb, args=(job, case, said))
            if case is not None and case.outside:
                disturbing.start()
            try:
                out, error = job.communicate(timeout=self._limit_s)
            except subprocess.TimeoutExpired as expired:
                job.terminate()
                _, error = job.communicate()
                raise subprocess.TimeoutExpired(command, self._limit_s, stderr=error) from expired
        if disturbing.ident is not None:
            disturbing.join()
        return subprocess.CompletedProcess(command, job.returncode, out, error), said


def disturb(job: subprocess.Popen[str], case: Case, said: list[str]) -> None:
    """Let the events from outside happen; note what commands say."""
    ranks: dict[int, int] = {}
    while job.poll() is None and len(ranks) < case.instances + case.spares:
        ranks = ranks_of_job()
        time.sleep(0.1)
    began_s = time.monotonic()
    for event in sorted(case.outside, key=lambda event: event.after_s):
        while job.poll() is None and time.monotonic() < began_s + event.after_s:
            time.sleep(0.02)
        if job.poll() is not None:
            said.append(f"{event}: the job had ended")
        elif event.is_resize:
            words = [sys.executable, "-m", "poprun", "resize", str(job.pid), str(event.number)]
            asked = subprocess.run(
                [*words, "--timeout", str(RESIZE_LIMIT_S)],
                env=environment(),
                capture_output=True,
                text=True,
                check=False,
            )
            said.append(f"{event}: {asked.stdout.strip() or asked.stderr.strip()}")
        else:
            try:
                os.kill(ranks[event.number], signal.SIGKILL)
                said.append(f"{event}: killed")
            except ProcessLookupError:
                said.append(f"{event}: it had ended")


def found_by(ended: subprocess.CompletedProcess[str]) -> list[tuple[str, list[list[float]]]]:
    """Return the fingerprint, and the means of all steps, of each instance that completed."""
    # Lines of a job of one instance have no tag.
    lines = [line[line.index("{") :] for line in ended.stdout.splitlines() if "{" in line]
    return [(found["fingerprint"], found["losses"]) for found in map(json.loads, lines)]


def fault_of(case: Case, ended: subprocess.CompletedProcess[str], expected: list[tuple[str, list[list[float]]]]) -> str:
    """Return the broken promise, or "" if all were kept."""
    if left := processes_left():
        return f"processes are left: {left}"
    if case.mode == "stop" and case.lost:
        return fault_of_failure(case.faults[0], ended)
    found = found_by(ended)
    if any(each not in expected for each in found):
        return "wrong variables, or wrong means"
    if ended.returncode == 1 and case.lost and WITHOUT_CHIEF in ended.stderr:
        return ""
    if ended.returncode and case.spares and any(said in ended.stderr for said in WITHOUT_VARIABLES):
        initial = {each for each in case.lost if each < case.instances}
        return "" if len(initial) == case.instances or case.outside else "no instance with variables was left"
    if ended.returncode:
        return f"status {ended.returncode}"
    least, most = case.least_and_most
    if not least <= len(found) <= most:
        return f"{len(found)} instances have results, not {least} to {most}"
    if {each for each in case.lost if each < case.instances} and "the job completed with" not in ended.stderr:
        return "the last line does not name the lost instances"
    return ""


def fault_of_failure(fault: Fault, ended: subprocess.CompletedProcess[str]) -> str:
    """Return the broken promise about a job that stops at its first failure, or ""."""
    first = next((line for line in ended.stderr.splitlines() if " POPRUN [E] " in line), "")
    if ended.returncode != STATUS[fault.kind]:
        return f"status {ended.returncode}, not {STATUS[fault.kind]}"
    return "" if f"instance {fault.instance} on host" in first else f"instance {fault.instance} is not named"


def ranks_of_job() -> dict[int, int]:
    """Return the pid of the program of each rank of the running job."""
    found = {}
    for pid, variables in environments():
        rank, command = variables.get("OMPI_COMM_WORLD_RANK"), (Path("/proc") / str(pid) / "cmdline")
        try:
            is_program = str(PROGRAM).encode() in command.read_bytes().split(b"\0")[1:2]
        except OSError:
            continue
        if rank is not None and is_program:
            found[int(rank)] = pid
    return found


def processes_left() -> list[str]:
    """Return the commands of processes that a job has left."""
    left = []
    for pid, _ in environments():
        try:
            left.append(
                (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
        except OSError:
            continue
    return left


def environments() -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the pid and the environment of each process of the job."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        variables = dict(word.partition("=")[::2] for word in words)
        if variables.get(MARKER) == MINE:
            yield int(folder.name), variables


if __name__ == "__main__":
    sys.exit(main())
