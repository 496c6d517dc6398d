"""Which processes poprun finds to end: all that a program has left, however far down."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from poprun.processes import descendants, state_of

FAMILY = """
import os, sys, time
for generation in range(int(sys.argv[1])):
    if os.fork():
        break
else:
    print(os.getpid(), flush=True)
time.sleep(600)
"""
"""Each generation is the child of the one before; the last one says who it is."""


@pytest.fixture
def family() -> Iterator[tuple[int, int]]:
    """The oldest of four generations, and the youngest."""
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


def test_who_has_ended_and_is_not_yet_waited_for_is_no_descendant() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert ended.stdout is not None
    ended.stdout.read()
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert state_of(ended.pid) == b"Z"
    assert ended.pid not in descendants(os.getpid())
    ended.communicate()
    assert state_of(ended.pid) == b"X"
