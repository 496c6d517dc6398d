from __future__ import annotations

from dataclasses import replace

import pytest

from popdist.records.progress import ProgressRecord, State
from poprun.ipc.facts import Ending, EndKind, Facts
from poprun.supervisor.lookout import BLIND_S, Lookout

LIMIT_S = 10.0
BEGIN_S = 1000.0
WAITS = Facts(0, "node0", 100, record=ProgressRecord(3, 5, "barrier", State.IN_COLLECTIVE, 1.0, (1,)))
RUNS = Facts(1, "node1", 101, record=ProgressRecord(3, 4, "barrier", State.RUNNING, 1.0))
HAS_LEFT = Facts(1, "node1", 101, Ending(EndKind.EXIT, 0, 2.0), ProgressRecord(3, 4, "barrier", State.RUNNING, 1.0))


@pytest.fixture
def lookout():
    return Lookout(LIMIT_S, "node0", BEGIN_S)


def heard(facts: Facts, now_s: float) -> Facts:
    """One whose agent has just answered."""
    return replace(facts, answered_at_s=now_s)


def stuck_after(lookout: Lookout, begin_s: float, end_s: float, pause_s: float = 1.0, is_behind: bool = False) -> bool:
    """Whether someone is found within that time, when one instance waits for another all along."""
    now_s = begin_s
    while now_s <= end_s and lookout.stuck is None:
        lookout.look([heard(each, now_s) for each in (WAITS, RUNS)], now_s, is_behind)
        now_s += pause_s
    return lookout.stuck is not None


def test_a_wait_is_in_vain_when_it_is_seen_twice(lookout):
    lookout.look([WAITS, HAS_LEFT], 11.0, False)
    assert lookout.useless == set()
    lookout.look([WAITS, HAS_LEFT], 11.2, False)
    assert (lookout.in_vain, lookout.useless) == ({(0, 1, 5)}, {1})
    assert lookout.judge([WAITS, HAS_LEFT], None).instance == 1


def test_who_is_stuck_is_found_after_the_limit(lookout):
    now_s = BEGIN_S
    assert not stuck_after(lookout, now_s, now_s + LIMIT_S - 1)
    assert stuck_after(lookout, now_s + LIMIT_S, now_s + LIMIT_S + 2)
    assert lookout.useless == {1}
    assert lookout.judge([WAITS, RUNS], None).exit_status == 124
    assert "has made no progress for 10 s" in lookout.describe(RUNS, [WAITS, RUNS])


def test_after_a_loss_the_limit_begins_anew(lookout):
    """Those that are left have waited for the lost one for long, and go on only now."""
    now_s = BEGIN_S
    assert stuck_after(lookout, now_s, now_s + LIMIT_S + 2)
    lookout.forget(now_s + LIMIT_S + 2)
    assert not stuck_after(lookout, now_s + LIMIT_S + 2, now_s + 2 * LIMIT_S)
    assert stuck_after(lookout, now_s + 2 * LIMIT_S, now_s + 2 * LIMIT_S + 4)


def test_with_a_short_limit_a_short_pause_of_poprun_is_enough():
    """All may have paused, and have done nothing since."""
    now_s = BEGIN_S
    assert not stuck_after(Lookout(1.0, "node0", BEGIN_S), now_s, now_s + 20, pause_s=0.6)
    assert stuck_after(Lookout(1.0, "node0", BEGIN_S), now_s, now_s + 20, pause_s=0.4)


def test_nobody_is_stuck_while_poprun_is_behind_or_has_not_looked(lookout):
    now_s = BEGIN_S
    assert not stuck_after(lookout, now_s, now_s + 3 * LIMIT_S, is_behind=True)
    assert not stuck_after(lookout, now_s + 3 * LIMIT_S, now_s + 6 * LIMIT_S, pause_s=BLIND_S + 1)


def test_nobody_is_stuck_without_a_limit():
    now_s = BEGIN_S
    assert not stuck_after(Lookout(0.0, "node0", BEGIN_S), now_s, now_s + 100.0)
