"""Statistics of an instance's processes: CPU time, stops, memory, and kills for lack of memory."""

from __future__ import annotations

import os
import resource
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from poprun.agent.process_statistics import LOOK_S, RECENT_S, Activity, MemoryUse, OutOfMemory, children_of

SLEEPS = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
WRAPPED = f"{shlex.quote(sys.executable)} -c '{SLEEPS}'; true"


@pytest.fixture(params=[(sys.executable, "-c", SLEEPS), ("sh", "-c", WRAPPED)], ids=["alone", "started by sh"])
def program(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """Provide the pids of the started process and of the worker process, which sleeps."""
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


def test_activity_is_stopped_if_the_worker_is_stopped(program: tuple[int, int]) -> None:
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


def test_a_sleeping_program_uses_no_cpu_time(program: tuple[int, int]) -> None:
    started, worker = program
    await_state(worker, "S")
    activity = Activity(started)
    before = activity.effort(0.0)
    assert before == activity.effort(LOOK_S) == activity.effort(2 * LOOK_S)


def test_cpu_time_of_a_child_counts() -> None:
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


def test_cpu_time_is_read_once_a_second() -> None:
    activity = Activity(os.getpid())
    before = activity.effort(0.0)
    assert activity.effort(0.5 * LOOK_S) == before
    assert activity.effort(LOOK_S) > before  # this very process


def test_the_process_that_keeps_the_record_is_the_worker(program: tuple[int, int]) -> None:
    _, worker = program
    activity = Activity(os.getpid())
    activity.note_owner(worker)
    os.kill(worker, signal.SIGSTOP)
    await_state(worker, "T")
    assert activity.is_stopped


def test_an_ended_process_has_no_activity() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert children_of(gone.pid) == []
    activity = Activity(gone.pid)
    assert (activity.effort(0.0), activity.is_stopped) == (0.0, False)


MIB = 2**20


def test_memory_use_agrees_with_the_kernel():
    held = bytearray(os.urandom(1)) * (64 * MIB)
    now, most = MemoryUse().look(os.getpid(), 0.0)
    assert len(held) < now <= most
    assert most <= 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + 64 * MIB


def test_memory_is_read_once_a_second():
    memory = MemoryUse()
    now, most = memory.look(os.getpid(), 5.0)
    assert memory.look(2**22 + 1, 5.0 + LOOK_S / 2) == (now, most)
    assert memory.look(2**22 + 1, 5.0 + LOOK_S) == (0, most), "no process has that number"


def test_the_peak_memory_is_known_after_the_end_without_earlier_looks():
    held = f"import os; held = os.urandom({100 * MIB})"
    with subprocess.Popen([sys.executable, "-c", held]) as process:
        _, _, used = os.wait4(process.pid, 0)
        process.returncode = 0
    memory = MemoryUse()
    memory.note_end(used.ru_maxrss)
    assert memory.look(process.pid, 0.0)[1] > 100 * MIB


OLD = "9:name=systemd:/\n4:cpuset,memory:/a/b\n0::/\n"
NEW = "0::/a/b\n"
EVENTS = "low 0\nhigh 3\nmax 2\noom 1\noom_kill {}\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


@pytest.fixture(
    params=[
        (OLD, "memory/a/b/memory.oom_control", CONTROL),
        (NEW, "a/b/memory.events", EVENTS),
        (OLD, "memory/memory.oom_control", CONTROL),
        (NEW, "memory.events", EVENTS),
    ],
    ids=["first version", "second version", "first in a container", "second in a container"],
)
def counter(request, tmp_path):
    """Provide a memory cgroup and a function that sets its counter of kills."""
    cgroups, name, text = request.param
    (tmp_path / "cgroup").write_text(cgroups)
    file = tmp_path / "root" / name
    file.parent.mkdir(parents=True)

    def count(kills: int) -> None:
        file.write_text(text.format(kills))

    count(2)
    return OutOfMemory(str(tmp_path / "cgroup"), str(tmp_path / "root")), count


def test_earlier_kills_do_not_count(counter):
    memory, _ = counter
    assert not memory.has_just_killed(100.0)


def test_a_risen_counter_is_found(counter):
    memory, count = counter
    count(3)
    assert memory.has_just_killed(100.0)


def test_only_a_recent_rise_counts(counter):
    memory, count = counter
    memory.look(99.0)
    count(3)
    memory.look(100.0)
    assert memory.has_just_killed(100.0 + RECENT_S)
    assert not memory.has_just_killed(100.1 + RECENT_S)


def test_no_kill_is_found_without_a_counter(tmp_path):
    assert not OutOfMemory(str(tmp_path / "nowhere"), str(tmp_path)).has_just_killed(0.0)
    (tmp_path / "memory.events").write_text("low 0\n")
    (tmp_path / "cgroup").write_text(NEW)
    assert not OutOfMemory(str(tmp_path / "cgroup"), str(tmp_path)).has_just_killed(0.0)
