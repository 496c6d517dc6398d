"""The program's output on its way to poprun: lines, pauses, and the messages and pages that carry the rest."""

from __future__ import annotations

import os
import signal

import pytest

from poprun.agent.guard import (
    CALLED_OFFSET,
    NEW_PAGE,
    PROGRESS_VARIABLE,
    RELEASED_OFFSET,
    SUPERVISOR_OFFSET,
    WANTED_OFFSET,
)
from poprun.agent.guard_machine import CUT_SIGNAL
from poprun.agent.program_output import (
    AT_ONCE,
    LONGEST_LINE_BYTES,
    LONGEST_SILENCE_S,
    PAUSE_S,
    REDRAW_S,
    LineBuffer,
    Pace,
    silence_s,
)
from poprun.cli.log import Level, format_line, level_from
from poprun.ipc import wire


class TestLineBuffer:
    def test_only_whole_lines_are_passed_on(self):
        lines = LineBuffer()
        assert lines.feed(b"one\ntw", 0.0) == b"one\n"
        assert lines.feed(b"o\nthree\n", 0.0) == b"two\nthree\n"
        assert lines.flush() == b""

    def test_an_unfinished_line_is_passed_on_after_silence(self):
        lines = LineBuffer()
        lines.feed(b"name? ", 1.0)
        assert lines.deadline_s() == 1.0 + LONGEST_SILENCE_S
        assert lines.expire(1.1) == b""
        assert lines.expire(1.0 + LONGEST_SILENCE_S) == b"name? "
        assert lines.deadline_s() == float("inf")

    def test_a_line_in_progress_is_kept_whole(self):
        lines = LineBuffer()
        for tenth in range(10):
            assert lines.feed(b"x", tenth / 10) == b""
            assert lines.expire(tenth / 10 + 0.05) == b""
        assert lines.feed(b"\n", 1.0) == b"x" * 10 + b"\n"

    def test_a_progress_bar_is_passed_on_without_silence_up_to_its_newest_state(self):
        lines = LineBuffer()
        for tenth in range(3):
            lines.feed(b"\r%d %%" % tenth, tenth / 10)
        assert lines.expire(0.21) == b"\r0 %\r1 %"
        assert lines.flush() == b"\r2 %"

    def test_a_progress_bar_does_not_wait_as_long_as_a_prompt(self):
        lines = LineBuffer(silence_s(is_terminal=False))
        lines.feed(b"\r1 %\r2 %", 0.0)
        assert lines.deadline_s() == REDRAW_S
        assert lines.expire(REDRAW_S) == b"\r1 %"
        assert lines.deadline_s() == silence_s(is_terminal=False) > silence_s(is_terminal=True)

    def test_an_endless_line_is_passed_on_in_long_pieces(self):
        lines = LineBuffer()
        assert lines.feed(b"one\n" + b"x" * LONGEST_LINE_BYTES, 0.0) == b"one\n"
        assert lines.feed(b"y\n", 0.0) == b"x" * LONGEST_LINE_BYTES + b"y\n"
        assert lines.feed(b"one\n" + b"x" * (LONGEST_LINE_BYTES + 1), 0.0).endswith(b"x")
        assert lines.flush() == b""

    def test_the_end_flushes_the_rest(self):
        lines = LineBuffer()
        lines.feed(b"rest", 0.0)
        assert lines.flush() == b"rest"


class TestWire:
    def test_messages_survive_any_cut(self):
        messages = [
            wire.pack_hello(3, 77, 1.5, bytes(16), "höst"),
            wire.pack(wire.STDOUT, b"line\n"),
            wire.pack_ended(by_signal=True, told=False, lacked_memory=True, number=9, at_s=1.5),
            wire.pack_progress(2.5, b"page", True, 0.25, (1 << 40, 1 << 41)),
            wire.pack_number(wire.SIGNAL, 15),
            wire.pack(wire.CLOSED),
        ]
        reader = wire.MessageReader()
        stream = b"".join(messages)
        received = [message for at in range(len(stream)) for message in reader.feed(stream[at : at + 1])]
        assert received == wire.MessageReader().feed(stream)
        contents = dict(received)
        assert wire.unpack_hello(contents[wire.HELLO]) == (3, 77, 1.5, bytes(16), "höst")
        assert contents[wire.STDOUT] == b"line\n"
        assert wire.unpack_ended(contents[wire.ENDED]) == (True, False, True, 9, 1.5)
        assert wire.unpack_progress(contents[wire.PROGRESS]) == (2.5, b"page", True, 0.25, (1 << 40, 1 << 41))
        assert wire.unpack_number(contents[wire.SIGNAL]) == 15


def test_the_agent_and_popdist_agree_on_the_progress_page():
    from popdist.records.progress import DESCRIPTOR_VARIABLE, ProgressPage, new_page, parse_progress

    assert new_page() == NEW_PAGE
    assert DESCRIPTOR_VARIABLE == PROGRESS_VARIABLE
    descriptor = os.memfd_create("progress")
    os.write(descriptor, NEW_PAGE)
    page = ProgressPage(descriptor)
    assert not page.is_released
    os.pwrite(descriptor, b"\1", RELEASED_OFFSET)
    assert parse_progress(os.pread(descriptor, len(NEW_PAGE), 0)).heeded == 0
    assert page.is_released
    assert parse_progress(os.pread(descriptor, len(NEW_PAGE), 0)).heeded == 1
    assert not page.cut_off()
    taken = []
    before = signal.signal(CUT_SIGNAL, lambda number, _: taken.append(number))
    os.pwrite(descriptor, os.getpid().to_bytes(8, "little"), SUPERVISOR_OFFSET)
    assert page.cut_off()
    assert taken == [CUT_SIGNAL]
    signal.signal(CUT_SIGNAL, before)
    os.close(descriptor)


def test_an_instance_acts_on_a_wish_once_it_is_complete_and_until_it_has_considered_it():
    from popdist.records.progress import ProgressPage, Role, parse_progress
    from popdist.records.wanted import Wanted

    descriptor = os.memfd_create("progress")
    os.write(descriptor, NEW_PAGE)
    page = ProgressPage(descriptor)

    def want(wanted, damage=0):
        low = wanted.pack()
        os.pwrite(descriptor, (((low ^ 0xFFFFFFFF) << 32 | low) ^ damage).to_bytes(8, "little"), WANTED_OFFSET)

    def record():
        return parse_progress(os.pread(descriptor, len(NEW_PAGE), 0))

    assert (page.is_resize_due, page.wanted, page.may_be_active, record().role) == (False, 0, True, Role.UNKNOWN)
    page.takes_role(is_spare=False)
    assert (record().role, record().considered) == (Role.ACTIVE, 0)
    want(Wanted(1, 3, is_barred=True))
    assert (page.is_resize_due, page.wanted, page.may_be_active) == (False, 0, False)
    page.takes_role(is_spare=False)
    assert record().considered == 0
    want(Wanted(1, 3, is_barred=True, is_complete=True), damage=1 << 16)
    assert (page.is_resize_due, record().wanted) == (False, Wanted())
    want(Wanted(1, 3, is_barred=True, is_complete=True))
    assert page.is_resize_due
    assert not page.is_released  # the program may wait in a collective of its own, which nobody repeats
    page.heeds_wishes(True)
    assert page.is_released
    page.heeds_wishes(False)
    assert not page.is_released
    assert page.wanted == 3
    want(Wanted(2, 1))
    assert not page.may_be_active
    page.carry_on(0)
    assert not page.is_released  # a change of the members is under way
    page.takes_role(is_spare=True, wish=page.wish)
    assert (record().role, record().considered, record().is_spare) == (Role.SPARE, 1, True)
    assert record().lacks_values
    assert not page.is_resize_due
    want(Wanted(2, 1, is_complete=True))
    assert page.is_resize_due
    assert (page.wanted, page.may_be_active) == (1, True)
    page.takes_role(is_spare=False, wish=page.wish)
    assert record().lacks_values
    page.takes_values()
    assert not record().lacks_values
    want(Wanted(3, 2))
    page.takes_role(is_spare=False, wish=3)  # other processes had the wish as complete
    want(Wanted(3, 2, is_complete=True))
    assert not page.is_resize_due
    page.needs_all()
    assert (page.is_resize_due, record().role) == (False, Role.FIXED)
    os.close(descriptor)


def test_an_instance_at_its_end_heeds_a_wish_only_when_it_is_called_to_the_change_that_another_one_has_begun():
    from popdist.records.progress import ProgressPage, parse_progress
    from popdist.records.wanted import Wanted

    descriptor = os.memfd_create("progress")
    os.write(descriptor, NEW_PAGE)
    page = ProgressPage(descriptor)

    def write(word, offset):
        os.pwrite(descriptor, word.to_bytes(8, "little"), offset)

    def is_changing():
        return parse_progress(os.pread(descriptor, len(NEW_PAGE), 0)).is_changing

    low = Wanted(1, 3, is_complete=True).pack()
    write((low ^ 0xFFFFFFFF) << 32 | low, WANTED_OFFSET)
    page.heeds_wishes(True)
    assert page.is_released
    page.leaving()
    assert not page.is_released
    write(1, CALLED_OFFSET)
    assert page.is_released
    page.changes()
    assert is_changing()
    page.carry_on(0)
    assert not page.is_released
    assert page.wanted == 3
    page.takes_role(is_spare=False, wish=page.wish)
    assert not is_changing()
    page.leaving()
    assert not page.is_released  # the call belongs to the change that is over
    write(1, RELEASED_OFFSET)
    assert page.is_released
    os.close(descriptor)


class TestLog:
    def test_a_log_line_has_time_pid_and_level(self):
        import re

        assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} \d+ POPRUN \[E\] text\n", format_line(Level.ERROR, "text"))
        assert format_line(Level.DEBUG, "a\nb").count("POPRUN [D]") == 2

    @pytest.mark.parametrize(
        ("verbosity", "variable", "level"),
        [
            (0, None, Level.WARN),
            (1, None, Level.INFO),
            (2, None, Level.DEBUG),
            (0, "trace", Level.TRACE),
            (0, "nonsense", Level.WARN),
            (1, "ERROR", Level.INFO),
        ],
    )
    def test_the_level_depends_on_verbosity_and_variable(self, verbosity, variable, level):
        environ = {} if variable is None else {"POPRUN_LOG_LEVEL": variable}
        assert level_from(verbosity, environ) is level


PIPE_BYTES = 65536


def readings_at_once(pace: Pace, now_s: float = 0.0) -> int:
    """Return the number of pieces that are read without a pause."""
    return next(count for count in range(10 * AT_ONCE) if pace.pause_s(now_s, 100))


def test_a_few_pieces_are_read_at_once_before_pauses_begin():
    pace = Pace(PIPE_BYTES)
    assert readings_at_once(pace) == AT_ONCE - 1
    assert [pace.pause_s(PAUSE_S * n, 5000) for n in range(1, 9)] == [PAUSE_S] * 8


def test_rare_output_is_always_read_at_once():
    pace = Pace(PIPE_BYTES)
    assert not any(pace.pause_s(2 * PAUSE_S * n, 100) for n in range(200))


def test_silence_ends_the_pauses():
    pace = Pace(PIPE_BYTES)
    readings_at_once(pace)
    assert readings_at_once(pace, AT_ONCE * PAUSE_S) == AT_ONCE - 1


def test_a_full_pipe_is_read_without_a_pause():
    pace = Pace(PIPE_BYTES)
    readings_at_once(pace)
    assert pace.pause_s(0.0, PIPE_BYTES) == 0.0
    assert readings_at_once(pace) == AT_ONCE - 1
