"""Workers that die, stop or fall silent: all others soon end with their rank, address and call, or survive."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import pytest
from cut_networks import HOSTS, shrink_send_buffers, unplug
from grpc_jobs import socket_addresses
from mpi_jobs import in_a_job
from workers import (
    LOST_LIMIT_S,
    Job,
    Worker,
    assert_end_well,
    last_line,
    port_addresses,
    running,
    seconds_since,
)

MEBIBYTES_8 = ["--length", str(2 << 20)]
TIMEOUT_S = 4  # longer than a round or a pause on a busy machine


def assert_lost(workers: Sequence[Worker], name: str, operation: str = "all_reduce 'weights'") -> None:
    """Assert that all workers end with an error that names the lost worker and their call."""
    for worker in workers:
        status = worker.end()
        error = last_line(worker)
        assert status == 1, worker.text
        assert error.startswith("collectives.errors.PeerLostError: "), worker.text
        assert name in error
        assert operation in error


def name_of(addresses: Sequence[str], rank: int) -> str:
    return f"rank {rank} at {addresses[rank]}"


# ---- death


@in_a_job
@pytest.mark.parametrize(
    ("kind", "size", "victim"),
    [
        ("port", 3, 1),
        *(
            pytest.param(*case, marks=pytest.mark.complete)
            for case in (("port", 2, 0), ("socket", 3, 2), ("socket", 4, 0))
        ),
    ],
)
def test_a_killed_worker_is_named_by_all_that_wait_for_it(kind: str, size: int, victim: int) -> None:
    with socket_addresses(size) as sockets:
        addresses = port_addresses(size) if kind == "port" else sockets
        with running(Job(addresses, ["--absent", str(victim)]), "away") as workers:
            lost = workers.pop(victim)
            lost.wait_for("is away")
            for worker in workers:
                worker.wait_for("waits")
            lost.kill()
            assert_lost(workers, f"{name_of(addresses, victim)} is lost")


@in_a_job
@pytest.mark.parametrize(
    ("size", "victim"),
    [(3, 0), pytest.param(2, 1, marks=pytest.mark.complete), pytest.param(4, 2, marks=pytest.mark.complete)],
)
def test_a_worker_killed_during_a_reduction_of_8_mib_is_named_and_no_partial_sum_is_seen(
    size: int, victim: int
) -> None:
    """The others notice it in time, and report only complete rounds."""
    addresses = port_addresses(size)
    with running(Job(addresses, MEBIBYTES_8), "rounds") as workers:
        for worker in workers:
            worker.wait_for("round 1 was right")
        started = time.monotonic()
        workers.pop(victim).kill()
        assert_lost(workers, f"{name_of(addresses, victim)} is lost")
        assert seconds_since(started) < 2 * LOST_LIMIT_S
        assert not any(worker.containing("are wrong") for worker in workers)


@in_a_job
@pytest.mark.parametrize(
    ("size", "task", "how"),
    [
        (2, "away", "raise"),
        pytest.param(3, "away", "raise", marks=pytest.mark.complete),
        pytest.param(3, "away", "exit", marks=pytest.mark.complete),
        (3, "forget", "exit"),
    ],
)
def test_a_worker_that_fails_or_ends_without_closing_is_named(size: int, task: str, how: str) -> None:
    """The worker ends by an error, by `sys.exit(0)` in the middle, or at the end of a program that forgets to close."""
    victim = size - 1
    with socket_addresses(size) as addresses, running(Job(addresses, ["--absent", str(victim)]), task) as workers:
        leaving = workers.pop(victim)
        leaving.wait_for("is away")
        for worker in workers:
            worker.wait_for("waits")
        leaving.tell(how)
        assert_lost(workers, name_of(addresses, victim))
        assert leaving.end() == (how == "raise"), leaving.text
        assert how == "exit" or last_line(leaving) == "RuntimeError: out of data"


# ---- slowness


@in_a_job
def test_a_short_stop_of_a_worker_is_survived_and_named() -> None:
    addresses = port_addresses(2)
    with running(Job(addresses, ["--stall-warning-s", "1"]), "rounds") as workers:
        stopped = workers[1]
        for worker in workers:
            worker.wait_for("round 1 was right")
        stopped.stop()
        words = ("WARNING", "rank 0 at", f"for {name_of(addresses, 1)}", "in all_reduce 'weights'")
        workers[0].wait_for(*words, count=4)  # repeated warnings while the wait goes on
        assert workers[0].process.poll() is None
        stopped.resume()
        assert_end_well(workers)


@in_a_job
@pytest.mark.complete
def test_a_worker_stopped_for_too_long_is_named_when_the_others_give_up() -> None:
    addresses = port_addresses(3)
    with running(Job(addresses, ["--timeout-s", str(TIMEOUT_S), *MEBIBYTES_8]), "rounds") as workers:
        for worker in workers:
            worker.wait_for("round 1 was right")
        workers[1].stop()
        others = [workers[0], workers[2]]
        for worker in others:
            assert worker.end() == 1, worker.text
        errors = [last_line(worker) for worker in others]
        timed_out = [error for error in errors if "CollectiveTimeoutError" in error]
        assert timed_out, errors
        for error in timed_out:
            waited_for = error.partition(" has waited ")[2].partition(" in all_reduce 'weights'")[0]
            assert name_of(addresses, 1) in waited_for, error
            assert f"timeout_s = {TIMEOUT_S}" in error


# ---- silence


@contextlib.contextmanager
def running_on(hosts: Sequence[str], task: str, *arguments: str) -> Iterator[tuple[list[str], list[Worker]]]:
    """Run one worker on each host."""
    addresses = [f"{host}:3737" for host in HOSTS]
    job = Job(addresses, arguments, {"POPDIST_GRPC_INSECURE": "1"})
    workers = []
    try:
        for rank, host in enumerate(hosts):
            workers.append(job.start(task, rank, prefix=["ip", "netns", "exec", host]))
        yield addresses, workers
    finally:
        for worker in workers:
            worker.dispose()


@in_a_job
@pytest.mark.complete
def test_workers_notice_a_cut_network_in_time(hosts: Sequence[str]) -> None:
    """The limit is ten seconds, twice as long on a busy machine.

    gRPC may be in the middle of a write that never arrives, for which its connections wait when they are closed.
    Names cannot be looked up any more.
    """
    for host in hosts:
        shrink_send_buffers(host)
    with running_on(hosts, "rounds", "--names-only-at-first", *MEBIBYTES_8) as (addresses, workers):
        for worker in workers:
            worker.wait_for("round 1 was right")
        started = time.monotonic()
        unplug(hosts[0])
        for rank, worker in enumerate(workers):
            assert_lost([worker], f"{name_of(addresses, 1 - rank)} is lost")
        assert seconds_since(started) < 2 * LOST_LIMIT_S
