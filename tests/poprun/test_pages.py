"""The layout of texts and tables for the width of a page."""

from __future__ import annotations

import fcntl
import os
import struct
import termios

import pytest

from poprun.cli.wording import USUAL_COLUMNS, columns_of, draw_rows, wrap

ROWS = [("host", "what"), ("a", "one, two and three"), ("b", "1,2,3,4,5,6,7,8,9")]


@pytest.fixture
def terminal():
    ours, theirs = os.openpty()
    yield theirs
    os.close(theirs)
    os.close(ours)


def resize(terminal: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


def test_the_width_of_a_terminal_is_read(terminal):
    resize(terminal, 93)
    assert columns_of({}, terminal) == 93


def test_a_terminal_without_a_size_has_the_usual_width(terminal):
    resize(terminal, 0)
    assert columns_of({}, terminal) == USUAL_COLUMNS


def test_the_users_width_wins_over_the_terminals(terminal):
    resize(terminal, 93)
    assert columns_of({"COLUMNS": "60"}, terminal) == 60


@pytest.mark.parametrize("text", ["", "0", "-1", "wide", "9" * 99])
def test_an_invalid_width_is_ignored(text, terminal):
    resize(terminal, 93)
    assert columns_of({"COLUMNS": text}, terminal) == 93


def test_a_pipe_has_only_the_users_width():
    reader, writer = os.pipe()
    assert columns_of({}, writer) is None
    assert columns_of({"COLUMNS": "60"}, writer) == 60
    os.close(reader)
    os.close(writer)


def test_lines_break_between_words_and_a_long_word_stands_alone():
    assert wrap("one two three longer-than-that", 10, 2) == "  one two\n  three\n  longer-than-that"


def test_columns_are_aligned():
    assert draw_rows(ROWS).splitlines() == ["host  what", "a     one, two and three", "b     1,2,3,4,5,6,7,8,9"]


def test_the_widest_column_is_wrapped_if_rows_do_not_fit():
    assert draw_rows(ROWS, 15).splitlines() == [
        "host  what",
        "a     one, two",
        "      and three",
        "b     1,2,3,4,",
        "      5,6,7,8,9",
    ]


@pytest.mark.parametrize("columns", range(20, 30))
def test_no_text_is_lost_and_no_line_too_wide(columns):
    rows = [("x" * 50, "one two three four", "")]
    lines = draw_rows(rows, columns).splitlines()
    assert max(map(len, lines)) <= columns
    assert "".join(lines).count("x") == 50
