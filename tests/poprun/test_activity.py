"""Whether a program does something, with real processes."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from poprun.agent.process_statistics import LOOK_S, Activity, children_of

SLEEPS = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
WRAPPED = f"{shlex.quote(sys.executable)} -c '{SLEEPS}'; true"


@pytest.fixture(params=[(sys.executable, "-c", SLEEPS), ("sh", "-c", WRAPPED)], ids=["alone", "started by sh"])
def program(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """What was started, and the process that matters, which sleeps."""
    with subprocess.Popen(request.param, stdout=subprocess.PIPE, start_new_session=True) as started:
        assert started.stdout is not None
        try:
            yield started.pid, int(started.stdout.readline())
        finally:
            os.killpg(started.pid, signal.SIGKILL)


def await_state(pid: int, state: str) -> None:
    while True:
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] == state:
                return


def test_it_is_stopped_when_the_process_that_matters_is(program: tuple[int, int]) -> None:
    started, worker = program
    await_state(worker, "S")
    activity = Activity(started)
    activity.effort(0.0)
    assert (activity.worker, activity.is_stopped) == (worker, False)
    os.kill(worker, signal.SIGSTOP)
    await_state(worker, "T")
    assert activity.is_stopped
    os.kill(worker, signal.SIGCONT)
    await_state(worker, "S")
    assert not activity.is_stopped


def test_one_that_sleeps_makes_no_effort(program: tuple[int, int]) -> None:
    started, worker = program
    await_state(worker, "S")
    activity = Activity(started)
    before = activity.effort(0.0)
    assert before == activity.effort(LOOK_S) == activity.effort(2 * LOOK_S)


def test_one_that_computes_does_also_in_a_child() -> None:
    program = "import os\nos.fork()\nif os.getppid() != %d: print(end='x', flush=True); any(iter(int, 1))\nos.wait()"
    words = [sys.executable, "-c", program % os.getpid()]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as started:
        assert started.stdout is not None
        try:
            started.stdout.read(1)
            activity = Activity(started.pid)
            efforts = [activity.effort(number * LOOK_S) for number in range(3)]
        finally:
            os.killpg(started.pid, signal.SIGKILL)
    assert efforts == sorted(set(efforts))


def test_it_is_looked_at_once_a_second() -> None:
    activity = Activity(os.getpid())
    before = activity.effort(0.0)
    assert activity.effort(0.5 * LOOK_S) == before
    assert activity.effort(LOOK_S) > before  # this very process


def test_the_process_that_keeps_the_record_is_the_one_that_matters(program: tuple[int, int]) -> None:
    _, worker = program
    activity = Activity(os.getpid())
    activity.note_owner(worker)
    os.kill(worker, signal.SIGSTOP)
    await_state(worker, "T")
    assert activity.is_stopped


def test_who_is_gone_does_nothing() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert children_of(gone.pid) == []
    activity = Activity(gone.pid)
    assert (activity.effort(0.0), activity.is_stopped) == (0.0, False)
