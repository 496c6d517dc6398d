"""The recording of an instance: the ring buffer, the file and the instrument."""

from __future__ import annotations

import io
import itertools
import multiprocessing
import os
import subprocess
import sys
import threading
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from collectives.calls import Call
from collectives.instruments import CHECKPOINT, DATA, UPDATE, Instruments
from popdist.errors import EnvironmentMismatchError
from popdist.timeline import events as blocks
from popdist.timeline.asked import TimelineOptions
from popdist.timeline.events import EVENT, EventKind
from popdist.timeline.gauges import Gauge
from popdist.timeline.recorder import Recorder, RingBuffer
from popdist.timeline.spilling import TimelineFile, line_of, stride_of


def kinds_of(events):
    return [EventKind(kind) for kind in events["kind"].tolist()]


class TestTheRing:
    def test_the_ring_returns_events_once_and_in_order(self):
        ring = RingBuffer(8, itertools.count(100).__next__)
        for value in range(3):
            ring.append(1, 2, 3, value)
        events, lost = ring.take()
        assert events.tolist() == [(100 + value, 1, 2, 3, value) for value in range(3)]
        assert lost == 0
        assert len(ring.take()[0]) == 0

    @pytest.mark.parametrize("size", [1, 8, 512, 1024])
    def test_the_ring_wraps_around(self, size):
        ring = RingBuffer(size)
        taken = []
        for value in range(5 * size + 3):
            ring.append(1, 0, 0, value)
            if value % size == size - 1:
                taken += ring.take()[0]["value"].tolist()
        taken += ring.take()[0]["value"].tolist()
        assert taken == list(range(5 * size + 3))

    @pytest.mark.parametrize("much", [1, 3, 8, 20])
    def test_the_ring_counts_lost_events(self, much):
        ring = RingBuffer(8)
        for value in range(8 + much):
            ring.append(1, 0, 0, value)
        events, lost = ring.take()
        assert (lost, events["value"].tolist()) == (much, list(range(much, 8 + much)))
        ring.append(1, 0, 0, 7)
        events, lost = ring.take()
        assert (lost, events["value"].tolist()) == (0, [7])

    def test_the_ring_keeps_the_order_of_each_of_several_threads(self):
        """Each look comes while all threads append; the ring gives up a record that is missing at two looks."""
        ring = RingBuffer(1 << 14)
        looks = threading.Barrier(5, timeout=60)

        def append(track):
            for look in range(5):
                looks.wait()
                for value in range(200):
                    ring.append(1, track, 0, 200 * look + value)

        threads = [threading.Thread(target=append, args=(track,)) for track in range(4)]
        for thread in threads:
            thread.start()
        taken = []
        for _ in range(5):
            looks.wait()
            taken.append(ring.take()[0])
        for thread in threads:
            thread.join()
        events = np.concatenate([*taken, ring.take()[0]])
        for track in range(4):
            assert events["value"][events["track"] == track].tolist() == list(range(1000))

    @pytest.mark.parametrize(
        ("case", "told"),
        [((True, True), [(0, [0, 1]), (1, [3, 4])]), ((False,), [(1, [0, 1, 3, 4])])],
        ids=["at the second look", "at the end"],
    )
    def test_the_ring_skips_a_record_that_never_came(self, case, told):
        """An exception came between the draw of a number and the write of its slot."""
        numbers = itertools.count()

        def now_ns():
            if next(numbers) == 2:
                raise KeyboardInterrupt
            return 0

        ring = RingBuffer(8, now_ns)
        taken = []
        for value in range(5):
            with suppress(KeyboardInterrupt):
                ring.append(1, 0, 0, value)
        for waits in case:
            events, lost = ring.take(waits)
            taken.append((lost, events["value"].tolist()))
        assert taken == told
        ring.append(1, 0, 0, 7)
        assert ring.take()[0]["value"].tolist() == [7]

    def test_the_number_of_slots_is_a_power_of_two(self):
        with pytest.raises(ValueError, match="7 slots; use a power of two"):
            RingBuffer(7)


def some_events(seed, count=50):
    random = np.random.default_rng(seed)
    events = np.zeros(count, EVENT)
    for name in EVENT.names:
        limits = np.iinfo(EVENT[name])
        events[name] = random.integers(limits.min // 4, limits.max // 4, count)
    return events


class TestAFile:
    @pytest.mark.parametrize("count", [0, 1, 50])
    def test_a_file_holds_events_unchanged(self, seed, count):
        events = some_events(seed, count)
        assert blocks.unpack_events(blocks.pack_events(events)).tolist() == events.tolist()

    def test_the_format_equals_that_of_earlier_versions(self):
        """The columns are the first bytes of all time differences, the second bytes, ...; then kinds, tracks, names,
        values.
        """
        first = 10**15
        events = [(first, 1, 0, 0, 7), (first + 256, 3, 2, 70_000, -1), (first + 200, 12, 0, 3, 2**40)]
        columns = (
            "0000c8 8001ff c600ff a400ff 7e00ff 8d00ff 0300ff 0000ff"
            "01030c 000000 000200 000000 007003 001100 000100 000000"
            "07ff00 00ff00 00ff00 00ff00 00ff00 00ff01 00ff00 00ff00"
        )
        packed = blocks.pack_events(np.array(events, EVENT))
        assert (packed[:4], zlib.decompress(packed[4:])) == (b"\x03\0\0\0", bytes.fromhex(columns))
        assert blocks.unpack_events(packed[:4] + zlib.compress(bytes.fromhex(columns))).tolist() == events

    def test_a_truncated_file_is_read_up_to_the_cut(self, seed):
        written = [
            blocks.json_block(blocks.HEADER, {"instance": 1}),
            blocks.names_block({0: {"name": "data"}}),
            blocks.block(blocks.EVENTS, blocks.pack_events(some_events(seed))),
            blocks.block(blocks.CLOCKS, blocks.pack_exchanges([(1, 2, 3, 4)])),
            blocks.block(blocks.END, b""),
        ]
        data = blocks.MAGIC + b"".join(written)
        ends = np.cumsum([len(blocks.MAGIC), *map(len, written)])
        for length in range(len(data) + 1):
            found = list(blocks.read_blocks(data[:length]))
            assert len(found) == max(0, np.searchsorted(ends, length, side="right") - 1)

    @pytest.mark.parametrize("place", [0, 4, 8, 12, 14], ids=["kind", "length", "longer", "checksum", "content"])
    def test_a_damaged_file_is_refused_after_its_intact_blocks(self, place):
        first = blocks.MAGIC + blocks.json_block(blocks.HEADER, {})
        data = bytearray(first + blocks.json_block(blocks.JOINED, {"job": "a"}) + blocks.block(blocks.END, b""))
        data[len(first) + place - (place == 8)] ^= 1
        found = blocks.read_blocks(bytes(data))
        assert next(found).kind == blocks.HEADER
        with pytest.raises(ValueError, match=f"it is damaged at byte {len(first)}"):
            next(found)

    def test_a_file_that_ends_in_zeros_is_read_up_to_them(self):
        data = blocks.MAGIC + blocks.json_block(blocks.HEADER, {}) + bytes(4096)
        assert [each.kind for each in blocks.read_blocks(data)] == [blocks.HEADER]

    def test_a_block_with_too_many_events_is_refused_before_it_is_unpacked(self):
        """1.8 MB became 400 MB and more."""
        bomb = zlib.compress(bytes(24 << 20))
        with pytest.raises(ValueError, match="more than 64 for each byte"):
            blocks.unpack_events((1 << 20).to_bytes(4, "little") + bomb, 64 * len(bomb))
        with pytest.raises(ValueError, match="it does not have the 1 events that it announces"):
            blocks.unpack_events((1).to_bytes(4, "little") + bomb, 64 * len(bomb))

    def test_a_file_of_another_kind_is_refused(self):
        with pytest.raises(ValueError, match="does not begin as a recording"):
            list(blocks.read_blocks(b"[{}]"))


class TestSampling:
    def test_all_steps_are_recorded_until_half_of_the_room_is_taken(self):
        assert {stride_of(written, 1000) for written in range(470)} == {1}
        assert stride_of(480, 1000) == 2

    def test_strides_are_powers_of_two_so_that_instances_share_steps(self):
        strides = [stride_of(written, 10**6) for written in range(0, 10**6, 100)]
        assert strides == [*sorted(stride for stride in strides if stride), *(0 for s in strides if not s)]
        assert all(stride & (stride - 1) == 0 for stride in strides)

    @pytest.mark.complete
    def test_a_run_of_any_length_stays_within_the_limit(self):
        """The run has ten thousand times as many steps as the limit has room for."""
        written, limit = 0, 10_000
        for step in range(1_000_000):
            stride = stride_of(written, limit)
            written += 100 if stride and step % stride == 0 else 0
        assert 0.9 * limit < written <= limit


class TestTheInstrument:
    def test_the_instrument_records_events_in_order(self):
        ring = RingBuffer(64)
        recorder = Recorder(ring)
        instruments = Instruments(recorder)
        call = Call("all_reduce", "gradients", "sum", "float32", (4,))
        with instruments.during[DATA]:
            pass
        instruments.step_begins(7)
        instruments.operation_begins(3, call)
        instruments.data_moves(16)
        instruments.operation_ends()
        instruments.waiting_for([2])
        instruments.replica_begins(5, 1)
        instruments.replica_ends(5, 1, 9)
        instruments.step_ends(32, 0.5)
        events, _ = ring.take()
        names = recorder.take_new_names()
        assert [(EventKind(kind).name, track, value) for _, kind, track, _, value in events.tolist()[:-1]] == [
            ("PHASE_BEGINS", 0, 0),
            ("PHASE_ENDS", 0, 0),
            ("STEP_BEGINS", 0, 7),
            ("OPERATION_BEGINS", 0, 3),
            ("DATA_MOVES", 0, 16),
            ("OPERATION_ENDS", 0, 0),
            ("WAITS_FOR", 0, 2),
            ("REPLICA_BEGINS", 2, 0),
            ("REPLICA_ENDS", 2, 9),
            ("STEP_ENDS", 0, 32),
        ]
        assert names[events["name"][3]]["call"] == str(call)
        assert names[events["name"][-1]]["name"] == "loss"
        assert events["value"][-1:].view(np.float64)[0] == 0.5
        assert recorder.take_new_names() == {}

    def test_omitted_steps_include_their_data_phase(self):
        ring, stride = RingBuffer(64), [1]
        instruments = Instruments(Recorder(ring, lambda: stride[0]))
        stride[0] = 2
        for step in range(3):
            for phase in (DATA, CHECKPOINT):
                with instruments.during[phase]:
                    pass
            instruments.step_begins(step)
            with instruments.during[UPDATE]:
                pass
        kinds = kinds_of(ring.take()[0])
        recorded = [EventKind.PHASE_BEGINS, EventKind.PHASE_ENDS] * 2 + [
            EventKind.STEP_BEGINS,
            EventKind.PHASE_BEGINS,
            EventKind.PHASE_ENDS,
        ]
        assert kinds == [*recorded, EventKind.PHASE_BEGINS, EventKind.PHASE_ENDS, EventKind.STEP_BEGINS, *recorded]

    def test_only_steps_are_recorded_if_there_is_no_room(self):
        ring = RingBuffer(64)
        instruments = Instruments(Recorder(ring, lambda: 0))
        instruments.step_begins(0)
        with instruments.during[UPDATE]:
            instruments.operation_begins(1, Call("barrier"))
        instruments.step_ends(1, 0.0)
        assert kinds_of(ring.take()[0]) == [EventKind.STEP_BEGINS, EventKind.STEP_ENDS]


class TestARecording:
    def test_a_closed_recording_has_all_events(self, tmp_path):
        recording = TimelineFile(tmp_path / "folder" / "a", {"instance": 0}, 10**6)
        recording.start()
        recording.recorder.step_begins(1)
        recording.align_by(lambda: [(1, 2, 3, 4)])
        recording.close()
        recording.close()
        found = list(blocks.read_blocks((tmp_path / "folder" / "a").read_bytes()))
        kinds = [each.kind for each in found]
        assert (kinds[0], kinds[-1]) == (blocks.HEADER, blocks.END)
        events = [blocks.unpack_events(each.content) for each in found if each.kind == blocks.EVENTS]
        assert EventKind.STEP_BEGINS in np.concatenate(events)["kind"]
        assert kinds.index(blocks.NAMES) < kinds.index(blocks.EVENTS)

    def test_an_unwritable_recording_does_not_disturb_the_program(self, tmp_path, caplog):
        (tmp_path / "folder").write_text("a file")
        recording = TimelineFile(tmp_path / "folder" / "a", {}, 10**6)
        recording.start()
        recording.recorder.step_begins(1)
        recording.close()
        assert "the program goes on without" in caplog.text

    def test_a_full_disk_does_not_stop_the_recording(self, caplog, tmp_path):
        (tmp_path / "full").symlink_to("/dev/full")
        recording = TimelineFile(tmp_path / "full", {}, 10**6)
        recording.spill()
        recording.close()
        assert caplog.text.count("No space left on device") == 1

    def test_a_recording_stays_below_its_limit_and_reports_omitted_events(self, tmp_path):
        limit, steps = 20_000, 5000
        recording = TimelineFile(tmp_path / "a", {"instance": 0}, limit)
        random = np.random.default_rng(0)
        for step in range(steps):
            recording.recorder.step_begins(step)
            recording.recorder.measured("anything", random.random())
            if step % 100 == 0:
                recording.spill()
        recording.close()
        data = (tmp_path / "a").read_bytes()
        assert 0.7 * limit < len(data) <= limit
        found = list(blocks.read_blocks(data))
        assert found[-1].kind == blocks.END
        events = np.concatenate([blocks.unpack_events(each.content) for each in found if each.kind == blocks.EVENTS])
        (lost,) = events["value"][events["kind"] == EventKind.EVENTS_LOST].tolist()
        begun = np.count_nonzero(events["kind"] == EventKind.STEP_BEGINS)
        assert 0 < begun < steps
        assert lost >= 2 * (steps - begun)

    def test_a_recording_reports_events_lost_in_the_ring(self, tmp_path):
        recording = TimelineFile(tmp_path / "a", {"instance": 0}, 10**7)
        for value in range((1 << 16) + 5):
            recording._ring.append(EventKind.WAITS_FOR, 0, 0, value)
        recording.spill()
        found = blocks.read_blocks((tmp_path / "a").read_bytes())
        (events,) = [blocks.unpack_events(each.content) for each in found if each.kind == blocks.EVENTS]
        recording.close()
        assert (events["kind"][0], events["value"][0]) == (EventKind.EVENTS_LOST, 5)
        assert events["value"][1:].tolist() == list(range(5, (1 << 16) + 5))

    def test_a_partial_write_is_completed(self, tmp_path):
        class Little(io.FileIO):
            def write(self, data):
                return super().write(data[:7])

        recording = TimelineFile(tmp_path / "a", {"instance": 0}, 10**6)
        recording._file.close()
        recording._file = Little(tmp_path / "b", "wb")
        recording._write(blocks.MAGIC + blocks.json_block(blocks.HEADER, {"instance": 0}))
        recording.close()
        kinds = [each.kind for each in blocks.read_blocks((tmp_path / "b").read_bytes())]
        assert (kinds[0], kinds[-1]) == (blocks.HEADER, blocks.END)

    @pytest.mark.filterwarnings("ignore:.*fork")
    def test_forked_processes_do_not_write_the_recording(self, tmp_path):
        recording = TimelineFile(tmp_path / "a", {"instance": 0}, 10**6)
        recording.recorder.step_begins(1)
        child = multiprocessing.get_context("fork").Process(target=recording.close)
        child.start()
        child.join()
        assert child.exitcode == 0
        recording.close()
        kinds = [each.kind for each in blocks.read_blocks((tmp_path / "a").read_bytes())]
        assert kinds.count(blocks.END) == 1
        assert kinds.count(blocks.EVENTS) == 1

    def test_a_file_in_use_makes_a_recording_choose_another_name(self, tmp_path):
        """Two jobs record into one folder."""
        path = tmp_path / "instance-0.timeline"
        first = TimelineFile(path, {"instance": 0}, 10**6)
        assert in_another_process(path) == "True instance-0.process-number\n"
        first.close()
        assert path.read_bytes().startswith(blocks.MAGIC)
        assert in_another_process(path) == "False instance-0\n"


ANOTHER = """\
import os, sys
from pathlib import Path
from popdist.records.private_files import is_being_written, open_recording
path = Path(sys.argv[1])
print(is_being_written(path), Path(open_recording(path).name).stem.replace(str(os.getpid()), "number"))
"""


def in_another_process(path):
    """Return whether the file is in use, and the name that another process gets in its place."""
    return subprocess.run([sys.executable, "-c", ANOTHER, path], capture_output=True, text=True, check=True).stdout


class TestAGauge:
    @pytest.mark.parametrize(("takes_s", "reads"), [(0.0001, 10), (0.0007, 5), (0.0024, 2), (0.006, 1)])
    def test_a_slow_gauge_is_read_more_rarely(self, takes_s, reads):
        """The gauge is requested ten times, every half second; reading takes at most a thousandth of the time."""
        clock, spent, told = [0.0], [0.0], []

        def read():
            spent[0] += takes_s
            return {"a": 1.0, "b": 2.0}

        gauge = Gauge(read, lambda: clock[0], lambda: spent[0])
        for _ in range(10):
            gauge.look(lambda *number: told.append(number))
            clock[0] += 0.5
        assert told == [("a", 1.0), ("b", 2.0)] * reads
        gauge.look(lambda *number: told.append(number), is_last=True)
        assert told == [("a", 1.0), ("b", 2.0)] * (reads + 1)


class TestTimelineOptions:
    def test_no_timeline_is_recorded_without_a_folder(self):
        assert TimelineOptions.from_environ({"POPDIST_TIMELINE": ""}) is None

    def test_folder_and_limit_are_read(self):
        asked = TimelineOptions.from_environ({"POPDIST_TIMELINE": "/a", "POPDIST_TIMELINE_LIMIT": "3"})
        assert (str(asked.folder), asked.limit_bytes) == ("/a", 3_000_000)

    @pytest.mark.parametrize("limit", ["0", "-1", "3MB"])
    def test_an_impossible_limit_is_refused(self, limit):
        with pytest.raises(
            EnvironmentMismatchError, match="POPDIST_TIMELINE_LIMIT='.*' is not a positive whole number"
        ):
            TimelineOptions.from_environ({"POPDIST_TIMELINE": "/a", "POPDIST_TIMELINE_LIMIT": limit})


class TestTheLineBetweenSteps:
    def test_the_line_is_looked_up_only_between_steps(self):
        """No line is looked up before the first step, in a step, in a phase, or in a collective."""
        recorder = Recorder(RingBuffer())
        happens = [
            (lambda: None, False),
            (lambda: recorder.step_begins(0), False),
            (lambda: recorder.step_ends(8, 0.5), True),
            (lambda: recorder.phase_begins(DATA), False),
            (lambda: recorder.phase_ends(DATA), True),
            (lambda: recorder.operation_begins(1, Call("barrier")), False),
            (recorder.operation_ends, True),
            (lambda: recorder.step_begins(1), False),
        ]
        for what, is_idle in happens:
            what()
            assert recorder.idle_thread == (threading.get_ident() if is_idle else 0)

    def test_the_line_is_the_innermost_one_of_the_program(self):
        there, go_on = threading.Event(), threading.Event()

        def wait():
            there.set()
            go_on.wait(60)  # a line of the standard library is further inside

        thread = threading.Thread(target=wait)
        thread.start()
        there.wait(60)
        line = line_of(thread.ident)
        go_on.set()
        thread.join()
        file, _, number = line.rpartition(":")
        assert Path(file).resolve() == Path(__file__)
        assert abs(int(number) - wait.__code__.co_firstlineno - 2) <= 1
        assert line_of(-1) == ""

    def test_a_line_is_an_event_preceded_by_its_name(self):
        recorder = Recorder(ring := RingBuffer())
        recorder.seen_at("train.py:12")
        recorder.seen_at("train.py:12")
        events, _ = ring.take()
        assert kinds_of(events) == [EventKind.SEEN_AT] * 2
        assert recorder.take_new_names()[int(events["name"][0])] == {"name": "train.py:12"}

    def test_the_line_is_recorded_while_the_program_waits_there(self, tmp_path):
        recording = TimelineFile(tmp_path / "a", {}, 10**6)
        recording.recorder.step_begins(0)
        recording.recorder.step_ends(8, 0.5)
        recording.start()
        while b"test_timeline_recording.py" not in (tmp_path / "a").read_bytes():
            os.sched_yield()
        recording.close()
