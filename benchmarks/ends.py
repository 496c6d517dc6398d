"""Time until a job has ended after a failure or signal, against the promises of failure_table.md.

    python benchmarks/ends.py [--repeats 5] [--only WORD ...] [--json PATH]

The promises hold on an idle machine with a core for each instance. A job has ended when poprun has ended and no process
of the job is left; if poprun itself was killed, when no process is left. Prints the median and the longest time of each
row. Needs the packages of the tests (`pip install -e '.[test]'`); without Horovod, the rows of Horovod are left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

from timing import ROOT, Machine, command_line

sys.path.insert(0, str(ROOT / "tests" / "jobs"))
from poprun_jobs import MPI_HEAD, Job, await_none, start, start_mpirun, two  # noqa: E402

TRAINING = (sys.executable, str(ROOT / "tests" / "jobs" / "programs" / "failing_training.py"))
READY = "print('pid', rank, os.getpid(), flush=True)\n"
WAITS = MPI_HEAD + READY + "signal.pause()\n"
LISTENS_TO_NOTHING = (
    MPI_HEAD
    + "import subprocess\n"
    + "subprocess.Popen(['sh', '-c', 'setsid sleep 100 & exec sleep 100'], start_new_session=True)\n"
    + "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    + READY
    + "while True: signal.pause()\n"
)
PROGRAMS = {"programs that wait": WAITS, "programs that listen to nothing": LISTENS_TO_NOTHING}
LIMIT_S = 100.0


@dataclass(frozen=True)
class Case:
    """A failure of a job.

    Attributes:
        name: Name of the row.
        promised_s: Time limit for the end of the job, in seconds.
        begin: Function that starts a job, and returns it when the failure can happen.
        strike: Function that causes the failure.
        is_orphaned: Whether the failure kills poprun, so that no process waits for the job.
    """

    name: str
    promised_s: float
    begin: Callable[[], Job]
    strike: Callable[[Job], None]
    is_orphaned: bool = False

    def measure(self) -> float:
        """Return the seconds from the failure to the end of the job."""
        job = self.begin()
        self.strike(job)
        began_s = time.monotonic()
        if self.is_orphaned:
            await_none(job.marker)
        else:
            job.process.wait(LIMIT_S)
        seconds = time.monotonic() - began_s
        job.kill() if self.is_orphaned else job.finish()
        return seconds


# ---- jobs


def start_two(program: str) -> Job:
    """Start two instances, and wait until they have printed their process IDs."""
    job = start(*two(program))
    for rank in range(2):
        job.wait_for(f"pid {rank} ")
    return job


def start_training(how: str, strategy: str, *launcher: str) -> Job:
    """Start a training of two instances, and wait until instance 1 is at the step in which it fails."""
    words = (*TRAINING, how, strategy)
    job = start_mpirun(2, *words) if launcher else start("--num-replicas=4", "--num-instances=2", *words)
    job.wait_for(".")
    return job


def pid_of(job: Job, rank: int = 1) -> int:
    """Return the process ID that an instance has printed."""
    found = re.search(rf"pid {rank} (\d+)|of process (\d+)\.", job.streams[0].text)
    assert found is not None
    return int(found[1] or found[2])


# ---- failures


def nothing(job: Job) -> None:
    """Do nothing, because the program fails by itself."""


def kill_instance(job: Job, number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(pid_of(job), number)


def kill_ancestor(job: Job, generation: int) -> None:
    """Kill an ancestor of instance 1: its agent, the agent's keeper, or mpirun."""
    pid = pid_of(job)
    for _ in range(generation):
        with open(f"/proc/{pid}/stat") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
    os.kill(pid, signal.SIGKILL)


def telling(*numbers: signal.Signals) -> Callable[[Job], None]:
    """Return a function that sends signals to poprun."""

    def tell(job: Job) -> None:
        for number in numbers:
            job.process.send_signal(number)

    return tell


# ---- the rows


def all_cases() -> list[Case]:
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    waiting = partial(start_two, WAITS)
    return [
        *(
            Case(f"{number.name} for an instance", 1.0, waiting, partial(kill_instance, number=number))
            for number in (signal.SIGKILL, signal.SIGSEGV)
        ),
        *(
            Case(f"SIGKILL for its {name}", 1.5, waiting, partial(kill_ancestor, generation=generation))
            for generation, name in enumerate(("agent", "keeper", "mpirun"), start=1)
        ),
        *(
            Case(f"{number.name} for poprun, {of}", 2.0, partial(start_two, program), telling(number))
            for of, program in PROGRAMS.items()
            for number in signals
        ),
        Case(
            "a second signal for poprun",
            1.0,
            partial(start_two, LISTENS_TO_NOTHING),
            telling(signal.SIGINT, signal.SIGTERM),
        ),
        *(
            Case(f"SIGKILL for poprun, {of}", 2.0, partial(start_two, program), telling(signal.SIGKILL), True)
            for of, program in PROGRAMS.items()
        ),
        *trainings("PopDistStrategy", 1.0),
        *(trainings("IPUHorovodStrategy", 2.0) if importlib.util.find_spec("horovod") else ()),
        *(trainings("IPUHorovodStrategy", 5.0, "mpirun")[:2] if importlib.util.find_spec("horovod") else ()),
    ]


def trainings(strategy: str, promised_s: float, *launcher: str) -> list[Case]:
    """Return the rows of a training whose instance 1 fails, under poprun or mpirun alone."""
    place = f"{strategy}, {launcher[0]} alone" if launcher else strategy
    own = {"raise": "raises", "exit": "exits with 5", "leave": "leaves with 0"}
    begin = partial(start_training, "wait to be killed", strategy, *launcher)
    return [
        Case(f"a training ({place}): an instance is killed", promised_s, begin, kill_instance),
        *(
            Case(
                f"a training ({place}): an instance {what}",
                promised_s,
                partial(start_training, how, strategy, *launcher),
                nothing,
            )
            for how, what in own.items()
        ),
    ]


def main() -> None:
    options = read_options()
    machine = Machine()
    cases = [case for case in all_cases() if not options.only or any(word in case.name for word in options.only)]
    if not cases:
        raise SystemExit(f"no row has one of {', '.join(options.only)} in its name; leave --only out to print all rows")
    print(f"{'s, of ' + str(options.repeats):<75}  median  longest  promised")
    rows = []
    for case in cases:
        seconds = [case.measure() for _ in range(options.repeats)]
        late = "  late" if median(seconds) > case.promised_s else ""
        print(f"{case.name:<75} {median(seconds):>7.2f} {max(seconds):>8.2f} {case.promised_s:>9.1f}{late}", flush=True)
        rows.append({"name": case.name, "promised_s": case.promised_s, "seconds": seconds})
    machine.write(options, ["repeats"], rows=rows)


def read_options() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="measurements of each row (%(default)s)")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="only rows with one of these in the name")
    return parser.parse_args()


if __name__ == "__main__":
    main()
