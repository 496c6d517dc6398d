"""poprun's own output streams and the look of tags."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from poprun.cli.settings import LaunchSettings
from poprun.output.output import TAIL_LINES, Output, OutputStream
from poprun.output.output_style import Cursor, OutputStyle, style_from

HOSTS = ("node0", "node0", "node1")


def shown(*pieces: tuple[bytes, bytes], clock: bytes = b"") -> bytes:
    cursor = Cursor()
    return b"".join(cursor.tagged(tag, data, clock) for tag, data in pieces)


class TestCursor:
    @pytest.mark.parametrize(
        ("pieces", "text"),
        [
            ([(b"[a]", b"one\n\ntwo\n")], b"[a]one\n[a]\n[a]two\n"),
            ([(b"[a]", each) for each in (b"on", b"e\nt", b"w", b"o\n", b"\n")], b"[a]one\n[a]two\n[a]\n"),
            ([(b"[a]", b"one"), (b"[a]", b"\n"), (b"[b]", b"two\n")], b"[a]one\n[b]two\n"),
            ([(b"[a]", b"name? "), (b"[b]", b"hello\n"), (b"[a]", b"me\n")], b"[a]name? \n[b]hello\n[a]me\n"),
            (
                [(b"[a]", each) for each in (b"\r10 %\r20 %", b"\r3", b"0 %\r", b"40 %\n")],
                b"[a]\r[a]10 %\r[a]20 %\r[a]30 %\r[a]40 %\n",
            ),
            ([(b"[a]", b"one\r\n\r\n")], b"[a]one\r\n[a]\r\n"),
            ([(b"[a]", b"5 %\r6 %\r\n")], b"[a]5 %\r[a]6 %\r\n"),
        ],
        ids=["lines", "pieces of a line", "a line end alone", "another writer", "redrawn", "DOS", "redrawn in DOS"],
    )
    def test_every_line_is_tagged_once(self, pieces, text):
        assert shown(*pieces) == text

    def test_the_clock_stands_before_the_tag_and_does_not_tell_writers_apart(self):
        cursor = Cursor()
        text = cursor.tagged(b"[a]", b"one\ntw", b"12:00 ") + cursor.tagged(b"[a]", b"o\n", b"12:01 ")
        assert text == b"12:00 [a]one\n12:00 [a]two\n"
        assert shown((b"[a]", b"1 %\r2 %"), clock=b"12:00 ") == b"12:00 [a]1 %\r12:00 [a]2 %"

    def test_an_unfinished_line_is_finished_once(self):
        cursor = Cursor()
        cursor.tagged(b"[a]", b"one")
        assert (cursor.end_line(), cursor.end_line()) == (b"\n", b"")


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


@pytest.fixture
def sink(pipe):
    made = OutputStream(pipe[1])
    yield made
    made.close()


class TestSink:
    def test_own_lines_stand_alone(self, pipe, sink):
        sink.write_tagged(b"[a]", b"name? ")
        sink.write_own(b"own\n")
        assert os.read(pipe[0], 99) == b"[a]name? \nown\n"

    def test_a_slow_reader_is_not_waited_for(self, pipe, sink):
        text = b"".join(b"%06d\n" % number for number in range(50_000))
        sink.write_tagged(b"", text)
        assert sink.held_bytes > 0
        taken = b""
        while sink.held_bytes:
            taken += os.read(pipe[0], 65536)
            sink.flush()
        while len(taken) < len(text):
            taken += os.read(pipe[0], 65536)
        assert taken == text

    def test_a_slow_reader_is_not_waited_for_without_a_descriptor_of_its_own(self, pipe, sink):
        sink.close()
        self.test_a_slow_reader_is_not_waited_for(pipe, sink)

    def test_the_shared_descriptor_stays_blocking_for_others(self, pipe, sink):
        sink.write_tagged(b"", b"x" * 300_000)
        assert os.get_blocking(pipe[1])

    def test_a_closed_reader_is_noticed(self):
        reader, writer = os.pipe()
        sink = OutputStream(writer)
        os.close(reader)
        sink.write_tagged(b"[a]", b"one\n")
        assert (sink.is_closed, sink.fault) == (True, "")
        assert sink.held_bytes == 0
        sink.close()
        os.close(writer)

    def test_a_full_disk_is_told_apart_from_a_closed_reader(self):
        descriptor = os.open("/dev/full", os.O_WRONLY)
        sink = OutputStream(descriptor)
        sink.write_tagged(b"[a]", b"one\n")
        os.close(descriptor)
        assert (sink.is_closed, sink.fault) == (True, os.strerror(errno.ENOSPC))

    def test_a_file_takes_everything_at_once(self, tmp_path):
        descriptor = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
        sink = OutputStream(descriptor)
        sink.write_tagged(b"[a]", b"x" * 1_000_000 + b"\n")
        assert sink.held_bytes == 0
        assert not sink.is_terminal
        assert (tmp_path / "file").stat().st_size == 1_000_004
        os.close(descriptor)

    def test_a_terminal_is_recognised(self):
        ours, theirs = os.openpty()
        sink = OutputStream(theirs)
        assert sink.is_terminal
        sink.close()
        os.close(theirs)
        os.close(ours)


class TestStyle:
    @pytest.mark.parametrize(
        ("style", "tag"),
        [
            (OutputStyle(), b"[1,2]<stderr>:"),
            (OutputStyle(hosts=HOSTS), b"[1,2]<stderr>:"),
            (OutputStyle(tag_host=True, hosts=HOSTS), b"[1,2][node1]<stderr>:"),
        ],
    )
    def test_a_tag_names_instance_stream_and_on_request_the_host(self, style, tag):
        assert style.tag(2, 2) == tag
        assert re.sub(rb"\x1b\[[0-9;]*m", b"", style.tag(2, 2, coloured=True)) == tag

    def test_each_instance_has_its_colour_and_the_colour_ends_with_the_tag(self):
        style = OutputStyle()
        assert style.tag(0, 1, coloured=True) == b"\x1b[0;36m[1,0]<stdout>:\x1b[0m"
        assert style.tag(0, 2, coloured=True) == b"\x1b[0;36m[1,0]\x1b[31m<stderr>:\x1b[0m"
        colours = [style.tag(instance, 1, coloured=True).partition(b"[1,")[0] for instance in range(20)]
        assert len(set(colours[:10])) == 10
        assert colours[:10] == colours[10:]

    def test_colours_are_used_only_on_terminals(self):
        assert [OutputStyle().is_coloured(is_terminal) for is_terminal in (True, False)] == [True, False]
        assert not OutputStyle(colours=False).is_coloured(is_terminal=True)

    def test_the_clock_is_shown_on_request(self):
        assert OutputStyle().clock(0.0) == b""
        assert re.fullmatch(rb"\d\d:\d\d:\d\d\.250 ", OutputStyle(timestamps=True).clock(1_700_000_000.25))

    def test_columns_of_the_tags_are_known(self):
        assert OutputStyle(hosts=HOSTS).columns == len("[1,2]<stderr>:")
        style = OutputStyle(tag_host=True, timestamps=True, hosts=HOSTS)
        assert style.columns == len("12:34:56.789 [1,2][node1]<stderr>:")

    def test_the_style_is_read_from_the_settings(self):
        plain = style_from(LaunchSettings(program=("p",)), HOSTS, {"TERM": "xterm", "NO_COLOR": ""})
        assert plain == OutputStyle(hosts=HOSTS)
        settings = LaunchSettings(program=("p",), tag_host=True, timestamps=True, output_dir="out")
        assert style_from(settings, HOSTS, {}) == OutputStyle(True, True, None, Path("out"), HOSTS)

    def test_only_a_single_instance_in_a_pipe_has_no_tags(self):
        def untagged(is_piped=True, **options):
            return sorted(style_from(LaunchSettings(program=("p",), **options), HOSTS, {}, is_piped).untagged)

        assert untagged() == [1]
        assert untagged(is_piped=False) == []
        assert untagged(num_instances=2, num_replicas=2) == []
        assert untagged(tag_host=True) == untagged(timestamps=True) == []
        assert untagged(num_instances=2, num_replicas=2, no_tags=True) == [1, 2]

    def test_without_tags_no_columns_are_taken(self):
        assert OutputStyle(hosts=HOSTS, untagged=frozenset((1, 2))).columns == 0

    @pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
    def test_colours_can_be_disabled(self, environ):
        assert style_from(LaunchSettings(program=("p",)), HOSTS, environ).colours is False


class TestOutput:
    def test_streams_stay_separate(self, capfdbinary):
        output = Output()
        output.show(0, 1, b"out\n")
        output.show(1, 2, b"err\n")
        output.show_own(2, b"own\n")
        output.finish(1.0)
        assert capfdbinary.readouterr() == (b"[1,0]<stdout>:out\n", b"[1,1]<stderr>:err\nown\n")

    def test_two_streams_into_one_file_share_a_sink(self, pipe):
        saved = os.dup(1), os.dup(2)
        os.dup2(pipe[1], 1)
        os.dup2(pipe[1], 2)
        try:
            output = Output()
        finally:
            os.dup2(saved[0], 1)
            os.dup2(saved[1], 2)
        (only,) = output.sinks
        assert output.stderr is output.stdout is only
        only.close()
        for descriptor in saved:
            os.close(descriptor)

    def test_lines_without_tags_stay_whole(self, capfdbinary):
        output = Output(style=OutputStyle(hosts=HOSTS, untagged=frozenset((1, 2))))
        for instance, data in ((0, b"on"), (1, b"two\n"), (0, b"three\n"), (1, b"last")):
            output.show(instance, 1, data)
        output.finish(1.0)
        assert capfdbinary.readouterr().out == b"on\ntwo\nthree\nlast\n"

    def test_a_plain_stream_gets_the_original_bytes(self, capfdbinary):
        output = Output(style=OutputStyle(hosts=HOSTS, untagged=frozenset((1,)), is_plain=True))
        output.show(0, 1, b"a\rb\r\nla")
        output.show(0, 1, b"st")
        output.show(0, 2, b"err")
        output.finish(1.0)
        assert capfdbinary.readouterr() == (b"a\rb\r\nlast", b"[1,0]<stderr>:err\n")

    def test_the_style_applies_to_both_streams(self, capfdbinary):
        style = OutputStyle(tag_host=True, timestamps=True, hosts=HOSTS)
        output = Output(style=style)
        output.show(2, 1, b"out\n")
        output.show(0, 2, b"err\n")
        output.finish(1.0)
        out, err = capfdbinary.readouterr()
        assert re.fullmatch(rb"[\d:.]{12} \[1,2\]\[node1\]<stdout>:out\n", out)
        assert re.fullmatch(rb"[\d:.]{12} \[1,0\]\[node0\]<stderr>:err\n", err)

    def test_the_last_errors_of_a_silenced_instance_can_be_shown(self, capfdbinary):
        output = Output(only=0)
        output.show(1, 1, b"out\n")
        output.show(1, 2, b"".join(b"%d\n" % number for number in range(TAIL_LINES + 9)))
        output.show_hidden_errors(1)
        output.finish(1.0)
        out, err = capfdbinary.readouterr()
        assert out == b""
        assert err.splitlines()[0] == b"[1,1]<stderr>:9"
        assert len(err.splitlines()) == TAIL_LINES

    def test_unread_output_makes_poprun_fall_behind(self, pipe):
        saved = os.dup(1)
        os.dup2(pipe[1], 1)
        try:
            output = Output()
            output.show(0, 1, b"x" * (17 << 20))
        finally:
            os.dup2(saved, 1)
            os.close(saved)
        assert output.is_behind
        output.stdout.close()
