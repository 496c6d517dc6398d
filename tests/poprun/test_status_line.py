"""The status line in a terminal for a job that has not shown anything yet."""

from __future__ import annotations

import fcntl
import os
import struct
import termios

import pytest

from popdist.records.progress import ProgressRecord
from poprun.cli.log import Level
from poprun.ipc.facts import Ending, EndKind, Facts
from poprun.output.output import Output, OutputStream
from poprun.output.output_style import OutputStyle
from poprun.supervisor.supervision import SHOW_AFTER_S, status_text, wants_status

ERASED = b"\r\x1b[K"


def joined(index: int, step: int = 0, ending: Ending | None = None) -> Facts:
    return Facts(index, "node0", 7, ending, ProgressRecord(step=step, since_s=1.0))


JOINED = [joined(0), joined(1)]
COMPILES = "no step is completed yet: the program loads data or compiles (61 s)"


@pytest.mark.parametrize(
    ("facts", "since_s", "text"),
    [
        ([Facts(0), Facts(1)], SHOW_AFTER_S / 2, ""),
        ([Facts(0), Facts(1)], 3.2, "starting 2 instances on 2 hosts (3 s)"),
        ([Facts(0, "node0", 7), Facts(1)], 3.2, "starting 2 instances on 2 hosts, 1 of 2 have started (3 s)"),
        ([Facts(0, "a", 7), Facts(1, "a", 8)], 5.0, ""),
        (JOINED, 61.9, COMPILES),
        ([joined(0), joined(1, step=1)], 62.0, ""),
        ([joined(0), joined(1, ending=Ending(EndKind.EXIT, 0, 3.0))], 5.0, ""),
    ],
    ids=["soon", "none is there", "one is there", "no record is kept", "compiling", "a step is made", "one has ended"],
)
def test_the_status_describes_the_job_until_its_first_step(facts, since_s, text):
    assert status_text(facts, 2, since_s) == text


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
def test_the_status_is_shown_on_capable_terminals_unless_only_errors_are(level, environ, is_wanted):
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
    """Read exactly these bytes, in any number of pieces."""
    taken = b""
    while len(taken) < len(shown):
        taken += os.read(ours, len(shown) - len(taken))
    assert taken == shown


class TestDrawing:
    def test_the_status_is_replaced_and_erased_and_fits_the_terminal(self, terminal):
        ours, theirs = terminal
        sink = OutputStream(theirs)
        for text in ("one", "one", "x" * 50, "", ""):
            sink.show_status(text)
        expect(ours, ERASED + b"one" + ERASED + b"x" * 19 + ERASED)
        sink.close()

    def test_any_other_output_erases_the_status(self, terminal):
        ours, theirs = terminal
        sink = OutputStream(theirs)
        sink.show_status("one")
        sink.write_own(b"own\n")
        sink.show_status("two")
        sink.write_tagged(b"[a]", b"text")
        sink.show_status("three")  # not in the line of other output
        sink.write_tagged(b"[a]", b" ends\n")
        expect(ours, ERASED + b"one" + ERASED + b"own\n" + ERASED + b"two" + ERASED + b"[a]text ends\n")
        sink.close()

    def test_a_pipe_never_gets_the_status(self):
        reader, writer = os.pipe()
        sink = OutputStream(writer)
        sink.show_status("one")
        sink.write_own(b"own\n")
        assert os.read(reader, 99) == b"own\n"
        sink.close()
        os.close(reader)
        os.close(writer)

    def test_the_status_does_not_return_after_the_job_has_shown_output(self, terminal):
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
