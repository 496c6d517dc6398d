"""The detection of circular waits."""

from __future__ import annotations

import threading

import pytest

from collectives.deadlock import Key, WaitingThreads, crossed_ranks

A, B, C = ("a", 0), ("b", 0), ("c", 0)


@pytest.mark.parametrize(
    ("waits", "announced", "crossed"),
    [
        ([[A], [B]], {A: {0}, B: {1}}, [0, 1]),
        ([[A], None], {A: {0}, B: {1}}, []),
        ([None, None], {A: {0}, B: {1}}, []),
        ([[A], [A]], {}, []),  # the collective is ending
        ([[A, B], [C]], {A: {0}, B: {0}, C: {1}}, [0, 1]),
        ([[A, B], [C]], {A: {0}, B: {0, 1}, C: {1}}, []),
        ([[A, B], [B]], {A: {0}}, []),  # b has ended
        ([[A], [B], None], {A: {0}, B: {1}}, [0, 1]),
        ([[A], [B], [A]], {A: {0, 2}, B: {1}}, [0, 1, 2]),
        ([[A], [B], [C]], {A: {0}, B: {1}, C: {2}}, [0, 1, 2]),
        ([[A], [B], None], {A: {0, 1}, B: {0, 1}}, []),  # rank 2 may start them one after the other
        ([[A], [B], None], {A: {0, 1}, B: {1}}, []),
        ([[A], [("a", 1)]], {A: {0}, ("a", 1): {1}}, [0, 1]),
    ],
)
def test_ranks_in_a_circular_wait_that_nobody_can_end_are_found(
    waits: list[list[Key] | None], announced: dict[Key, set[int]], crossed: list[int]
) -> None:
    assert crossed_ranks(waits, announced) == crossed


class Started:
    """A collective that a thread waits for."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.has_ended = False

    def done(self) -> bool:
        return self.has_ended


def test_a_rank_waits_only_if_all_threads_that_may_start_collectives_wait() -> None:
    waits, release = WaitingThreads(), threading.Event()
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    quiet = all(thread.daemon for thread in others)  # unless another test has left idle threads in this process
    mine = Started(A)
    assert waits.if_all_wait() is None
    with waits.until(mine):
        assert waits.if_all_wait() == ([A] if quiet else None)
        for daemon in (True, False):
            thread = threading.Thread(target=release.wait, daemon=daemon)
            thread.start()
            assert waits.if_all_wait() == ([A] if quiet and daemon else None)
            release.set()
            thread.join()
            release.clear()
        mine.has_ended = True
        assert waits.if_all_wait() is None
        mine.has_ended = False
        waits.expect_others()
        assert waits.if_all_wait() is None
    assert waits.if_all_wait() is None


def test_a_daemon_thread_that_has_started_a_collective_may_do_so_again() -> None:
    waits, release, has_started = WaitingThreads(), threading.Event(), threading.Event()

    def start() -> None:
        waits.add_starter()
        has_started.set()
        release.wait()

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    has_started.wait()
    with waits.until(Started(A)):
        assert waits.if_all_wait() is None
    release.set()
    thread.join()
