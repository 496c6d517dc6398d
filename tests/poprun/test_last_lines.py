"""The line that says why an instance has failed."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from poprun.ipc.facts import Ending, EndKind, Facts, Verdict
from poprun.supervisor.last_lines import KEPT_BYTES, LastLines, find_exception

FAILED = Ending(EndKind.EXIT, 3, 1.0)
TRACE = b"""\
note
Traceback (most recent call last):
  File "x.py", line 1, in <module>
    f()
    ^^^
ValueError: no such data: 5 rows
that is the second line of the message
"""


def cause(*pieces: bytes, ending: Ending | None = FAILED, count: int = 2, blamed: int | None = 1) -> str:
    lines = LastLines()
    lines.take(0, b"Traceback (most recent call last):\n  File\nLayoutMismatchError: of another one\n")
    for piece in pieces:
        lines.take(1, piece)
    facts = [Facts(index, "node0", 7, ending if index == 1 else None) for index in range(count)]
    return lines.describe_cause(Verdict(blamed, 3, ("line",)), facts)


def test_an_exception_is_named_with_instance_and_status():
    expected = "first cause: instance 1 on host node0: ValueError: no such data: 5 rows (exit status 3)"
    assert cause(TRACE) == expected
    assert cause(*(bytes([each]) for each in TRACE)) == expected
    assert cause(TRACE, ending=None) == expected  # it has not come to its end yet


@pytest.mark.parametrize(
    ("program", "exception"),
    [
        ("raise SystemError", "SystemError"),
        ("try: 1 / 0\nexcept ZeroDivisionError: import missing_extra", "ModuleNotFoundError: No module named "),
        ("raise ValueError('a') from KeyError('b')", "ValueError: a"),
        ("f(", "SyntaxError: '(' was never closed"),
        ("class Own(Exception): pass\nraise Own('own')", "Own: own"),
    ],
)
def test_what_python_shows_is_understood(program, exception):
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False, timeout=60).stderr
    assert f"host node0: {exception}" in cause(b"before\n", shown)


def test_without_an_exception_the_last_line_is_shown():
    expected = "first cause: instance 1 on host node0 (exit status 3), which wrote last: this needs an extra"
    assert cause(b"first\n\nthis needs an extra\n") == expected
    assert cause(b"10 %\r20 %\rthis needs an extra\r\n") == expected
    assert cause(b"this needs an extra") == expected


def test_an_exception_that_was_caught_long_before_is_not_the_reason():
    assert cause(TRACE, b"going on\n" * 30, b"no more\n").endswith("which wrote last: no more")


def test_a_long_traceback_and_strange_bytes_do_no_harm():
    frames = b"Traceback (most recent call last):\n" + b'  File "x.py", line 1, in f\n    f()\n' * KEPT_BYTES
    assert cause(frames, b"RecursionError: \x1b[31m\xff" + b"x" * 1000).startswith(
        "first cause: instance 1 on host node0: RecursionError: ?[31m\N{REPLACEMENT CHARACTER}xxx"
    )


@pytest.mark.parametrize(
    "options",
    [
        {"count": 1, "blamed": 0},
        {"blamed": None},
        {"ending": Ending(EndKind.SIGNAL, signal.SIGKILL, 1.0)},
        {"ending": Ending(EndKind.EXIT, 0, 1.0)},
    ],
    ids=["alone", "nobody is to blame", "killed", "left too early"],
)
def test_nothing_is_said_of(options):
    assert cause(TRACE, **options) == ""


def test_nothing_is_said_where_nothing_was_written():
    assert cause() == ""
    assert cause(b"\n \n") == ""
    assert cause(b"a warning\n", ending=None) == ""


def test_warnings_are_no_exceptions():
    assert find_exception(['  File "x.py", line 3', "    f()", "not an exception line"]) == ""
    assert find_exception(["x.py:3: UserWarning: beware", "  f()", "done"]) == ""
