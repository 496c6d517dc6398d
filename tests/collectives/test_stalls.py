"""Absent ranks: warnings that name them, then an error with the same facts."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from losing import meeting_point
from watching import LIMIT_S, watched

from collectives import (
    BrokenError,
    BusyError,
    CollectiveError,
    CollectiveTimeoutError,
    Communicator,
    Limits,
    PeerLostError,
    Settings,
    run_on_threads,
)
from collectives.calls import Call
from collectives.clock import FakeClock
from collectives.instruments import Instruments

MECHANISMS = pytest.mark.parametrize("mechanism", ["ring", "window"])
SIZES = pytest.mark.parametrize("size", [2, 3])
LENGTHS = pytest.mark.parametrize("length", [7, 300_001])


def patient(mechanism: str) -> Settings:
    """Return settings with a warning at every third look at the clock, and no timeout."""
    return Settings(mechanism=mechanism, limits=Limits(timeout_s=float("inf"), clock=FakeClock(tick_s=10.0)))


def timed_by(clock: FakeClock, mechanism: str) -> Settings:
    """Return settings with the usual limits: a warning every 30 s, and the timeout after 600 s."""
    return Settings(mechanism=mechanism, limits=Limits(clock=clock))


def short_ticks() -> FakeClock:
    """Return a clock that lets waits reach their sleep, but not their limit."""
    return FakeClock(tick_s=1e-5)


@MECHANISMS
@SIZES
@LENGTHS
def test_repeated_warnings_name_the_waiting_and_the_absent_rank_and_the_call(
    mechanism: str, size: int, length: int
) -> None:
    with watched() as warnings:

        def program(communicator: Communicator) -> float:
            buffer = np.ones(length, np.float32)
            if communicator.rank == size - 1:
                for rank in range(size - 1):
                    warnings.wait_for(3, f"rank {rank} has waited", f"for rank {size - 1} in all_reduce 'weights'")
            return float(communicator.all_reduce(buffer, name="weights")[-1])

        assert run_on_threads(size, program, patient(mechanism)) == [size] * size


@MECHANISMS
def test_all_late_ranks_are_named(mechanism: str) -> None:
    with watched() as warnings:

        def program(communicator: Communicator) -> None:
            if communicator.rank != 1:
                warnings.wait_for(1, "rank 1 has waited", "for rank 0, rank 2 in barrier 'epoch'")
            communicator.barrier(name="epoch")

        run_on_threads(3, program, patient(mechanism))


@MECHANISMS
def test_a_short_wait_gets_no_warning(mechanism: str) -> None:
    with watched() as warnings:
        run_on_threads(2, lambda communicator: communicator.barrier(), timed_by(short_ticks(), mechanism))
    assert warnings.texts == []


class Noted:
    """An instrument that sees waits for rank 1, and a supervisor; it sees slow connections, too."""

    def __init__(self) -> None:
        self.waits: list[tuple[int, ...]] = []
        self.labels: list[bytes] = []
        self.has_noted = threading.Event()
        self.is_released = False

    def operation_begins(self, number: int, call: Call) -> None:
        self.labels.append(call.label)

    def operation_ends(self) -> None:
        self.labels.append(b"left")

    def carry_on(self, lost: int) -> None:
        raise AssertionError("nobody is lost")

    def waiting_for(self, instances) -> None:
        self.waits.append(tuple(instances))
        if 1 in instances:
            self.has_noted.set()


@MECHANISMS
def test_the_progress_record_shows_the_call_and_the_awaited_ranks(mechanism: str) -> None:
    noted = Noted()

    def program(communicator: Communicator) -> None:
        if communicator.rank == 1:
            assert noted.has_noted.wait(LIMIT_S)
        communicator.all_reduce(np.ones(7), name="weights")

    run_on_threads(2, program, Settings(mechanism=mechanism, progress=Instruments(noted)))
    assert (1,) in noted.waits
    assert noted.labels.count(b"all_reduce 'weights'") == 2
    assert b"left" in noted.labels


@MECHANISMS
def test_a_supervisor_ends_a_useless_wait(mechanism: str) -> None:
    noted = Noted()
    instruments = Instruments(noted, supervisor=noted)
    has_ended = threading.Event()

    def program(communicator: Communicator) -> None:
        if communicator.rank == 0:
            with pytest.raises(PeerLostError, match="rank 0 has waited .* for rank 1 in all_reduce 'weights'"):
                communicator.all_reduce(np.ones(7), name="weights")
            has_ended.set()
        else:
            assert noted.has_noted.wait(LIMIT_S)
            noted.is_released = True
            assert has_ended.wait(LIMIT_S)
        communicator.abandon()

    run_on_threads(2, program, Settings(mechanism=mechanism, progress=instruments))


@MECHANISMS
@pytest.mark.parametrize(("size", "length"), [(2, 7), (3, 300_001)])
def test_a_wait_that_is_too_long_fails_with_the_same_facts(mechanism: str, size: int, length: int) -> None:
    all_are_connected, has_failed = meeting_point(size), meeting_point(size)
    clock = short_ticks()

    def program(communicator: Communicator) -> None:
        all_are_connected.wait()
        if communicator.rank == size - 1:
            clock.tick_s = 10.0
        else:
            with pytest.raises(CollectiveTimeoutError) as caught:
                communicator.all_reduce(np.ones(length, np.float32), name="weights")
            text = str(caught.value)
            assert f"rank {communicator.rank} has waited" in text
            assert f"for rank {size - 1}" in text or size > 2
            assert "in all_reduce 'weights'" in text
            assert "timeout_s = 600" in text
            with pytest.raises(BrokenError, match="all_reduce 'weights'.* failed before"):
                communicator.barrier()
            with pytest.raises(BrokenError):
                communicator.start_all_reduce(np.ones(3), name="later")
        has_failed.wait()
        communicator.abandon()

    run_on_threads(size, program, timed_by(clock, mechanism))


@MECHANISMS
def test_a_broken_communicator_closes_without_waiting(mechanism: str) -> None:
    all_are_connected, has_failed = meeting_point(2), threading.Event()
    clock = short_ticks()

    def program(communicator: Communicator) -> None:
        all_are_connected.wait()
        if communicator.rank == 0:
            clock.tick_s = 10.0
            with pytest.raises(CollectiveTimeoutError):
                communicator.barrier()
            communicator.close()
            has_failed.set()
        else:
            assert has_failed.wait(LIMIT_S)
            communicator.abandon()

    run_on_threads(2, program, timed_by(clock, mechanism))


# ---- named collectives


@MECHANISMS
def test_warnings_name_the_started_collective_that_waits(mechanism: str) -> None:
    with watched() as warnings:

        def program(communicator: Communicator) -> None:
            if communicator.rank == 1:
                warnings.wait_for(3, "rank 0 has waited", "for rank 1 in all_reduce 'bucket'")
            communicator.start_all_reduce(np.ones(7), name="bucket").wait()

        run_on_threads(2, program, patient(mechanism))


@MECHANISMS
def test_warnings_name_both_of_two_names_that_wait_for_each_other(mechanism: str) -> None:
    with watched() as warnings:

        def program(communicator: Communicator) -> None:
            mine, other = ("left", "right") if communicator.rank == 0 else ("right", "left")
            first = communicator.start_all_reduce(np.ones(7), name=mine)
            waits = "for rank {} in all_reduce '{}'; started there, but not here: all_reduce '{}' (sum, float64[7])"
            warnings.wait_for(2, "rank 0 has waited", waits.format(1, "left", "right"))
            warnings.wait_for(2, "rank 1 has waited", waits.format(0, "right", "left"))
            communicator.start_all_reduce(np.ones(7), name=other).wait()
            first.wait()

        run_on_threads(2, program, patient(mechanism))


@MECHANISMS
def test_a_started_collective_that_waits_too_long_fails_with_the_same_facts(mechanism: str) -> None:
    all_are_connected, has_failed = meeting_point(2), meeting_point(2)
    clock = short_ticks()

    def program(communicator: Communicator) -> None:
        all_are_connected.wait()
        if communicator.rank == 0:
            clock.tick_s = 10.0
            handle = communicator.start_all_reduce(np.ones(7), name="bucket")
            with pytest.raises(CollectiveTimeoutError) as caught:
                handle.wait()
            assert "rank 0 has waited" in str(caught.value)
            assert "for rank 1 in all_reduce 'bucket'" in str(caught.value)
            assert "timeout_s = 600" in str(caught.value)
            with pytest.raises(BrokenError, match="bucket"):
                communicator.start_all_reduce(np.ones(7), name="later").wait()
        has_failed.wait()
        communicator.abandon()

    run_on_threads(2, program, timed_by(clock, mechanism))


@MECHANISMS
def test_two_names_that_wait_for_each_other_too_long_both_fail(mechanism: str) -> None:
    all_are_connected, has_failed = meeting_point(2), meeting_point(2)
    clock = short_ticks()

    def program(communicator: Communicator) -> None:
        all_are_connected.wait()
        clock.tick_s = 10.0
        mine, other = ("left", "right") if communicator.rank == 0 else ("right", "left")
        handle = communicator.start_all_reduce(np.ones(7), name=mine)
        with pytest.raises(CollectiveTimeoutError, match=f"in all_reduce '{mine}'"):
            handle.wait()
        has_failed.wait()
        with pytest.raises(CollectiveError):
            communicator.start_all_reduce(np.ones(7), name=other).wait()
        has_failed.wait()
        communicator.abandon()

    run_on_threads(2, program, timed_by(clock, mechanism))


@MECHANISMS
def test_abandoning_ends_the_wait_for_a_started_collective(mechanism: str) -> None:
    def program(communicator: Communicator) -> None:
        handle = communicator.start_all_reduce(np.ones(7), name="bucket") if communicator.rank == 0 else None
        communicator.barrier()
        communicator.abandon()
        if handle is not None:
            with pytest.raises(CollectiveError):
                handle.wait()

    run_on_threads(2, program, patient(mechanism))


# ---- two threads, lost ranks


@MECHANISMS
def test_a_second_thread_is_refused_while_the_first_is_busy(mechanism: str) -> None:
    with watched() as warnings:
        was_told = threading.Event()

        def call_meanwhile(communicator: Communicator) -> None:
            warnings.wait_for(1, "all_reduce 'weights'")
            with pytest.raises(BusyError, match=r"barrier .*while all_reduce 'weights' runs in another thread"):
                communicator.barrier()
            was_told.set()

        def program(communicator: Communicator) -> None:
            if communicator.rank == 0:
                second = threading.Thread(target=call_meanwhile, args=[communicator])
                second.start()
            else:
                assert was_told.wait(LIMIT_S)
            assert communicator.all_reduce(np.ones(7), name="weights").tolist() == [2.0] * 7
            if communicator.rank == 0:
                second.join()

        run_on_threads(2, program, patient(mechanism))


@MECHANISMS
def test_a_thread_that_fails_ends_the_waits_of_the_others(mechanism: str) -> None:
    class OwnError(Exception):
        pass

    seen: list[Exception] = []
    all_are_connected = meeting_point(3)

    def program(communicator: Communicator) -> None:
        all_are_connected.wait()
        if communicator.rank == 1:
            raise OwnError("out of data")
        try:
            communicator.barrier()
        except CollectiveError as error:
            seen.append(error)
            raise

    with pytest.raises(OwnError):
        run_on_threads(3, program, Settings(mechanism=mechanism, limits=Limits(timeout_s=LIMIT_S)))
    assert [type(error) for error in seen] == [PeerLostError] * 2
    assert all("rank 1 has failed: OwnError: out of data" in str(error) for error in seen)


def test_the_first_of_several_failed_threads_is_blamed_even_if_it_ends_last() -> None:
    has_failed, other_has_failed = threading.Event(), threading.Event()

    class Cause(Exception):
        def __str__(self) -> str:  # the others are about to learn of the failure
            has_failed.set()
            assert other_has_failed.wait(LIMIT_S)
            return "out of data"

    class Consequence(Exception):
        def __str__(self) -> str:
            other_has_failed.set()
            return "no data"

    def program(communicator: Communicator) -> None:
        if communicator.rank == 1:
            raise Cause
        assert has_failed.wait(LIMIT_S)
        raise Consequence

    with pytest.raises(Cause):
        run_on_threads(2, program)
