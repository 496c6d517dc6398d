"""The distinction between lost and stopped workers; tests set all times."""

from __future__ import annotations

import pytest

from collectives.network.liveness import FAILURES, LOST_AFTER_S, Silence

SINCE = 1000.0


def test_a_worker_that_is_silent_for_long_and_unreachable_is_lost() -> None:
    silence = Silence(SINCE)
    verdicts = {after_s: silence.was_not_answered(SINCE + after_s) for after_s in (2.5, 4.0, 5.5, 6.0, 6.5)}
    assert verdicts == {2.5: None, 4.0: None, 5.5: None, 6.0: None, 6.5: 6.5}


def test_a_worker_is_lost_within_the_promised_ten_seconds() -> None:
    """An attempt takes at most a second, and half a second lies between two attempts."""
    silence, now = Silence(SINCE), SINCE + 2.0 + 0.5
    while silence.was_not_answered(now) is None:
        now += 1.5
    assert LOST_AFTER_S < now - SINCE <= 10


def test_a_single_failed_attempt_is_not_enough() -> None:
    """The observer itself may have been stopped in between."""
    silence = Silence(SINCE)
    assert [silence.was_not_answered(SINCE + 1000 + attempt) is None for attempt in range(FAILURES)] == [
        *[True] * (FAILURES - 1),
        False,
    ]


def test_a_worker_whose_kernel_answers_is_stopped_and_not_lost() -> None:
    silence = Silence(SINCE)
    for after_s in range(3, 3000):
        silence.was_answered(SINCE + after_s)
        assert silence.was_not_answered(SINCE + after_s + 0.5) is None


@pytest.mark.parametrize("answered_after_s", [3.0, 60.0])
def test_the_time_is_counted_from_the_last_answer(answered_after_s: float) -> None:
    silence = Silence(SINCE)
    silence.was_not_answered(SINCE + 2.5)
    silence.was_answered(SINCE + answered_after_s)
    for after_s in (1.5, 3.0, 4.5, 6.0):
        assert silence.was_not_answered(SINCE + answered_after_s + after_s) is None
    assert silence.was_not_answered(SINCE + answered_after_s + 7.5) == 7.5


def test_only_silence_between_attempts_counts_for_a_stopped_worker() -> None:
    """A long pause between two attempts means that the observer was stopped itself."""
    silence = Silence(SINCE)
    for after_s in (2.0, 3.0, 4.5, 600.0, 601.0):
        silence.was_answered(SINCE + after_s)
    assert silence.observed_s == 1.0 + 1.5 + 2.0 + 1.0
