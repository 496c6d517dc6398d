"""Delivery of rows to a slow or failing sink; no test waits for time to pass."""

import json
import logging
import os
import threading

import pytest

from strategies.sinks import sinks as delivery_module
from strategies.sinks.files import CsvFile, JsonLines
from strategies.sinks.sink import JobFacts, Row, Sink
from strategies.sinks.sinks import AGAIN_AT_MOST_S, AGAIN_S, SinkDelivery, Sinks

GUARD_S = 60.0


def row(step, **values):
    return Row(step, lambda: values or {"loss": step}, time_s=0.0, is_training=True)


class Kept(Sink):
    """A sink that keeps its rows, after an action that may fail."""

    name = "kept:here"
    way_out = "mend it"

    def __init__(self, before=lambda: None):
        self.before = before
        self.got = []
        self.calls = []

    def open(self, goes_on):
        self.calls.append(f"open {goes_on}")

    def write(self, rows):
        self.before()
        self.calls.append("write")
        self.got += [each.step for each in rows]

    def close(self):
        self.calls.append("close")


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def messages(caplog):
    return [record.message for record in caplog.records]


def refuse():
    raise OSError(28, "No space left on device")


def test_rows_come_in_order_and_before_the_sink_is_closed():
    sink = Kept()
    delivery = SinkDelivery(sink, is_open=True)
    delivery.start()
    for step in range(1000):
        delivery.add(row(step))
    delivery.close()
    assert sink.got == list(range(1000))
    assert sink.calls[-1] == "close"


def test_a_slow_sink_blocks_no_training_and_its_lost_rows_are_counted_and_logged(monkeypatch, caplog):
    monkeypatch.setattr(delivery_module, "MOST", 5)
    begun, goes_on = threading.Event(), threading.Event()

    def wait():
        begun.set()
        assert goes_on.wait(GUARD_S)

    sink = Kept(wait)
    delivery = SinkDelivery(sink, is_open=True)
    delivery.start()
    delivery.add(row(0))
    assert begun.wait(GUARD_S)
    for step in range(1, 10):
        delivery.add(row(step))  # the sink is still busy with the first
    assert delivery.dropped == 5
    goes_on.set()
    delivery.close()
    assert sink.got == [0, 1, 2, 3, 4]
    assert messages(caplog) == ["kept:here lacks 5 rows of metrics, because it was too slow or had failed"]


def test_a_hanging_sink_is_abandoned_at_the_end(caplog):
    begun, goes_on = threading.Event(), threading.Event()

    def hang():
        begun.set()
        goes_on.wait(GUARD_S)

    delivery = SinkDelivery(Kept(hang), is_open=True)
    delivery.start()
    delivery.add(row(1))
    assert begun.wait(GUARD_S)
    delivery.close(limit_s=0.01)
    assert messages(caplog) == [
        "kept:here is still busy after 0.01 s (CLOSING_S) and gets no more rows; it may lack 1 rows"
    ]
    goes_on.set()
    delivery._thread.join(GUARD_S)


def test_a_failing_sink_is_logged_once_and_retried_with_growing_delays_and_all_rows(caplog):
    caplog.set_level(logging.INFO)
    clock, sink = Clock(), Kept(refuse)
    delivery = SinkDelivery(sink, is_open=True, now_s=clock)
    delivery.add(row(1))
    pauses, tried_at = [], 0.0
    for tenth in range(3000):
        clock.now_s, tries = tenth / 10, len(sink.calls)
        delivery.deliver()
        if len(sink.calls) > tries:
            pauses.append(clock.now_s - tried_at)
            tried_at = clock.now_s
    assert [round(each) for each in pauses] == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert (AGAIN_S, AGAIN_AT_MOST_S) == (1, 60)
    assert messages(caplog) == [
        "metrics cannot be written to kept:here: [Errno 28] No space left on device; the training goes on, and the "
        "rows are kept for another try: mend it"
    ]
    assert set(sink.calls[1:]) == {"open True", "close"}
    sink.before = lambda: None
    delivery.add(row(2))
    delivery.close()  # tries once more, even if it has just failed
    assert sink.got == [1, 2]
    assert messages(caplog)[1:] == ["metrics are written to kept:here again"]


def test_rows_missing_in_a_sink_that_failed_to_the_end_are_logged(caplog):
    delivery = SinkDelivery(Kept(refuse), is_open=True)
    for step in range(3):
        delivery.add(row(step))
    delivery.close()
    assert messages(caplog)[1] == "kept:here lacks 3 rows of metrics, because it was too slow or had failed"


def test_metrics_that_cannot_be_read_are_left_out_and_logged_once(caplog):
    def unreadable():
        raise RuntimeError("Array has been deleted")

    sink = Kept()
    delivery = SinkDelivery(sink, is_open=True)
    for each in (row(1), Row(2, unreadable), Row(3, unreadable), row(4)):
        delivery.add(each)
    delivery.close()
    assert sink.got == [1, 4]
    assert messages(caplog) == [
        "the metrics of step 2 cannot be read: Array has been deleted; they are left out",
        "kept:here lacks 2 rows of metrics, because it was too slow or had failed",
    ]


@pytest.mark.parametrize("kind", [CsvFile, JsonLines])
def test_a_full_disk_loses_no_row_once_space_is_available(kind, tmp_path, caplog):
    """A link leads to a device that is always full, and then to a file."""
    link, clock = tmp_path / "run.txt", Clock()
    link.symlink_to("/dev/full")
    delivery = SinkDelivery(kind(link), is_open=False, now_s=clock)
    delivery.add(row(1))
    delivery.deliver()
    assert "No space left on device" in messages(caplog)[0]
    assert "make room there, or name another file" in messages(caplog)[0]
    link.unlink()
    clock.now_s = 1.0
    delivery.add(row(2))
    delivery.close()
    assert [line.split(b",")[0] for line in link.read_bytes().splitlines()][-2:] in (
        [b"1", b"2"],
        [b'{"step": 1', b'{"step": 2'],
    )


def test_a_partly_written_line_is_cut_off_before_the_retry(tmp_path, monkeypatch):
    """The disk has room for a few more bytes."""
    path, clock, write = tmp_path / "run.jsonl", Clock(), os.write

    def write_some(descriptor, data):
        monkeypatch.setattr(os, "write", lambda *_: refuse())
        return write(descriptor, bytes(data)[: len(data) * 2 // 3])

    delivery = SinkDelivery(JsonLines(path), is_open=False, now_s=clock)
    delivery.add(row(1))
    delivery.deliver()
    delivery.add(row(2))
    delivery.add(row(3))
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write_some)
        delivery.deliver()
        monkeypatch.undo()
    assert not path.read_bytes().endswith(b"\n")
    clock.now_s = 1.0
    delivery.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


class TestSinks:
    def test_a_sink_that_cannot_be_opened_is_refused_and_the_others_are_closed(self):
        class Locked(Kept):
            name = "locked"

            def open(self, goes_on):
                raise PermissionError(13, "Permission denied")

        first = Kept()
        with pytest.raises(ValueError, match="^locked: metrics cannot be written there: .*denied; mend it$"):
            Sinks([first, Locked()], JobFacts())
        assert first.calls == ["open False", "close"]

    def test_a_restarted_job_only_logs_a_sink_that_cannot_be_opened(self, caplog):
        class Locked(Kept):
            name = "locked"

            def open(self, goes_on):
                raise PermissionError(13, "Permission denied")

        with Sinks([Locked()], JobFacts(restarts=1)) as sinks:
            sinks.log({"a": 1}, step=1)
        assert "metrics cannot be written to locked" in messages(caplog)[0]

    def test_other_instances_open_no_sink_and_write_their_kept_rows_as_next_chief(self):
        is_chief, sink = False, Kept()
        with Sinks([sink], JobFacts(is_chief=lambda: is_chief)) as sinks:
            for step in (1, 2):
                sinks.log({"a": 1}, step)
            assert sink.calls == []
            is_chief = True
            sinks.log({"a": 1}, 3)
        assert sink.got == [1, 2, 3]
        assert sink.calls[0] == "open True"

    def test_rows_after_the_end_are_refused(self):
        sink = Kept()
        sinks = Sinks([sink], JobFacts())
        sinks.close()
        sinks.log({"a": 1}, 1)
        sinks.close()
        assert (sink.got, sink.calls) == ([], ["open False", "close"])

    @pytest.mark.parametrize("step", [1.0, True, "1"])
    def test_a_step_is_a_whole_number(self, step):
        with (
            Sinks([Kept()], JobFacts()) as sinks,
            pytest.raises(TypeError, match="not an integer; give the number"),
        ):
            sinks.log({"a": 1}, step)


def test_wait_returns_when_all_rows_are_written():
    sink = Kept()
    delivery = SinkDelivery(sink, is_open=True)
    for step in (1, 2):
        delivery.add(row(step))
    delivery.start()
    delivery.wait(GUARD_S)
    assert sink.got == [1, 2]
    delivery.close()


def test_wait_returns_when_the_sink_fails():
    sink = Kept(refuse)
    delivery = SinkDelivery(sink, is_open=True)
    delivery.add(row(1))
    delivery.start()
    delivery.wait(GUARD_S)
    assert sink.got == []
    sink.before = lambda: None
    delivery.close()
    assert sink.got == [1]
