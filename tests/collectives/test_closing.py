"""Closing communicators, also at the end of the interpreter."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from grpc_jobs import end_of, socket_addresses, start_worker
from grpc_threads import LIMIT_S, WorkerThreads

import collectives
from collectives import Communicator, Settings, run_on_threads
from collectives.backends.single import SingleTransport
from collectives.backends.thread import ThreadHub, ThreadLink
from collectives.clock import FakeClock
from collectives.factory import RankGroup
from collectives.named import NamedQueue
from collectives.network.wire import DaemonThreads
from collectives.point_to_point.transport import PointToPointTransport


def refuse(thread: threading.Thread) -> None:
    """Raise the error of Python 3.12.1 at the end of the interpreter."""
    raise RuntimeError(f"can't create new thread {thread.name} at interpreter shutdown")


@pytest.mark.parametrize("mechanism", ["ring", "window"])
def test_closing_starts_no_thread(monkeypatch: pytest.MonkeyPatch, mechanism: str) -> None:
    """Python 3.12 starts no thread once the interpreter ends, which is when programs close forgotten communicators."""

    def close(communicator: Communicator) -> bool:
        communicator.barrier()
        monkeypatch.setattr(threading.Thread, "start", refuse)
        communicator.barrier()
        communicator.close()
        return True

    assert run_on_threads(2, close, Settings(mechanism=mechanism)) == [True, True]


class Interrupted(threading.Condition):
    """A condition that runs a function as soon as it has been released for the first time."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self._meanwhile = [meanwhile]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._meanwhile:
            self._meanwhile.pop()()


def test_closing_is_announced_even_if_the_thread_has_just_found_no_work() -> None:
    queue = NamedQueue(SingleTransport(), RankGroup(0, ["rank 0"], [0]).watch(Settings()))
    queue._condition = Interrupted(queue.begin_close)
    assert queue.work()  # there is work now
    assert not queue.work()  # all know, and have closed


def test_unused_workers_close_without_new_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket_addresses(3) as addresses, ThreadPoolExecutor(3) as pool:
        workers = WorkerThreads(addresses)
        communicators = list(pool.map(workers.connect, range(3)))
        monkeypatch.setattr(threading.Thread, "start", refuse)
        list(pool.map(Communicator.close, communicators))
        monkeypatch.undo()


def test_the_watch_goes_on_if_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe of a silent worker that cannot start once must not end the watch."""
    tried, has_tried_again = [], threading.Event()

    def refuse_probes(thread: threading.Thread) -> None:
        if thread.name == "collectives-probe-1":
            tried.append(thread)
            if len(tried) > 1:
                has_tried_again.set()
        refuse(thread)

    clock = FakeClock(tick_s=0.001)
    with socket_addresses(2) as addresses:
        workers = WorkerThreads(addresses)
        joining = [workers.join(0, connect_timeout_s=1e6, clock=clock), workers.join(1)]
        communicators = [each.result(LIMIT_S) for each in joining]
        monkeypatch.setattr(threading.Thread, "start", refuse_probes)
        clock.tick_s = 1.0  # the beats of the other worker are rarer now than this worker expects
        assert has_tried_again.wait(LIMIT_S)
        clock.tick_s = 0.0
        monkeypatch.undo()
        for each in communicators:
            each.abandon()


def test_serving_goes_on_if_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception of `submit` would end the thread in which gRPC serves, and its server could not be stopped."""
    monkeypatch.setattr(threading.Thread, "start", refuse)
    unanswered = DaemonThreads().submit(int)
    assert isinstance(unanswered.exception(timeout=0), RuntimeError)


WORKER = """\
import atexit, sys
import collectives
rank, *addresses = sys.argv[1:]
atexit.register(collectives.connect("grpc", addresses=addresses, rank=int(rank)).close)
"""


@pytest.mark.job
@pytest.mark.cores(2)
def test_processes_without_calls_end_well(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(WORKER)
    with socket_addresses(2) as addresses:
        ends = end_of([start_worker(program, [str(rank), *addresses]) for rank in range(2)])
    assert [status for status, _, _ in ends] == [0, 0]
    assert not any("Traceback" in text or "Exception" in text for _, *texts in ends for text in texts), ends


def test_abandoning_an_unused_communicator_ends_its_thread() -> None:
    before = set(threading.enumerate())

    def abandon(communicator: Communicator) -> list[threading.Thread]:
        started = [thread for thread in threading.enumerate() if thread.name == "collectives-named"]
        communicator.barrier()
        communicator.abandon()
        return started

    for thread in {thread for threads in run_on_threads(2, abandon) for thread in threads} - before:
        thread.join(60.0)
        assert not thread.is_alive()


def test_a_single_rank_needs_no_thread() -> None:
    before = set(threading.enumerate())
    with collectives.connect("single") as communicator:
        communicator.barrier()
        assert not set(threading.enumerate()) - before  # some earlier threads may have ended


def test_the_thread_of_a_forgotten_group_ends() -> None:
    before = set(threading.enumerate())

    def forget(communicator: Communicator) -> list[threading.Thread]:
        group = communicator.subgroup(range(2))
        group.barrier()
        started = [thread for thread in threading.enumerate() if thread.name == "collectives-named"]
        communicator.barrier()
        return started

    started = {thread for threads in run_on_threads(2, forget) for thread in threads} - before
    assert len(started) == 4
    gc.collect()
    for thread in started:
        thread.join(60.0)
        assert not thread.is_alive()


def test_a_failure_of_the_named_thread_is_logged_even_if_nobody_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(source: int, to: int) -> None:
        raise MemoryError("no room for a message")

    watch = RankGroup(0, ["rank 0", "rank 1"], range(2)).watch(Settings())
    queue = NamedQueue(PointToPointTransport(ThreadLink(ThreadHub(2, fail), 0, 1), watch), watch)
    queue.begin_close()
    queue.end_close()
    [said] = [record for record in caplog.records if record.message == "the thread of named collectives failed"]
    assert "no room for a message" in (said.exc_text or "")
