"""Conformance tests of all engines; a new engine is a row of `engine_rows`.

`test_losing_an_instance.py` tests the loss of an instance.
"""

from __future__ import annotations

import copy
import functools
import logging

import numpy as np
import pytest
from engine_rows import (
    ALWAYS,
    BATCH_SIZE,
    EVALUATED,
    EVERY,
    REPLICAS,
    ROWS,
    ROWS_OF_TEST,
    batches,
    copied,
    in_jax,
    rows,
    train,
    variables,
)
from numpy_engine import MOMENTUM, RATE
from surviving_instances import run_instances

from collectives.instruments import EXCHANGE, FORWARD_BACKWARD, UPDATE
from strategies import DivergenceError
from strategies.core.step import StepLoop
from strategies.errors import NonFiniteGradientError
from strategies.loss_scaling import LossScaling

COUNTS = (1, 2, 3)
SPOILT = 4
"""The replica whose rows contain a number that is not finite."""


@pytest.fixture
def on_all(on_instances):
    """Provide a function that runs another on 1, 2 and 3 instances, asserts equal results, and returns one of them."""

    def run(function):
        mechanisms = {1: "auto", 2: "ring", 3: "window"}
        found = [each for count in COUNTS for each in on_instances(count, REPLICAS, function, mechanisms[count])]
        assert found == found[:1] * sum(COUNTS)
        return found[0]

    return run


# ---- order


class Witness:
    """An instrument and a watcher of steps that records events in one list."""

    def __init__(self):
        self.seen = []

    def step_begins(self, step):
        self.seen.append(f"step {step}")

    def step_ends(self, rows, loss):
        self.seen.append(f"end with {rows} rows")

    def phase_begins(self, phase):
        if phase in (FORWARD_BACKWARD, EXCHANGE, UPDATE):
            self.seen.append(phase)

    def phase_ends(self, phase):
        pass

    def reduced(self, snapshot, batch, gradients, shards):
        self.seen.append(("reduced", snapshot.step, variables_of(snapshot)))

    def updated(self, snapshot, metrics):
        self.seen.append(("updated", snapshot.step, variables_of(snapshot)))


def variables_of(snapshot):
    return {name: np.asarray(array).tobytes() for name, array in snapshot.variables.items()}


@EVERY
@pytest.mark.parametrize("count", COUNTS)
def test_a_step_has_its_phases_in_order(row, count):
    """The watcher sees the old variables before the update, and the new ones after it."""
    witnesses = {instance: Witness() for instance in range(count)}

    def function(strategy):
        witness = witnesses[strategy.replicas.first_index]
        with row.training(strategy) as training:
            engine, loop = training.engine, training.loop
            training.loop = StepLoop(strategy.replicas, engine, loop._rules, loop.scaling, witness)
            for step, batch in enumerate(batches(strategy)):
                before = variables_of(engine.snapshot(training.state))
                witness.seen.clear()
                training.step(batch)
                after = variables_of(engine.snapshot(training.state))
                buckets = witness.seen.count(EXCHANGE)
                assert buckets
                assert before != after
                assert witness.seen == [
                    f"step {step}",
                    FORWARD_BACKWARD,
                    *[FORWARD_BACKWARD, EXCHANGE] * buckets,
                    FORWARD_BACKWARD,
                    ("reduced", step, before),
                    UPDATE,
                    ("updated", step + 1, after),
                    f"end with {BATCH_SIZE * REPLICAS // count} rows",
                ]

    run_instances(count, REPLICAS, function, instruments=witnesses, defaults=row.of_survivors)


# ---- bits


CHANGING = (
    {},
    *({"gradient_transfer_dtype": dtype} for dtype in ("float16", "bfloat16")),
    {"replicated_optimizer_state_sharding": True},
    {"loss_scaling": LossScaling(2.0**10, 2.0, 2), "digest_every": 1},
)
"""Options that change the computation."""


@pytest.mark.parametrize("options", CHANGING, ids=lambda options: "-".join(options) or "plain")
@EVERY
def test_metrics_and_variables_have_the_same_bits_for_every_number_of_instances(row, options, on_all):
    if options.get("gradient_transfer_dtype", row.transfers[0]) not in row.transfers:
        pytest.skip(f"this engine exchanges nothing as {options['gradient_transfer_dtype']}")
    on_all(functools.partial(train, row=row, evaluates=True, **options))


def test_devices_give_the_bits_of_the_host(on_instances):
    of_host, of_devices = (row for row in ROWS if row.training is in_jax)
    found = [
        on_instances(1, REPLICAS, functools.partial(train, row=row), defaults=row.defaults)
        for row in (of_host, of_devices)
    ]
    assert found[0] == found[1]


@EVERY
def test_metrics_cover_the_rows_of_all_replicas(row, on_instances):
    """Plain NumPy computes the expected metrics in double precision."""
    [[found, *_]] = on_instances(1, REPLICAS, functools.partial(train, row=row, evaluates=True))
    evaluation, predictions = found.pop(EVALUATED)
    [given] = on_instances(1, REPLICAS, lambda strategy: list(map(copied, batches(strategy))))
    values, test = variables(), rows(ROWS_OF_TEST)
    velocities, losses = dict.fromkeys(values, 0), []
    for step, batch in enumerate(given):
        if step == EVALUATED:
            outputs = test["x"] @ values["w"] + values["b"]
            assert evaluation["loss"] == pytest.approx(np.mean((outputs - test["y"]) ** 2), rel=1e-5)
            np.testing.assert_allclose(np.frombuffer(predictions, np.float32), outputs.reshape(-1), rtol=1e-4)
        error = batch["x"].astype(np.float64) @ values["w"] + values["b"] - batch["y"]
        losses.append(np.mean(error**2))
        gradients = {"b": 2 * error.sum(axis=0) / error.size, "w": 2 * batch["x"].T @ error / error.size}
        velocities = {name: MOMENTUM * velocities[name] + gradients[name] for name in values}
        values = {name: values[name] - RATE * velocities[name] for name in values}
    np.testing.assert_allclose([each["loss"] for each in found], losses, rtol=1e-5)


# ---- errors


def raising_once():
    """Return a function that raises the first time it is called, in whichever thread."""
    due = [ZeroDivisionError("raised once")]

    def before_loss():
        if due:
            raise due.pop()

    return before_loss


def spoilt(strategy, batch, number, part="x"):
    """Return the batch with a number put into the rows of one replica."""
    batch = copied(batch)
    if SPOILT in strategy.local_replicas:
        batch[part][strategy.local_replicas.index(SPOILT) * BATCH_SIZE + 1, 0] = number
    return batch


def steps(strategy, training, given):
    """Return the metrics of all steps, and the bits after the last one."""
    return [training.step(copied(batch)) for batch in given], training.bits


@EVERY
def test_a_step_can_be_repeated_after_an_error_of_the_loss_function(row, on_all):
    def function(strategy, **options):
        with row.training(strategy, **options) as training:
            given, before = list(batches(strategy)), training.bits
            if options:
                with pytest.raises(ZeroDivisionError, match="raised once"):
                    training.step(given[0])
                assert training.bits == before
            return steps(strategy, training, given)

    expected = on_all(function)
    assert on_all(lambda strategy: function(strategy, before_loss=raising_once())) == expected


NOT_FINITE = {
    "gradient": (np.nan, "x", r"the gradient of .* is not finite at step 1"),
    "loss": (1e25, "y", "the mean loss over all replicas is inf at step 1, but its gradients are finite"),
}


@EVERY
@pytest.mark.parametrize("what", NOT_FINITE)
def test_a_gradient_or_loss_that_is_not_finite_is_refused_on_all_instances(row, what, on_all):
    number, part, message = NOT_FINITE[what]

    def function(strategy, is_spoilt=True):
        with row.training(strategy, check_numerics=True) as training:
            first, *others = batches(strategy)
            training.step(first)
            before = training.bits
            if is_spoilt:
                with pytest.raises(NonFiniteGradientError, match=message):
                    training.step(spoilt(strategy, others[0], number, part))
            assert training.bits == before
            return steps(strategy, training, others)

    assert on_all(function) == on_all(functools.partial(function, is_spoilt=False))


@EVERY
def test_an_overflow_on_one_replica_changes_the_step_and_the_scale_alone(row, on_all):
    def function(strategy):
        with row.training(strategy, loss_scaling=LossScaling(2.0**10, 2.0, 100)) as training:
            first, second, *others = batches(strategy)
            training.step(first)
            before = training.bits
            metrics = training.step(spoilt(strategy, second, np.inf))
            changed = [name for name, bits in training.bits.items() if bits != before[name]]
            assert all("loss_scale" in name for name in changed)
            scale = training.state.loss_scale
            assert (training.state.step, float(scale.scale), int(scale.skipped)) == (2, 2.0**9, 1)
            assert (metrics["loss_scale"], metrics["skipped_steps"]) == (2.0**9, 1)
            return steps(strategy, training, others)

    on_all(function)


# ---- digests


FLIP = "flip-bit:instance=1,step=2"


def run(count, row, faults=(), survives=True, **options):
    function = functools.partial(train, row=row, **options)
    return run_instances(count, REPLICAS, function, faults, survives=survives, defaults=row.of_survivors)


@EVERY
def test_a_flipped_bit_is_named_and_ends_the_job(row):
    with pytest.raises(DivergenceError, match="before step 2 instance 1 had other bits than the other 2: .* is .*w"):
        run(3, row, [FLIP], survives=False, digest_every=2)


@EVERY
def test_a_job_that_carries_on_restores_the_bits_of_the_majority(row, caplog):
    with caplog.at_level(logging.WARNING):
        found = run(3, row, [FLIP], digest_every=2)
    assert "before step 2 instance 1 had other bits than the others, and got theirs" in caplog.text
    [alone] = run(1, row)
    assert found == [alone] * 3


# ---- notices


@ALWAYS
def test_all_instances_agree_on_a_notice_to_one_at_the_end_of_the_step(row, on_all):
    def function(strategy):
        with row.training(strategy) as training:
            agreed = []
            for step, batch in enumerate(batches(strategy)):
                if step == 2 and strategy.instance_index == strategy.num_instances - 1:
                    training.loop.notice.give(15)
                training.step(batch)
                agreed.append(training.loop.notice.is_agreed)
            return agreed

    assert on_all(function) == [False, False, True, True, True]


# ---- the state


@EVERY
def test_a_training_continues_from_a_snapshot_with_the_same_bits(row, on_all):
    def function(strategy):
        with row.training(strategy) as training:
            given = list(map(copied, batches(strategy)))
            steps(strategy, training, given[:2])
            snapshot = copy.deepcopy(training.engine.snapshot(training.state))
            expected = steps(strategy, training, given[2:])
            training.state = training.engine.restore(snapshot)
            assert steps(strategy, training, given[2:]) == expected
            return expected

    on_all(function)


@EVERY
@pytest.mark.parametrize("count", COUNTS[1:])
def test_a_shared_state_equals_that_of_its_root(row, count, on_instances):
    def function(strategy):
        root = strategy.num_instances - 1
        with row.training(strategy) as training:
            steps(strategy, training, batches(strategy))
            if strategy.instance_index == root:
                training.state = training.loop._rules.flipped(training.state)
            before = training.bits
            training.state = training.engine.share(training.state, root)
            return before, training.bits, training.state.step

    *others, (_, expected, step) = on_instances(count, REPLICAS, function)
    for before, after, same_step in others:
        assert before != expected
        assert (after, same_step) == (expected, step)
