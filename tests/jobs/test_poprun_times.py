"""How soon a job is over: what docs/failures.md promises for a machine with a core for each instance.

That poprun waits no longer than it means to is tested on a fake clock, in tests/poprun/test_job_machine.py. Here the
operating system takes its time too, so a busy machine gets more of it (`Stopwatch`).
"""

from __future__ import annotations

import os
import signal
import sys

import pytest
from poprun_jobs import MPI_HEAD, Job, await_none, start, two
from stopwatch import EVERYTHING, Stopwatch

pytestmark = [pytest.mark.job, pytest.mark.complete, pytest.mark.cores(EVERYTHING), pytest.mark.timeout(240)]

WAITS = "print('ready', rank, flush=True)\nsignal.pause()\n"
LISTENS_TO_NOTHING = (
    "import subprocess\n"
    "subprocess.Popen(['sh', '-c', 'setsid sleep 100 & exec sleep 100'], start_new_session=True)\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    "print('ready', rank, flush=True)\n"
    "while True: signal.pause()\n"
)


def start_two(program: str) -> Job:
    job = start(*two(MPI_HEAD + program))
    for rank in range(2):
        job.wait_for(f"ready {rank}")
    return job


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_one_second_after_an_instance_is_killed(number):
    job = start(*two(MPI_HEAD + "print('pid', rank, os.getpid(), flush=True)\ncomm.Barrier()\nsignal.pause()\n"))
    job.wait_for("pid 1 ")
    (pid,) = [line.split()[-1] for line in job.streams[0].text.splitlines() if "pid 1 " in line]
    os.kill(int(pid), number)
    with Stopwatch() as watch:
        assert job.finish().status == 128 + number
    assert watch.seconds < 1.0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("program", [WAITS, LISTENS_TO_NOTHING], ids=["waiting", "not listening"])
def test_two_seconds_after_a_signal_to_poprun(program, number):
    job = start_two(program)
    job.process.send_signal(number)
    with Stopwatch() as watch:
        assert job.finish().status == 128 + number
    assert watch.seconds < 2.0


def test_one_second_after_a_second_signal():
    job = start_two(LISTENS_TO_NOTHING)
    job.process.send_signal(signal.SIGINT)
    job.process.send_signal(signal.SIGTERM)
    with Stopwatch() as watch:
        assert job.finish().status in (130, 143)
    assert watch.seconds < 1.0


@pytest.mark.parametrize("program", [WAITS, LISTENS_TO_NOTHING], ids=["waiting", "not listening"])
def test_two_seconds_after_sigkill_of_poprun(program):
    job = start_two(program)
    job.process.kill()
    with Stopwatch() as watch:
        await_none(job.marker)
    job.kill()
    assert watch.seconds < 2.0


@pytest.mark.parametrize("generation", ["shim", "keeper", "mpirun"])
def test_one_and_a_half_seconds_after_the_end_of_what_has_started_a_program(generation):
    job = start(sys.executable, "-c", "import os, signal\nprint('shim', os.getppid(), flush=True)\nsignal.pause()\n")
    job.wait_for("\n")
    pid = job.streams[0].text.split()[-1]
    for _ in range(["shim", "keeper", "mpirun"].index(generation)):
        with open(f"/proc/{pid}/stat") as file:
            pid = file.read().rpartition(")")[2].split()[1]
    os.kill(int(pid), signal.SIGKILL)
    with Stopwatch() as watch:
        assert job.finish().status != 0
    assert watch.seconds < 1.5
