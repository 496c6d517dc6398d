"""Metrics of trainings on threads: rows in sinks, the writing instance, and unchanged bits."""

import csv
import functools
import json
import logging
import re
import threading
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from losing import Lost
from surviving_instances import hook, run_instances
from tiers import first_of

import strategies
from collectives import PeerLostError
from popdist.errors import EnvironmentMismatchError
from strategies import IPUStrategy, Trainer, fingerprint
from strategies.sinks import sinks as delivery_module
from strategies.sinks.sink import Sink

REPLICAS, STEPS = 4, 4
ROWS = {"x": np.arange(96, dtype=np.float32).reshape(32, 3) / 64}


class Kept(Sink):
    """A sink that keeps its rows."""

    name = "kept:here"

    def __init__(self, fails=False):
        self.rows = []
        self.threads = set()
        self.fails = fails

    def open(self, goes_on):
        pass

    def write(self, rows):
        self.threads.add(threading.current_thread().name)
        if self.fails:
            raise OSError("no room")
        self.rows += [(row.step, dict(row.values), row.samples) for row in rows]

    def close(self):
        pass


def loss_fn(variables, batch, key):
    value = jnp.mean(jnp.tanh(batch["x"] @ variables) + 0.01 * jax.random.uniform(key))
    return value, {"size": jnp.mean(batch["x"])}


def trained(strategy, *sinks, evaluates=True):
    """Return the variables after a few steps, and the metrics of each step."""
    dataset = strategy.distribute_dataset(ROWS, batch_size=2, seed=1)
    trainer = Trainer(strategy, loss_fn, optax.adam(0.1))
    state = trainer.init(np.ones(3, np.float32))
    told = []
    opened = [strategies.metrics.open(*sinks, strategy=strategy)] if sinks else []
    for batch in dataset.epoch(0):
        state, metrics = trainer.step(state, batch)
        told.append((state.step, dict(metrics)))
    found = None
    if evaluates:
        found = dict(trainer.evaluate(state, strategy.distribute_dataset(ROWS, batch_size=2, remainder="pad")))
    for each in opened:
        each.log({"mine": jnp.float32(0.1)}, step=state.step)
        each.close()
    return fingerprint(state.variables), told, found


def read_file(path):
    """Return the rows of a file, without their times."""
    if path.suffix == ".jsonl":
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return [{name: row[name] for name in row if name != "time"} for row in lines]
    rows = csv.DictReader(path.read_text().splitlines(), strict=True)
    return [{name: float(number) for name, number in row.items() if number and name != "time"} for row in rows]


@functools.cache
def alone():
    return trained(IPUStrategy(REPLICAS))


def check_rows(rows, told, evaluation):
    """Check that rows are the metrics of each step to the last digit, then the evaluation and logged values."""
    assert rows[: len(told)] == [{"step": step, **values} for step, values in told]
    prefixed = {f"evaluation/{name}": value for name, value in evaluation.items()}
    assert rows[len(told) :] == [{"step": STEPS, **prefixed}, {"step": STEPS, "mine": float(np.float32(0.1))}]


WORDS = {
    "csv": "csv:{}/run.csv",
    "jsonl": "jsonl:{}/run.jsonl",
    "tensorboard": "tensorboard:{}/logs",
    "prometheus_client": "prometheus:0",
}


@pytest.mark.parametrize("library", WORDS)
@pytest.mark.parametrize("instances", first_of([2, 1]))
def test_a_training_has_the_same_bits_with_every_sink(library, instances, tmp_path):
    if library != "jsonl":
        pytest.importorskip(library, reason=f"{library} is not installed")
    word = WORDS[library].format(tmp_path)
    found = run_instances(instances, REPLICAS, lambda strategy: trained(strategy, word))
    assert found == [alone()] * instances


@pytest.mark.parametrize("instances", [1, 2])
def test_one_instance_writes_the_metrics_of_every_step_to_the_last_digit(instances, tmp_path):
    words = f"csv:{tmp_path}/run.csv", f"jsonl:{tmp_path}/run.jsonl"
    (_, told, evaluation), *_ = run_instances(instances, REPLICAS, lambda strategy: trained(strategy, *words))
    check_rows(read_file(tmp_path / "run.csv"), told, evaluation)
    check_rows(read_file(tmp_path / "run.jsonl"), told, evaluation)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.csv", "run.jsonl"]


@pytest.mark.parametrize("instances", [1, 2])
def test_samples_cover_all_replicas_and_a_separate_thread_writes(instances):
    sinks = [Kept() for _ in range(instances)]
    run_instances(instances, REPLICAS, lambda strategy: trained(strategy, sinks[strategy.instance_index]))
    assert [samples for _, _, samples in sinks[0].rows] == [8] * STEPS + [0, 0]
    assert sinks[0].threads == {"metrics to kept:here"}
    assert not any(sink.rows for sink in sinks[1:])


def test_a_failing_sink_stops_nothing_and_is_logged_once(caplog):
    good = Kept()
    assert trained(IPUStrategy(REPLICAS), Kept(fails=True), good) == alone()
    assert len(good.rows) == STEPS + 2
    messages = [record.message for record in caplog.records if record.name == "strategies.metrics"]
    assert [message.partition(":")[0] for message in messages if "cannot" in message] == [
        "metrics cannot be written to kept"
    ]
    assert messages[-1].startswith("kept:here lacks 6 rows of metrics")


@pytest.mark.parametrize("written", first_of(["all and a part of a line", "all", "nothing"]))
@pytest.mark.parametrize(
    ("instances", "replicas", "phase"),
    [
        (3, 6, "update"),
        pytest.param(2, 8, "all_reduce", marks=pytest.mark.complete),
        pytest.param(2, 8, "forward", marks=pytest.mark.complete),
        pytest.param(2, 8, "update", marks=pytest.mark.complete),
        pytest.param(3, 6, "all_reduce", marks=pytest.mark.complete),
    ],
)
@pytest.mark.parametrize("kind", first_of(["csv", "jsonl"]))
def test_the_next_instance_continues_the_file_when_the_first_is_lost(
    kind, instances, replicas, phase, written, tmp_path, monkeypatch
):
    """Each step is in the file once, whatever the first instance had written."""
    monkeypatch.setattr(delivery_module, "EVERY_S", 600.0)  # only explicit calls write before the end
    path = tmp_path / f"run.{kind}"

    def train(strategy):
        dataset = strategy.distribute_dataset(ROWS_OF_MANY, batch_size=2, seed=1)
        trainer = Trainer(strategy, loss_fn, optax.adam(0.1))
        state = trainer.init(np.ones(3, np.float32))
        sinks = strategies.metrics.open(f"{kind}:{path}", strategy=strategy)
        told = []
        try:
            for batch in dataset.epoch(0):
                state, metrics = trainer.step(state, batch)
                told.append({"step": state.step, **metrics})
                if strategy.replicas.first_index == 0 and written != "nothing":
                    sinks._deliveries[0].deliver()
        except Lost:  # like threads of a killed process, they write no more
            sinks._deliveries[0]._rows.clear()
            if "part" in written:
                with path.open("ab") as file:
                    file.write(b"3,0.25,1." if kind == "csv" else b'{"step": 3, "ti')
            raise
        finally:
            sinks.close()
        return fingerprint(state.variables), told

    lost, *left = run_instances(instances, replicas, train, [f"kill:instance=0,step=2,phase={phase}"])
    assert lost is None
    assert all(each == left[0] for each in left)
    assert read_file(path) == left[0][1]
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


SHARDED = {"replicated_optimizer_state_sharding": True, "min_elements_for_sharding": 1}


@pytest.mark.parametrize("options", first_of([SHARDED, {}]))
@pytest.mark.parametrize("phase", first_of(["update", "all_reduce"]))
def test_norms_and_histograms_go_on_with_the_same_bits_when_the_first_instance_is_lost(
    options, phase, tmp_path, monkeypatch
):
    monkeypatch.setattr(delivery_module, "EVERY_S", 600.0)  # the lost instance has written nothing

    def train(strategy, path):
        dataset = strategy.distribute_dataset(ROWS_OF_MANY, batch_size=2, seed=1)
        optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.1, 0.0, 9))
        trainer = Trainer(strategy, loss_fn, optimizer, **options)
        state = trainer.init(np.ones(3, np.float32))
        sinks = strategies.metrics.open(f"csv:{path}", strategy=strategy, norms_every=1, histograms_every=2)
        try:
            trainer.run(state, dataset)
        except Lost:
            sinks._deliveries[0]._rows.clear()
            raise
        finally:
            sinks.close()

    files = [tmp_path / "whole.csv", tmp_path / "lost.csv"]
    train(IPUStrategy(6), files[0])
    run_instances(3, 6, functools.partial(train, path=files[1]), [f"kill:instance=0,step=2,phase={phase}"])
    whole, lost = map(read_file, files)
    assert lost == whole
    assert all("gradient_norm" in row and "learning_rate" in row for row in whole)
    assert ["gradients/variables/p50" in row for row in whole] == [row["step"] % 2 == 1 for row in whole]


def test_the_chief_takes_norms_and_histograms_from_an_instance_that_has_completed_the_step(tmp_path):
    def train(strategy, path, trainers):
        dataset = strategy.distribute_dataset(ROWS_OF_MANY, batch_size=2, seed=1)
        trainer = Trainer(strategy, loss_fn, optax.adam(optax.linear_schedule(0.1, 0.0, 9)))
        trainers.setdefault(strategy.replicas.first_index, trainer)
        with strategies.metrics.open(f"jsonl:{path}", strategy=strategy, norms_every=1, histograms_every=2):
            trainer.run(trainer.init(np.ones(3, np.float32)), dataset)

    def lose():
        """Lose the connection as if while gradients arrived, which the other instances have got."""
        trainers[0]._loop._seen = None
        raise PeerLostError("a connection is lost")

    files, trainers = [tmp_path / "whole.jsonl", tmp_path / "late.jsonl"], {}
    train(IPUStrategy(6), files[0], {})
    faults = [hook(0, "update", 2, lose), "kill:instance=2,step=3"]
    run_instances(3, 6, functools.partial(train, path=files[1], trainers=trainers), faults)
    whole, late = ([{**json.loads(line), "time": 0} for line in path.read_text().splitlines()] for path in files)
    assert late == whole
    assert all("gradient_norm/variables" in row for row in late)
    assert ["gradients/variables" in row for row in late] == [row["step"] % 2 == 1 for row in late]


ROWS_OF_MANY = {"x": np.arange(3 * 96, dtype=np.float32).reshape(96, 3) / 64}


def test_rows_of_a_second_trainer_in_the_same_sinks_are_reported_once(caplog):
    """Steps of one trainer rise, also after a checkpoint; those of another one repeat the numbers."""
    told = "sinks get a row of step 8 after that of step 8: a training began again, or several trainers write"
    with delivery_module.Sinks([Kept()], delivery_module.JobFacts()) as sinks:
        for step in (7, 8, 9):
            assert not caplog.messages
            sinks.add_step(step, dict, 1)
            sinks.log({"mine": 1}, step=1)
    with delivery_module.Sinks([Kept()], delivery_module.JobFacts()) as sinks:
        for step in (8, 8, 9, 9):
            sinks.add_step(step, dict, 1)
    assert [message for message in caplog.messages if message.startswith(told)] == caplog.messages
    assert len(caplog.messages) == 1


def test_reading_metrics_waits_for_nothing_in_the_thread_that_trains():
    """Sinks get arrays that are still being computed, and a step returns before anyone has read them."""
    may_read, read_in = threading.Event(), []

    class Slow(Kept):
        def write(self, rows):
            read_in.append(threading.current_thread().name)
            assert may_read.wait(60)
            super().write(rows)

    sink = Slow()
    strategy = IPUStrategy(1)
    trainer = Trainer(strategy, loss_fn, optax.sgd(0.1))
    state = trainer.init(np.ones(3, np.float32))
    with strategies.metrics.open(sink, strategy=strategy):
        for _ in range(40):  # more steps than are made in parts
            state, _ = trainer.step(state, {"x": ROWS["x"][:2]})
        may_read.set()
    assert [step for step, _, _ in sink.rows] == list(range(1, 41))
    assert set(read_in) == {"metrics to kept:here"}


def test_steps_made_in_one_program_have_one_row_each():
    def metrics_of(steps_per_execution):
        strategy, sink = IPUStrategy(1), Kept()
        dataset = strategy.distribute_dataset(ROWS, batch_size=2, seed=1)
        trainer = Trainer(strategy, loss_fn, optax.sgd(0.1))
        state = trainer.init(np.ones(3, np.float32))
        with strategies.metrics.open(sink, strategy=strategy):
            trainer.run(state, dataset, steps_per_execution)
        return sink.rows

    one_by_one = metrics_of(1)
    assert len(one_by_one) == 16
    assert metrics_of(4) == one_by_one


def test_a_step_without_a_sink_has_no_extra_cost():
    strategy = IPUStrategy(1)
    assert strategy.replicas.sinks == []
    with strategies.metrics.open(Kept(), strategy=strategy):
        assert len(strategy.replicas.sinks) == 1
    assert strategy.replicas.sinks == []


def test_evaluation_results_that_are_no_numbers_are_left_out_and_logged(caplog):
    caplog.set_level(logging.INFO)

    def vectors(variables, batch, mask, key):
        return {"mean": strategies.Mean.of(batch["x"], mask), "first": strategies.Mean.of(batch["x"][:, 0], mask)}

    strategy, sink = IPUStrategy(2), Kept()
    trainer = Trainer(strategy, loss_fn, optax.sgd(0.1))
    state = trainer.init(np.ones(3, np.float32))
    dataset = strategy.distribute_dataset(ROWS, batch_size=2, remainder="pad")
    with strategies.metrics.open(sink, strategy=strategy):
        found = trainer.evaluate(state, dataset, metrics_fn=vectors)
    assert sink.rows == [(0, {"evaluation/first": found["first"]}, 0)]
    assert "sinks take only scalars, and leave out evaluation/mean" in caplog.messages


class TestTheEnvironment:
    def test_the_environment_makes_strategies_and_loops_write(self, tmp_path, monkeypatch):
        monkeypatch.setenv("POPDIST_METRICS", f"csv:{tmp_path}/run.csv")
        strategies.metrics.log({"before": 1}, step=0)
        strategy = IPUStrategy(REPLICAS)
        _, told, evaluation = trained(strategy)
        strategies.metrics.log({"mine": np.float32(0.1)}, step=STEPS)
        [sinks] = strategy.replicas.sinks
        sinks.close()
        first, *rows = read_file(tmp_path / "run.csv")
        assert first == {"step": 0, "before": 1}
        check_rows(rows, told, evaluation)

    def test_invalid_sinks_in_the_environment_are_refused(self, tmp_path, monkeypatch):
        monkeypatch.setenv("POPDIST_METRICS", f"csv:{tmp_path}")
        message = f"POPDIST_METRICS: csv:{tmp_path}: it is a folder; write csv:FILE"
        with pytest.raises(EnvironmentMismatchError, match=re.escape(message)):
            IPUStrategy(1)
        monkeypatch.setenv("POPDIST_METRICS", "nonsense")
        with pytest.raises(EnvironmentMismatchError, match="'nonsense' is no kind of destination; use one of csv:FILE"):
            IPUStrategy(1)

    def test_an_instance_that_is_not_the_chief_writes_no_file(self, tmp_path, monkeypatch):
        """Several instances may each have a strategy of their own; one of them writes."""
        monkeypatch.setenv("POPDIST_METRICS", f"csv:{tmp_path}/run.csv")
        monkeypatch.setattr("popdist.is_chief", lambda: False)
        strategy = IPUStrategy(1)
        trained(strategy)
        [sinks] = strategy.replicas.sinks
        sinks.close()
        assert not (tmp_path / "run.csv").exists()


class TestOpening:
    def test_opening_without_a_sink_is_refused(self):
        with pytest.raises(ValueError, match="metrics have no sink; name one, for example csv:run.csv"):
            strategies.metrics.open()

    def test_sinks_without_a_strategy_get_logged_metrics(self):
        sink = Kept()
        with strategies.metrics.open(sink):
            strategies.metrics.log({"loss": 0.5}, step=1)
        assert sink.rows == [(1, {"loss": 0.5}, 0)]
        strategies.metrics.log({"loss": 0.5}, step=2)
        assert len(sink.rows) == 1

    def test_sinks_use_the_current_strategy_by_default(self):
        strategy = IPUStrategy(1)
        with strategy.scope(), strategies.metrics.open(Kept()) as sinks:
            assert strategy.replicas.sinks == [sinks]


def test_prometheus_answers_during_a_training(caplog):
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    from prometheus_client.parser import text_string_to_metric_families

    from strategies.sinks.services import Prometheus
    from strategies.sinks.sink import JobFacts

    asked = []

    def ask():
        host, port = sink.address
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=60) as answer:
            asked.extend(text_string_to_metric_families(answer.read().decode()))

    sink = Prometheus("127.0.0.1", 0, JobFacts())
    faults = [hook(0, "update", 2, ask)]
    found = run_instances(
        2, REPLICAS, lambda strategy: trained(strategy, sink) if strategy.is_chief else trained(strategy), faults
    )
    assert found == [alone()] * 2
    assert "popdist_steps" in {family.name for family in asked}
