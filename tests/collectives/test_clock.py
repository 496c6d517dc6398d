"""The real clock, the fake clock of tests, and their exclusive use in the collectives."""

from __future__ import annotations

import ast
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

import collectives
from collectives.clock import Clock, FakeClock, RealClock

LIMIT_S = 60.0
TICK_S = 0.25
COLLECTIVES = Path(collectives.__file__).parent

CLOCKS = pytest.mark.parametrize("clock", [RealClock(), FakeClock(TICK_S)], ids=["real", "fake"])


@CLOCKS
def test_time_never_goes_back(clock: Clock) -> None:
    looks = [clock.now_s() for _ in range(1000)]
    clock.sleep(1e-6)
    assert looks == sorted(looks)
    assert clock.now_s() >= looks[-1]


@CLOCKS
def test_a_wait_for_an_event_returns_whether_it_is_set(clock: Clock) -> None:
    event = threading.Event()
    assert not clock.wait(event, 1e-6)
    event.set()
    assert clock.wait(event, 0.0)


@CLOCKS
def test_a_wait_for_a_condition_returns_whether_it_holds(clock: Clock) -> None:
    changed, facts = threading.Condition(), []
    with changed:
        assert not clock.wait_for(changed, lambda: bool(facts), 1e-6)
        facts.append("true from the beginning")
        assert clock.wait_for(changed, lambda: bool(facts), 0.0)


@CLOCKS
def test_a_wait_ends_when_another_thread_makes_the_condition_true(clock: Clock) -> None:
    """Two threads take turns, and no notification is lost."""
    changed, turns = threading.Condition(), []

    def take_turns(own: int) -> None:
        for number in range(own, 400, 2):
            with changed:
                assert clock.wait_for(changed, partial(is_turn, number), 1e9)
                turns.append(number)
                changed.notify_all()

    def is_turn(number: int) -> bool:
        return len(turns) == number

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(take_turns, (0, 1), timeout=LIMIT_S))
    assert turns == list(range(400))


def test_a_fake_clock_moves_only_by_tests() -> None:
    clock = FakeClock()
    assert [clock.now_s(), clock.now_s()] == [0.0, 0.0]
    clock.sleep(1000.0)
    assert clock.now_s() == 0.0
    clock.advance(7.5)
    assert clock.now_s() == 7.5
    clock.tick_s = TICK_S
    assert [clock.now_s(), clock.now_s()] == [7.75, 8.0]


def test_a_wait_by_a_ticking_fake_clock_reaches_its_limit() -> None:
    clock = FakeClock(TICK_S)
    assert not clock.wait(threading.Event(), 10 * TICK_S)
    assert clock.now_s() == 12 * TICK_S  # including the looks at the beginning and in this line
    changed = threading.Condition()
    with changed:
        assert not clock.wait_for(changed, lambda: False, 10 * TICK_S)
    assert clock.now_s() == 24 * TICK_S


def test_a_wait_by_a_fake_clock_ends_when_it_is_moved_to_the_limit() -> None:
    """The wait ends exactly at its limit, whatever the real clock shows."""
    clock = FakeClock()
    looks: list[float] = []

    def note() -> bool:
        looks.append(clock.now_s())
        has_begun.set()
        return False

    def wait() -> bool:
        changed = threading.Condition()
        with changed:
            return clock.wait_for(changed, note, 600.0)

    has_begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        assert has_begun.wait(LIMIT_S)
        clock.advance(599.0)
        while looks[-1] < 599.0:
            assert not waiting.done()
        clock.advance(1.0)
        assert waiting.result(LIMIT_S) is False
    assert set(looks) == {0.0, 599.0, 600.0}


def test_the_collectives_ask_only_the_clock_for_the_time() -> None:
    """The backend of Horovod is an exception: no event could end its waits."""
    askers = [
        path.relative_to(COLLECTIVES).as_posix()
        for path in sorted(COLLECTIVES.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Import) and any(alias.name == "time" for alias in node.names))
        or (isinstance(node, ast.ImportFrom) and node.module == "time")
    ]
    assert askers == ["backends/horovod.py", "clock.py", "simulation/measuring.py"]
