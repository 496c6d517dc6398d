"""The search for all processes that a program has started, at any depth."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from poprun.ipc.processes import descendants, state_of

FAMILY = """
import os, sys, time
for generation in range(int(sys.argv[1])):
    if os.fork():
        break
else:
    print(os.getpid(), flush=True)
time.sleep(600)
"""
"""Each process is a child of the previous one; the last one prints its pid."""


@pytest.fixture
def family() -> Iterator[tuple[int, int]]:
    """Provide the oldest and the youngest of four generations."""
    command = [sys.executable, "-c", FAMILY, "3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as oldest:
        assert oldest.stdout is not None
        try:
            yield oldest.pid, int(oldest.stdout.readline())
        finally:
            os.killpg(oldest.pid, signal.SIGKILL)


def test_children_of_children_are_found(family: tuple[int, int]) -> None:
    oldest, youngest = family
    assert len(descendants(oldest)) == 3
    assert youngest in descendants(oldest)
    assert oldest not in descendants(oldest)
    assert {oldest, youngest} < set(descendants(os.getpid()))


def test_a_zombie_is_not_a_descendant() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert ended.stdout is not None
    ended.stdout.read()
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert state_of(ended.pid) == b"Z"
    assert ended.pid not in descendants(os.getpid())
    ended.communicate()
    assert state_of(ended.pid) == b"X"


FIRST_THREAD_ENDS = """
import ctypes, subprocess, threading, time
child = subprocess.Popen(["sleep", "600"])
print(child.pid, flush=True)
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
ctypes.CDLL(None).syscall(60, 0)
"""
"""A call of exit(2), which ends only the calling thread; a process being killed looks like that, too."""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of exit(2) is that of x86-64")
def test_children_of_a_process_whose_first_thread_has_ended_are_found() -> None:
    with subprocess.Popen([sys.executable, "-c", FIRST_THREAD_ENDS], stdout=subprocess.PIPE, text=True) as dying:
        assert dying.stdout is not None
        child = int(dying.stdout.readline())
        try:
            while state_of(dying.pid) != b"Z":
                os.sched_yield()
            assert child in descendants(os.getpid())
        finally:
            os.kill(child, signal.SIGKILL)
            dying.kill()
