"""What is true of every engine: a new one is a row of `engine_rows`, and passes these tests.

See also `test_losing_an_instance.py`.
"""

from __future__ import annotations

import copy
import functools
import logging

import numpy as np
import pytest
from engine_rows import BATCH_SIZE, EVERY, REPLICAS, batches, bits_of, continued, copied, train, variables
from numpy_engine import MOMENTUM, RATE
from surviving_instances import run_instances

from collectives.instruments import EXCHANGE, FORWARD_BACKWARD, UPDATE
from strategies import DivergenceError
from strategies.core.step import StepLoop
from strategies.errors import NonFiniteGradientError
from strategies.loss_scaling import LossScaling

COUNTS = (1, 2, 3)
FIRST, ONE, SPOILT = 0, 1, 4
"""Instances, and a replica."""


@pytest.fixture
def on_all(on_instances):
    """Run a function on one, two and three instances: the results of all."""

    def run(function, **options):
        mechanisms = {1: "auto", 2: "ring", 3: "window"}
        return [found for count in COUNTS for found in on_instances(count, REPLICAS, function, mechanisms[count])]

    return run


# ---- order


class Witness:
    """An instrument and a watcher of steps, which notes what it sees in one list."""

    is_on = True

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


def watched(loop, watcher):
    return StepLoop(loop._members, loop._engine, loop._rules, loop.scaling, watcher)


@EVERY
@pytest.mark.parametrize("count", COUNTS)
def test_a_step_has_its_phases_in_their_order(row, count):
    witnesses = {instance: Witness() for instance in range(count)}

    def function(strategy):
        witness = witnesses[strategy.replicas.first_index]
        with row.training(strategy) as (loop, state):
            loop, found = watched(loop, witness), []
            for batch in batches(strategy):
                before = variables_of(loop._engine.snapshot(state))
                witness.seen.clear()
                state, _ = loop.make_step(state, batch)
                found.append((before, list(witness.seen), variables_of(loop._engine.snapshot(state))))
            return found

    for found in run_instances(count, REPLICAS, function, instruments=witnesses):
        for step, (before, seen, after) in enumerate(found):
            buckets = seen.count(EXCHANGE)
            assert buckets
            assert before != after
            assert seen == [
                f"step {step}",
                FORWARD_BACKWARD,
                *[FORWARD_BACKWARD, EXCHANGE] * buckets,
                FORWARD_BACKWARD,
                ("reduced", step, before),
                UPDATE,
                ("updated", step + 1, after),
                f"end with {BATCH_SIZE * REPLICAS // count} rows",
            ]


# ---- bits


CHANGING = (
    {},
    *({"gradient_transfer_dtype": dtype} for dtype in ("float16", "bfloat16", "int8")),
    {"replicated_optimizer_state_sharding": True},
    {"loss_scaling": LossScaling(2.0**10, 2.0, 2)},
)
"""Options that change what is computed."""


@pytest.mark.parametrize("options", CHANGING, ids=lambda options: "-".join(options) or "plain")
@EVERY
def test_metrics_and_variables_have_the_same_bits_for_every_number_of_instances(row, options, on_all):
    if options.get("gradient_transfer_dtype", row.transfers[0]) not in row.transfers:
        pytest.skip(f"this engine exchanges nothing as {options['gradient_transfer_dtype']}")
    found = on_all(functools.partial(train, row=row, **options))
    assert found == found[:1] * sum(COUNTS)


@EVERY
def test_the_metrics_are_those_of_the_rows_of_all_replicas(row, on_instances):
    """As plain NumPy computes them in double precision."""
    [[found, *_]] = on_instances(1, REPLICAS, functools.partial(train, row=row))
    [given] = on_instances(1, REPLICAS, lambda strategy: list(map(copied, batches(strategy))))
    values = {name: array.astype(np.float64) for name, array in variables().items()}
    velocities, expected = dict.fromkeys(values, 0), []
    for batch in given:
        error = batch["x"] @ values["w"] + values["b"] - batch["y"]
        expected.append(np.mean(error**2))
        gradients = {"b": 2 * error.sum(axis=0) / error.size, "w": 2 * batch["x"].T @ error / error.size}
        velocities = {name: MOMENTUM * velocities[name] + gradients[name] for name in values}
        values = {name: values[name] - RATE * velocities[name] for name in values}
    np.testing.assert_allclose([each["loss"] for each in found], expected, rtol=1e-5)


# ---- errors


class RaisingOnce:
    """What raises the second time it is called."""

    def __init__(self):
        self.is_due = True

    def __call__(self):
        if self.is_due:
            self.is_due = False
            raise ZeroDivisionError("raised once")


@EVERY
def test_after_an_error_of_the_loss_function_the_step_can_be_made_again(row, on_all):
    def function(strategy):
        with row.training(strategy, before_loss=RaisingOnce()) as (loop, state):
            given, before = batches(strategy), bits_of(loop, state)
            batch = next(given)
            with pytest.raises(ZeroDivisionError, match="raised once"):
                loop.make_step(state, batch)
            assert bits_of(loop, state) == before
            state, found = continued((loop, state), [batch, *given])
            return found, state.step, bits_of(loop, state)

    expected = on_all(functools.partial(train, row=row))
    assert on_all(function) == expected


def spoilt(strategy, batch, number):
    """The batch, with a number in the rows of one replica."""
    batch = copied(batch)
    if SPOILT in strategy.local_replicas:
        at = strategy.local_replicas.index(SPOILT) * BATCH_SIZE
        batch["x"][at + 1, 0] = number
    return batch


@EVERY
def test_a_gradient_that_is_not_finite_is_refused_on_all_instances(row, on_all):
    def function(strategy):
        with row.training(strategy, check_numerics=True) as (loop, state):
            given = batches(strategy)
            state, first = continued((loop, state), [copied(next(given))])
            before = bits_of(loop, state)
            batch = next(given)
            with pytest.raises(NonFiniteGradientError, match="is not finite at step 1"):
                loop.make_step(state, spoilt(strategy, batch, np.nan))
            assert bits_of(loop, state) == before
            state, found = continued((loop, state), map(copied, [batch, *given]))
            return first + found, state.step, bits_of(loop, state)

    expected = on_all(functools.partial(train, row=row))
    assert on_all(function) == expected


@EVERY
def test_an_overflow_on_one_replica_changes_the_step_and_the_scale_alone(row, on_all):
    def function(strategy):
        with row.training(strategy, loss_scaling=LossScaling(2.0**10, 2.0, 100)) as (loop, state):
            given = batches(strategy)
            state, _ = continued((loop, state), [copied(next(given))])
            before = bits_of(loop, state)
            state, [metrics] = continued((loop, state), [spoilt(strategy, next(given), np.inf)])
            after = bits_of(loop, state)
            assert {name for name in before if before[name] != after[name]} <= {
                name for name in before if "loss_scale" in name
            }
            assert (state.step, float(state.loss_scale.scale), int(state.loss_scale.skipped)) == (2, 2.0**9, 1)
            assert (metrics["loss_scale"], metrics["skipped_steps"]) == (2.0**9, 1)
            state, found = continued((loop, state), map(copied, given))
            return found, state.step, bits_of(loop, state)

    found = on_all(function)
    assert found == found[:1] * sum(COUNTS)


# ---- digests


FLIP = "flip-bit:instance=1,step=2"


@EVERY
def test_a_flipped_bit_is_named_and_ends_the_job(row):
    with pytest.raises(DivergenceError, match="before step 2 instance 1 had other bits than the other 2: .* is .*w"):
        run_instances(3, REPLICAS, functools.partial(train, row=row, digest_every=2), [FLIP], survives=False)


@EVERY
def test_a_job_that_carries_on_hands_over_the_bits_of_most_instances(row, caplog):
    with caplog.at_level(logging.WARNING):
        found = run_instances(3, REPLICAS, functools.partial(train, row=row, digest_every=2), [FLIP])
    assert "before step 2 instance 1 had other bits than the others, and got theirs" in caplog.text
    [alone] = run_instances(1, REPLICAS, functools.partial(train, row=row))
    assert found == [alone] * 3


# ---- notices


@EVERY
def test_a_notice_to_one_instance_is_agreed_on_by_all_at_the_end_of_the_step(row, on_all):
    def function(strategy):
        with row.training(strategy) as (loop, state):
            agreed = []
            for step, batch in enumerate(batches(strategy)):
                if step == 2 and strategy.instance_index == strategy.num_instances - 1:
                    loop.notice.give(15)
                state, _ = loop.make_step(state, batch)
                agreed.append(loop.notice.is_agreed)
            return agreed

    assert on_all(function) == [[False, False, True, True, True]] * sum(COUNTS)


# ---- the state


@EVERY
def test_a_training_goes_on_from_a_snapshot_with_the_same_bits(row, on_all):
    def function(strategy):
        with row.training(strategy) as (loop, state):
            given = list(map(copied, batches(strategy)))
            state, first = continued((loop, state), given[:2])
            snapshot = copy.deepcopy(loop._engine.snapshot(state))
            state, _ = continued((loop, state), given[:2])
            state, found = continued((loop, loop._engine.restore(snapshot)), given[2:])
            return first + found, state.step, bits_of(loop, state)

    expected = on_all(functools.partial(train, row=row))
    assert on_all(function) == expected


@EVERY
@pytest.mark.parametrize("count", COUNTS[1:])
def test_a_shared_state_is_that_of_its_root(row, count, on_instances):
    def function(strategy):
        root = strategy.num_instances - 1
        with row.training(strategy) as (loop, state):
            state, _ = continued((loop, state), map(copied, batches(strategy)))
            if strategy.instance_index == root:
                state = loop._rules.flipped(state)
            before = bits_of(loop, state)
            state = loop._engine.share(state, root)
            return before, bits_of(loop, state), state.step

    *others, (_, expected, step) = on_instances(count, REPLICAS, function)
    for before, after, same_step in others:
        assert before != expected
        assert (after, same_step) == (expected, step)
