"""Distributions in each kind of sink, and those that wait for a slow one."""

import csv
import json
import logging
import math
import threading

import numpy as np
import pytest

from strategies.sinks import sinks as delivery_module
from strategies.sinks.files import CsvFile, JsonLines
from strategies.sinks.services import Prometheus
from strategies.sinks.sink import BINS, Distribution, JobFacts, Row, Sink
from strategies.sinks.sinks import SinkDelivery, Sinks

LIMIT_S = 60.0
ARRAY = np.random.default_rng(1).standard_normal(500).astype(np.float32)
FOUND = {"gradients/a": Distribution.of(ARRAY), "weights/a": Distribution.of(np.full(3, np.nan, np.float32))}


def row(step, distributions=FOUND, **values):
    given = values or {"loss": step / 4}
    return Row(step, lambda: given, time_s=step + 0.5, is_training=True, distributions=distributions)


def test_a_table_has_a_column_for_each_quantile(tmp_path):
    sink = CsvFile(tmp_path / "run.csv")
    sink.open(goes_on=False)
    sink.write([row(1, {}), row(2), row(3, {})])
    sink.close()
    first, second, third = csv.DictReader((tmp_path / "run.csv").read_text().splitlines(), strict=True)
    assert list(first)[:4] == ["step", "time", "loss", "gradients/a/min"]
    numbers = {name.rpartition("/")[2]: number for name, number in second.items() if name.startswith("gradients/a/")}
    assert {name: float(number) for name, number in numbers.items()} == FOUND["gradients/a"].numbers
    assert second["weights/a/p50"] == "nan"
    assert {number for each in (first, third) for name, number in each.items() if "/" in name} == {""}


def test_a_restarted_job_replaces_rows_with_distributions(tmp_path):
    for steps in ((1, 2, 3), (2, 3)):
        sink = CsvFile(tmp_path / "run.csv")
        sink.open(goes_on=steps[0] > 1)
        sink.write([row(step) for step in steps])
        sink.close()
    rows = list(csv.DictReader((tmp_path / "run.csv").read_text().splitlines(), strict=True))
    assert [each["step"] for each in rows] == ["1", "2", "3"]


def test_a_line_of_json_has_the_bins(tmp_path):
    sink = JsonLines(tmp_path / "run.jsonl")
    sink.open(goes_on=False)
    sink.write([row(1), row(2, {})])
    sink.close()
    first, second = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
    found, own = first["gradients/a"], FOUND["gradients/a"]
    assert found["counts"] == own.counts.tolist()
    assert found["edges"] == own.edges.tolist()
    assert {name: found[name] for name in own.numbers} == own.numbers
    assert first["weights/a"]["p50"] == "NaN"
    assert set(second) == {"step", "time", "loss"}


def test_tensorboard_draws_the_bins(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from strategies.sinks.services import TensorBoard

    sink = TensorBoard(tmp_path)
    sink.open(goes_on=False)
    sink.write([row(1), row(2, {})])
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.25), (2, 0.5)]
    [event] = (
        events.Tensors("gradients/a") if "gradients/a" in events.Tags()["tensors"] else events.Histograms("gradients/a")
    )
    own = FOUND["gradients/a"]
    assert event.step == 1
    value = event.histogram_value
    assert (value.min, value.max, value.num) == (own.least, own.most, own.size)
    assert list(value.bucket) == own.counts.tolist()
    assert list(value.bucket_limit) == own.edges[1:].tolist()


@pytest.mark.parametrize("name", FOUND)
def test_weights_and_biases_takes_the_bins(name):
    wandb = pytest.importorskip("wandb", reason="Weights & Biases is not installed")
    own = FOUND[name]
    found = wandb.Histogram(np_histogram=(own.counts, own.edges))
    assert len(found.histogram) == BINS
    json.dumps(found.to_json())


def test_prometheus_shows_the_last_quantiles():
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    sink = Prometheus("127.0.0.1", 0, JobFacts())
    sink.write([row(1), row(2, {})])
    *_, family = sink.collect()
    found = {each.labels["name"]: each.value for each in family.samples}
    assert found["loss"] == 0.5
    assert found["gradients/a/p95"] == FOUND["gradients/a"].numbers["p95"]
    assert math.isnan(found["weights/a/min"])


class Slow(Sink):
    """A sink that waits in its first write until it is told to go on."""

    name = "slow:here"

    def __init__(self):
        self.begun, self.goes_on, self.got = threading.Event(), threading.Event(), []

    def open(self, goes_on):
        pass

    def write(self, rows):
        self.begun.set()
        assert self.goes_on.wait(LIMIT_S)
        self.got += [(each.step, dict(each.values), len(each.distributions)) for each in rows]

    def close(self):
        pass


def test_a_slow_sink_gets_all_numbers_but_no_more_than_some_distributions(monkeypatch, caplog):
    monkeypatch.setattr(delivery_module, "MOST_DISTRIBUTIONS", 5)
    sink = Slow()
    delivery = SinkDelivery(sink, is_open=True)
    delivery.start()
    delivery.add(row(0))
    assert sink.begun.wait(LIMIT_S)
    for step in range(1, 5):
        delivery.add(row(step))
    sink.goes_on.set()
    with caplog.at_level(logging.WARNING, logger="strategies.metrics"):
        delivery.close(LIMIT_S)
    assert sink.got == [(step, {"loss": step / 4}, 2 if step < 2 else 0) for step in range(5)]
    [message] = [record.message for record in caplog.records]
    assert message == (
        "slow:here lacks 6 distributions, because more than 5 (MOST_DISTRIBUTIONS) waited for it; take histograms less "
        "often"
    )


def test_room_is_free_again_when_distributions_are_written(monkeypatch):
    monkeypatch.setattr(delivery_module, "MOST_DISTRIBUTIONS", 2)
    sink = Slow()
    sink.goes_on.set()
    delivery = SinkDelivery(sink, is_open=True)
    for step in range(4):
        delivery.add(row(step))
        delivery.deliver()
    assert [count for _, _, count in sink.got] == [2, 2, 2, 2]


def test_an_instance_that_does_not_write_keeps_the_newest_distributions(monkeypatch):
    monkeypatch.setattr(delivery_module, "MOST_DISTRIBUTIONS", 5)
    is_chief, sink = [False], Slow()
    sink.goes_on.set()
    with Sinks([sink], JobFacts(is_chief=lambda: is_chief[0])) as sinks:
        for step in range(4):
            sinks.add_step(step, lambda step=step: {"loss": step}, 1, FOUND)
        is_chief[0] = True
        sinks.add_step(4, lambda: {"loss": 4}, 1)
    assert [(step, count) for step, _, count in sink.got] == [(0, 0), (1, 0), (2, 2), (3, 2), (4, 0)]
