from __future__ import annotations

from poprun.agent.program_output import AT_ONCE, PAUSE_S, Pace

PIPE_BYTES = 65536


def readings_at_once(pace: Pace, now_s: float = 0.0) -> int:
    """How many pieces are read without any pause."""
    return next(count for count in range(10 * AT_ONCE) if pace.pause_s(now_s, 100))


def test_a_few_pieces_are_read_at_once_then_pauses_begin():
    pace = Pace(PIPE_BYTES)
    assert readings_at_once(pace) == AT_ONCE - 1
    assert [pace.pause_s(PAUSE_S * n, 5000) for n in range(1, 9)] == [PAUSE_S] * 8


def test_who_writes_seldom_is_always_read_at_once():
    pace = Pace(PIPE_BYTES)
    assert not any(pace.pause_s(2 * PAUSE_S * n, 100) for n in range(200))


def test_silence_ends_the_pauses():
    pace = Pace(PIPE_BYTES)
    readings_at_once(pace)
    assert readings_at_once(pace, AT_ONCE * PAUSE_S) == AT_ONCE - 1


def test_who_fills_the_pipe_is_not_made_to_wait():
    pace = Pace(PIPE_BYTES)
    readings_at_once(pace)
    assert pace.pause_s(0.0, PIPE_BYTES) == 0.0
    assert readings_at_once(pace) == AT_ONCE - 1
