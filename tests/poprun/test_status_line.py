"""A terminal shows what a job does that has not shown anything yet."""

from __future__ import annotations

import fcntl
import os
import struct
import termios

import pytest

from popdist.records.progress import ProgressRecord
from poprun.cli.log import Level
from poprun.ipc.facts import Ending, EndKind, Facts
from poprun.output.output import Output, Sink
from poprun.output.output_style import OutputStyle
from poprun.supervisor.status_line import SHOW_AFTER_S, StatusLine, wants_status

ERASED = b"\r\x1b[K"


def joined(index: int, step: int = 0, ending: Ending | None = None) -> Facts:
    return Facts(index, "node0", 7, ending, ProgressRecord(step=step, since_s=1.0))


class TestText:
    def test_says_how_many_have_started(self):
        status = StatusLine(4, 2, 10.0)
        unseen = [Facts(index) for index in range(4)]
        assert status.text(unseen, 10.0 + SHOW_AFTER_S / 2) == ""
        assert status.text(unseen, 13.2) == "starting 4 instances on 2 hosts (3 s)"
        some = [Facts(0, "node0", 7), *unseen[1:]]
        assert status.text(some, 13.2) == "starting 4 instances on 2 hosts, 1 of 4 are there (3 s)"

    def test_says_nothing_of_programs_that_keep_no_record(self):
        assert StatusLine(2, 1, 0.0).text([Facts(0, "a", 7), Facts(1, "a", 8)], 5.0) == ""

    def test_tells_of_compiling_until_the_first_step_is_completed(self):
        status = StatusLine(2, 1, 0.0)
        text = "no step is completed yet: data are loaded, programs compiled (61 s)"
        assert status.text([joined(0), joined(1)], 61.9) == text
        assert status.text([joined(0), joined(1, step=1)], 62.0) == ""

    def test_says_nothing_once_one_has_ended(self):
        ended = joined(1, ending=Ending(EndKind.EXIT, 0, 3.0))
        assert StatusLine(2, 1, 0.0).text([joined(0), ended], 5.0) == ""


@pytest.mark.parametrize(
    ("level", "environ", "is_wanted"),
    [
        (Level.WARN, {"TERM": "xterm"}, True),
        (Level.INFO, {"TERM": "xterm"}, True),
        (Level.ERROR, {"TERM": "xterm"}, False),
        (Level.WARN, {"TERM": "dumb"}, False),
        (Level.WARN, {}, False),
    ],
)
def test_who_wants_it(level, environ, is_wanted):
    assert wants_status(level, environ) is is_wanted


@pytest.fixture
def terminal():
    ours, theirs = os.openpty()
    attributes = termios.tcgetattr(theirs)
    attributes[1] &= ~termios.OPOST
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 20, 0, 0))
    yield ours, theirs
    os.close(theirs)
    os.close(ours)


def expect(ours: int, shown: bytes) -> None:
    """Read so much, in however many pieces it comes."""
    taken = b""
    while len(taken) < len(shown):
        taken += os.read(ours, len(shown) - len(taken))
    assert taken == shown


class TestDrawing:
    def test_it_is_replaced_and_erased_and_never_wider_than_the_terminal(self, terminal):
        ours, theirs = terminal
        sink = Sink(theirs)
        for text in ("one", "one", "x" * 50, "", ""):
            sink.show_status(text)
        expect(ours, ERASED + b"one" + ERASED + b"x" * 19 + ERASED)
        sink.close()

    def test_whatever_is_written_erases_it(self, terminal):
        ours, theirs = terminal
        sink = Sink(theirs)
        sink.show_status("one")
        sink.write_own(b"own\n")
        sink.show_status("two")
        sink.write_tagged(b"[a]", b"text")
        sink.show_status("three")  # not into the line of another one
        sink.write_tagged(b"[a]", b" ends\n")
        expect(ours, ERASED + b"one" + ERASED + b"own\n" + ERASED + b"two" + ERASED + b"[a]text ends\n")
        sink.close()

    def test_a_pipe_never_gets_it(self):
        reader, writer = os.pipe()
        sink = Sink(writer)
        sink.show_status("one")
        sink.write_own(b"own\n")
        assert os.read(reader, 99) == b"own\n"
        sink.close()
        os.close(reader)
        os.close(writer)

    def test_it_does_not_come_back_once_the_job_has_shown_something(self, terminal):
        ours, theirs = terminal
        saved = os.dup(2)
        os.dup2(theirs, 2)
        try:
            output = Output(style=OutputStyle(hosts=("node0",), colours=False))
        finally:
            os.dup2(saved, 2)
            os.close(saved)
        output.stderr.descriptor = theirs
        output.show_status("starting")
        output.show(0, 1, b"out\n")
        output.show_status("compiling")
        output.stderr.write_own(b"end\n")
        expect(ours, ERASED + b"starting" + ERASED + b"end\n")
        output.stderr.close()
