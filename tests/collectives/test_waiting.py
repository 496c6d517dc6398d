"""A single wait of a rank, on a clock that only its own pauses move."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
from watching import watched

from collectives import CollectiveTimeoutError, Limits, PeerLostError
from collectives.calls import Call
from collectives.clock import Clock, FakeClock
from collectives.instruments import Instruments
from collectives.waiting import Watch

NAMES = ("rank 0", "rank 1 on b", "rank 2 on c")
PAUSE_S = 0.25


class Time(Clock):
    """A clock on which every pause takes the same time, with events during pauses."""

    def __init__(self) -> None:
        self.at_s = 1000.0
        self.pauses = 0
        self.at: dict[int, list] = {}

    def now_s(self) -> float:
        return self.at_s

    def sleep(self, seconds: float) -> None:
        raise AssertionError("it sleeps although an event would wake it")

    def wait(self, event: threading.Event, limit_s: float) -> bool:
        raise AssertionError("it waits for something else")

    def wait_for(self, changed: threading.Condition, is_true: Callable[[], bool], limit_s: float) -> bool:
        raise AssertionError("it waits for something else")

    def pause(self, longest_s: float) -> None:
        assert 0 < longest_s <= PAUSE_S
        self.at_s += PAUSE_S
        self.pauses += 1
        for event in self.at.get(self.pauses, ()):
            event()


class Notes:
    """An instrument that records the awaited ranks and the times, and a supervisor."""

    def __init__(self, time: Time) -> None:
        self.time = time
        self.waits: list[tuple[float, list[int]]] = []
        self.is_released = False

    def waiting_for(self, instances: Sequence[int]) -> None:
        self.waits.append((self.time.at_s - 1000, list(instances)))

    def carry_on(self, lost: int) -> None:
        raise AssertionError("nobody is lost")


@pytest.fixture
def time() -> Time:
    return Time()


def watch_of(time: Time, notes: Notes | None = None, **limits: float) -> Watch:
    instruments = Instruments() if notes is None else Instruments(notes, supervisor=notes)
    watch = Watch(0, NAMES, (5, 6, 7), Limits(**limits, clock=time), instruments, spins=3)
    watch.pausing = lambda: time.pause
    watch.call, watch.number = Call("all_reduce", "weights"), 17
    return watch


def never() -> bool:
    return False


def test_a_wait_ends_as_soon_as_its_condition_holds(time: Time) -> None:
    for pauses in (0, 1, 40):
        begun = time.pauses
        watch_of(time).wait(lambda begun=begun, pauses=pauses: time.pauses - begun == pauses, lambda: [1])
        assert time.pauses - begun == pauses


def test_a_wait_spins_before_it_looks_at_the_clock() -> None:
    looks = 0

    def ready() -> bool:
        nonlocal looks
        looks += 1
        return looks == 3

    clock = FakeClock(tick_s=1.0)
    Watch(0, NAMES, (0, 1, 2), Limits(clock=clock), Instruments(), spins=3).wait(ready, list)
    assert looks == 3
    assert clock.now_s() == 1.0


def test_a_wait_without_a_bell_yields_and_then_sleeps() -> None:
    looks = 0

    def ready() -> bool:
        nonlocal looks
        looks += 1
        return looks == 300

    Watch(0, NAMES, (0, 1, 2), Limits(clock=FakeClock(tick_s=1e-5)), Instruments(), spins=0).wait(ready, list)
    assert looks == 300


class Sleeps(Time):
    """A clock that records the requested sleeps and lets a little more time pass."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self.at_s += seconds + 1e-5


@pytest.mark.parametrize(("spins", "yields"), [(0, False), (2, True)])
def test_a_calm_wait_sleeps_at_once_if_ranks_share_cores(spins: int, yields: bool) -> None:
    clock, looks = Sleeps(), iter([False] * 8 + [True])
    watch = Watch(0, NAMES, (0, 1, 2), Limits(clock=clock), Instruments(), spins=spins)
    watch.wait_calmly(lambda: next(looks), lambda: [1])
    assert (clock.seconds[0] == 0) == yields
    assert yields or min(clock.seconds) >= 1e-4


def test_repeated_warnings_name_the_rank_the_time_the_absent_ranks_and_the_call(time: Time) -> None:
    with watched() as warnings:
        watch_of(time, stall_warning_s=30).wait(lambda: time.at_s == 1100, lambda: [1, 2])
    facts = "for rank 1 on b, rank 2 on c in all_reduce 'weights' (collective 17)"
    assert warnings.texts == [f"rank 0 has waited {seconds} s {facts}" for seconds in (30, 60, 90)]


def test_a_wait_shorter_than_the_limit_gets_no_warning(time: Time) -> None:
    with watched() as warnings:
        watch_of(time, stall_warning_s=30).wait(lambda: time.at_s == 1029.75, lambda: [1])
    assert warnings.texts == []


def test_a_wait_ends_at_its_limit_with_the_same_facts(time: Time) -> None:
    with pytest.raises(CollectiveTimeoutError) as caught:
        watch_of(time, timeout_s=600).wait(never, lambda: [2])
    facts = "rank 0 has waited 600 s for rank 2 on c in all_reduce 'weights' (collective 17)"
    assert str(caught.value) == f"{facts}: gave up after timeout_s = 600"
    assert time.at_s == 1600


def test_a_condition_that_holds_at_the_limit_ends_the_wait_well(time: Time) -> None:
    watch_of(time, timeout_s=600).wait(lambda: time.at_s >= 1600, lambda: [2])


def test_a_wait_for_a_lost_rank_ends_at_once(time: Time) -> None:
    watch = watch_of(time)
    watch.lost = lambda awaited: f"rank {awaited[0]} is lost" if time.pauses == 8 else ""
    with pytest.raises(PeerLostError, match="^rank 2 is lost; rank 0 has waited 2 s for rank 2 on c in all_reduce 'w"):
        watch.wait(never, lambda: [2])
    assert time.pauses == 8


def test_a_message_sent_before_a_loss_still_arrives(time: Time) -> None:
    """The message may come between the look at the message and the look at the rank."""
    watch, has_come = watch_of(time), []

    def lost(awaited: Sequence[int]) -> str:
        has_come.append(True)
        return "rank 2 is lost"

    watch.lost = lost
    watch.wait(lambda: bool(has_come), lambda: [2])


def test_a_message_sent_before_a_loss_still_arrives_while_another_rank_is_awaited(time: Time) -> None:
    """The message comes between the look at the missing ranks and the next look at the messages."""
    watch, missing, looks = watch_of(time), [1, 2], []
    time.at[4] = [lambda: setattr(watch, "lost", lost), looks.clear]
    time.at[9] = [missing.clear]

    def lost(awaited: Sequence[int]) -> str:
        return "rank 2 is lost" if 2 in awaited else ""

    def ready() -> bool:
        looks.append(time.pauses)
        if looks == [4, 4]:
            missing.remove(2)
        return not missing

    watch.wait(ready, lambda: list(missing))
    assert time.pauses == 9


def test_a_cancelled_wait_ends(time: Time) -> None:
    watch = watch_of(time)
    time.at[4] = [lambda: setattr(watch, "cancelled", True)]
    with pytest.raises(PeerLostError, match="has waited 1 s for rank 1 on b in all_reduce 'weights'.* was abandoned"):
        watch.wait(never, lambda: [1])
    assert time.pauses == 4


def test_a_wait_that_a_supervisor_releases_ends(time: Time) -> None:
    notes = Notes(time)
    time.at[4] = [lambda: setattr(notes, "is_released", True)]
    with pytest.raises(PeerLostError, match="has waited 1 s .* was abandoned"):
        watch_of(time, notes).wait(never, lambda: [1])
    assert time.pauses == 4


def test_a_message_sent_before_a_release_still_arrives(time: Time) -> None:
    """The message comes between the look at the messages and the look at the supervisor."""
    notes, looks = Notes(time), []
    time.at[4] = [lambda: setattr(notes, "is_released", True)]

    def ready() -> bool:
        looks.append(time.pauses)
        return looks.count(4) == 2

    watch_of(time, notes).wait(ready, lambda: [1])


def test_awaited_instances_are_recorded_again_during_the_wait(time: Time) -> None:
    notes = Notes(time)
    watch_of(time, notes).wait(lambda: time.pauses == 4, lambda: [1, 2] if time.pauses < 3 else [2])
    assert notes.waits == [(0.25, [6, 7]), (0.5, [6, 7]), (0.75, [7]), (1.0, [7])]


@pytest.mark.parametrize("name", ["stall_warning_s", "timeout_s", "connect_timeout_s"])
@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_limits_are_positive(name: str, seconds: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is .*positive"):
        Limits(**{name: seconds})
