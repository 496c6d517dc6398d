from __future__ import annotations

import os

import pytest

from poprun import wire
from poprun.guard import NEW_PAGE, PROGRESS_VARIABLE, RELEASED_OFFSET
from poprun.lines import LONGEST_SILENCE_S, LineBuffer
from poprun.log import Level, format_line, level_from
from poprun.output import Cursor, Sink


class TestLineBuffer:
    def test_only_whole_lines_come_out(self):
        lines = LineBuffer()
        assert lines.feed(b"one\ntw", 0.0) == b"one\n"
        assert lines.feed(b"o\nthree\n", 0.0) == b"two\nthree\n"
        assert lines.flush() == b""

    def test_a_piece_comes_out_after_silence(self):
        lines = LineBuffer()
        lines.feed(b"name? ", 1.0)
        assert lines.deadline_s() == 1.0 + LONGEST_SILENCE_S
        assert lines.expire(1.1) == b""
        assert lines.expire(1.0 + LONGEST_SILENCE_S) == b"name? "
        assert lines.deadline_s() == float("inf")

    def test_writing_goes_on_so_the_line_is_kept_whole(self):
        lines = LineBuffer()
        for tenth in range(10):
            assert lines.feed(b"x", tenth / 10) == b""
            assert lines.expire(tenth / 10 + 0.05) == b""
        assert lines.feed(b"\n", 1.0) == b"x" * 10 + b"\n"

    def test_a_progress_bar_comes_out_without_silence_up_to_its_newest_state(self):
        lines = LineBuffer()
        for tenth in range(3):
            lines.feed(b"\r%d %%" % tenth, tenth / 10)
        assert lines.expire(0.21) == b"\r0 %\r1 %"
        assert lines.flush() == b"\r2 %"

    def test_the_end_brings_out_the_rest(self):
        lines = LineBuffer()
        lines.feed(b"rest", 0.0)
        assert lines.flush() == b"rest"


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


class TestSink:
    def test_every_line_is_tagged(self, pipe):
        Sink(pipe[1], Cursor()).write_tagged(b"[a]", b"one\n\ntwo\n")
        assert os.read(pipe[0], 99) == b"[a]one\n[a]\n[a]two\n"

    def test_pieces_of_one_writer_make_one_line(self, pipe):
        sink = Sink(pipe[1], Cursor())
        for piece in (b"on", b"e\nt", b"wo\n"):
            sink.write_tagged(b"[a]", piece)
        assert os.read(pipe[0], 99) == b"[a]one\n[a]two\n"

    def test_another_writer_begins_a_new_line(self, pipe):
        sink = Sink(pipe[1], Cursor())
        sink.write_tagged(b"[a]", b"name? ")
        sink.write_tagged(b"[b]", b"hello\n")
        sink.write_tagged(b"[a]", b"me\n")
        sink.write_own(b"own\n")
        assert os.read(pipe[0], 99) == b"[a]name? \n[b]hello\n[a]me\nown\n"

    def test_a_redrawn_line_keeps_its_tag(self, pipe):
        sink = Sink(pipe[1], Cursor())
        for piece in (b"\r10 %\r20 %", b"\r3", b"0 %\r", b"40 %\n"):
            sink.write_tagged(b"[a]", piece)
        assert os.read(pipe[0], 99) == b"[a]\r[a]10 %\r[a]20 %\r[a]30 %\r[a]40 %\n"

    def test_dos_line_ends_are_left_alone(self, pipe):
        Sink(pipe[1], Cursor()).write_tagged(b"[a]", b"one\r\n\r\n")
        assert os.read(pipe[0], 99) == b"[a]one\r\n[a]\r\n"

    def test_a_reader_that_is_slow_is_not_waited_for(self, pipe):
        sink = Sink(pipe[1], Cursor())
        sink.write_tagged(b"", b"x" * 300_000 + b"\n")
        assert sink.held_bytes > 0
        taken = 0
        while sink.held_bytes:
            taken += len(os.read(pipe[0], 65536))
            sink.flush()
        assert taken + len(os.read(pipe[0], 65536)) == 300_001

    def test_a_reader_that_is_gone_is_noticed(self):
        reader, writer = os.pipe()
        os.close(reader)
        sink = Sink(writer, Cursor())
        sink.write_tagged(b"[a]", b"one\n")
        assert sink.is_closed
        assert sink.held_bytes == 0
        os.close(writer)


class TestWire:
    def test_messages_survive_any_cut(self):
        messages = [
            wire.pack_hello(3, 77, "höst"),
            wire.pack(wire.STDOUT, b"line\n"),
            wire.pack_ended(by_signal=True, told=False, number=9, at_s=1.5),
            wire.pack_progress(2.5, b"page"),
            wire.pack_number(wire.SIGNAL, 15),
            wire.pack(wire.CLOSED),
        ]
        reader = wire.MessageReader()
        stream = b"".join(messages)
        received = [message for at in range(len(stream)) for message in reader.feed(stream[at : at + 1])]
        assert received == wire.MessageReader().feed(stream)
        contents = dict(received)
        assert wire.unpack_hello(contents[wire.HELLO]) == (3, 77, "höst")
        assert contents[wire.STDOUT] == b"line\n"
        assert wire.unpack_ended(contents[wire.ENDED]) == (True, False, 9, 1.5)
        assert wire.unpack_progress(contents[wire.PROGRESS]) == (2.5, b"page")
        assert wire.unpack_number(contents[wire.SIGNAL]) == 15


def test_the_shim_and_popdist_agree_on_the_progress_page():
    from popdist.environments import ProgressPage
    from popdist.environments.progress import DESCRIPTOR_VARIABLE, new_page

    assert new_page() == NEW_PAGE
    assert DESCRIPTOR_VARIABLE == PROGRESS_VARIABLE
    descriptor = os.memfd_create("progress")
    os.write(descriptor, NEW_PAGE)
    page = ProgressPage(descriptor)
    assert not page.is_released
    os.pwrite(descriptor, b"\1", RELEASED_OFFSET)
    assert page.is_released
    os.close(descriptor)


class TestLog:
    def test_the_shape_of_a_line(self):
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
    def test_its_level(self, verbosity, variable, level):
        environ = {} if variable is None else {"POPRUN_LOG_LEVEL": variable}
        assert level_from(verbosity, environ) is level
