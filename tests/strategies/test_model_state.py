"""Model state that is not trained: moving means, counters, keys; the same bits for every spread of replicas."""

from __future__ import annotations

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from losing import OnMessage
from surviving_instances import run_instances
from tiers import first_of

import strategies
from collectives import ThreadHub
from strategies.jax.gradients.model_state import ModelStateRule

REPLICAS = 4
VARIABLES = {"w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2), "scale": np.ones(3, np.float32)}
MODEL_STATE = {
    "mean": np.float32([0.1, 0.2, 0.3]),
    "seen": np.int32(0),
    "key": jax.random.key(7),
    "largest": np.float32(-1.0),
}
AGGREGATION = {"mean": None, "seen": None, "key": "first", "largest": "per_replica"}


def loss_fn(variables, batch, key, model_state):
    """Compute a layer that subtracts a moving mean, with random numbers from a key of its own."""
    mean = 0.75 * model_state["mean"] + 0.25 * batch["x"].mean(0)
    own, drawn = jax.random.split(model_state["key"])
    noise = jax.random.normal(drawn, batch["x"].shape)
    hidden = (batch["x"] - mean + 0.01 * noise) * variables["scale"]
    loss = jnp.tanh(hidden @ variables["w"]).sum(1).mean()
    after = {
        "mean": mean,
        "seen": model_state["seen"] + len(batch["x"]),
        "key": own,
        "largest": jnp.maximum(model_state["largest"], batch["x"].max()),
    }
    return strategies.Outcome(loss, {"seen": after["seen"]}, after)


def rows_of(strategy, step, rows=2):
    """Return the rows of this instance, equally many for each replica."""
    of_all = np.random.default_rng(step).standard_normal((REPLICAS * rows, 3)).astype(np.float32)
    mine = strategy.local_replicas
    return {"x": of_all[mine.start * rows : mine.stop * rows]}


def trained(strategy, steps=3, rows=2, loss_fn=loss_fn, **options):
    options = {"model_state_aggregation": AGGREGATION} | options
    trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1, momentum=0.9), **options)
    state = trainer.init(VARIABLES, MODEL_STATE)
    for step in range(steps):
        state, metrics = trainer.step(state, rows_of(strategy, step, rows))
    return state, metrics


def bits(tree):
    hosted = [np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf) for leaf in jax.tree.leaves(tree)]
    return [(leaf.dtype.name, leaf.shape, leaf.tobytes()) for leaf in hosted]


def is_key(leaf):
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def shared_bits(state):
    return bits((state.variables, state.optimizer_state, {**state.model_state, "largest": None}))


@pytest.mark.parametrize(
    ("options", "spreads"),
    [
        ({}, [2]),
        *(
            pytest.param(options, [2, 4], marks=pytest.mark.complete)
            for options in (
                {},
                {"gradient_accumulation_count": 2, "loss_scaling": 8.0},
                {"gradient_accumulation_count": 2},
                {"loss_scaling": 8.0},
            )
        ),
    ],
    ids=str,
)
def test_the_model_state_has_the_same_bits_for_every_spread_of_replicas(on_instances, options, spreads):
    def function(strategy):
        state, metrics = trained(strategy, **options)
        return shared_bits(state), np.asarray(state.model_state["largest"]).tolist(), dict(metrics)

    [(alone, largest, metrics)] = on_instances(1, REPLICAS, function)
    for instances in spreads:
        found = on_instances(instances, REPLICAS, function)
        assert [each[0] for each in found] == [alone] * instances
        assert [one for each in found for one in each[1]] == largest
        assert [each[2] for each in found] == [metrics] * instances
    assert len(set(largest)) == REPLICAS


def test_the_values_match_the_definition():
    """Floats are the mean over the new values of all replicas; values without a mean come from replica 0."""
    strategy = strategies.IPUStrategy(REPLICAS)
    state, _ = trained(strategy, steps=2)
    mean, largest, key = np.float32(MODEL_STATE["mean"]), np.full(REPLICAS, -1, np.float32), MODEL_STATE["key"]
    for step in range(2):
        of_replicas = np.split(rows_of(strategy, step)["x"], REPLICAS)
        mean = np.mean([0.75 * mean + 0.25 * rows.mean(0) for rows in of_replicas], axis=0)
        largest = np.maximum(largest, [rows.max() for rows in of_replicas])
        key = jax.random.split(key)[0]
    np.testing.assert_allclose(state.model_state["mean"], mean, rtol=1e-6)
    assert np.asarray(state.model_state["largest"]).tolist() == largest.tolist()
    assert state.model_state["seen"] == 4
    assert bits(state.model_state["key"]) == bits(key)


@pytest.mark.complete
def test_the_model_state_passes_from_micro_batch_to_micro_batch():
    strategy = strategies.IPUStrategy(REPLICAS)
    state, metrics = trained(strategy, steps=1, rows=4, gradient_accumulation_count=4)
    of_replicas = np.split(rows_of(strategy, 0, 4)["x"], REPLICAS)
    means = []
    for rows in of_replicas:
        mean = MODEL_STATE["mean"]
        for row in rows:
            mean = 0.75 * mean + 0.25 * row
        means.append(mean)
    np.testing.assert_allclose(state.model_state["mean"], np.mean(means, axis=0), rtol=1e-6)
    assert state.model_state["seen"] == 4
    assert metrics["seen"] == 2.5  # the mean of 1, 2, 3 and 4


def test_a_skipped_step_leaves_the_model_state_alone():
    def overflowing(variables, batch, key, model_state):
        outcome = loss_fn(variables, batch, key, model_state)
        return strategies.Outcome(outcome.loss * jnp.float32(3e38), {}, outcome.model_state)

    strategy = strategies.IPUStrategy(REPLICAS)
    state, metrics = trained(strategy, steps=1, loss_fn=overflowing, loss_scaling=2.0**15)
    assert metrics["skipped_steps"] == 1
    assert bits({**state.model_state, "largest": None}) == bits({**MODEL_STATE, "largest": None})
    assert np.asarray(state.model_state["largest"]).tolist() == [-1] * REPLICAS


@pytest.mark.complete
def test_large_gradients_have_the_same_bits_beside_a_model_state(on_instances):
    """Means of the model state travel with the gradients of the same bucket."""
    large = {"w": np.linspace(-1, 1, 3 * 400_000, dtype=np.float32).reshape(3, -1), "scale": np.ones(3, np.float32)}

    def function(strategy):
        trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1), model_state_aggregation=AGGREGATION)
        state = trainer.init(large, MODEL_STATE)
        for step in range(2):
            state, _ = trainer.step(state, rows_of(strategy, step))
        return shared_bits(state)

    [alone] = on_instances(1, REPLICAS, function)
    assert on_instances(2, REPLICAS, function, mechanism="ring") == [alone] * 2


def test_a_checkpoint_has_the_model_state_for_any_number_of_instances(on_instances, tmp_path):
    def saving(strategy):
        trainer = strategies.Trainer(
            strategy, loss_fn, optax.sgd(0.1, momentum=0.9), model_state_aggregation=AGGREGATION
        )
        state = trainer.init(VARIABLES, MODEL_STATE)
        state, _ = trainer.step(state, rows_of(strategy, 0))
        with strategies.Checkpoints(tmp_path, trainer) as checkpoints:
            checkpoints.save(state)
        state, _ = trainer.step(state, rows_of(strategy, 1))
        return shared_bits(state), np.asarray(state.model_state["largest"]).tolist()

    def restoring(strategy):
        trainer = strategies.Trainer(
            strategy, loss_fn, optax.sgd(0.1, momentum=0.9), model_state_aggregation=AGGREGATION
        )
        empty = jax.tree.map(lambda leaf: leaf if is_key(leaf) else np.zeros_like(leaf), MODEL_STATE)
        with strategies.Checkpoints(tmp_path, trainer) as checkpoints:
            state = checkpoints.restore(trainer.init(VARIABLES, empty))
        state, _ = trainer.step(state, rows_of(strategy, 1))
        return shared_bits(state), np.asarray(state.model_state["largest"]).tolist()

    found = on_instances(2, REPLICAS, saving)
    [alone] = on_instances(1, REPLICAS, restoring)
    assert [each[0] for each in found] == [alone[0]] * 2
    assert [one for each in found for one in each[1]] == alone[1]


@pytest.mark.complete
def test_evaluation_and_prediction_get_the_model_state(on_instances):
    """Each replica gets its own part, and results of the functions change nothing."""

    def function(strategy):
        trainer = strategies.Trainer(
            strategy, loss_fn, optax.sgd(0.1, momentum=0.9), model_state_aggregation=AGGREGATION
        )
        state = trainer.init(VARIABLES, MODEL_STATE)
        state, _ = trainer.step(state, rows_of(strategy, 0))

        def of_model(variables, batch, key, model_state):
            outputs = batch["x"] - model_state["mean"] + model_state["largest"]
            return strategies.Outcome(outputs.sum(1).mean(), outputs=outputs)

        before = bits(state.model_state)
        found = trainer.evaluate(state, [rows_of(strategy, 1)], of_model)
        counted = trainer.evaluate(
            state,
            [rows_of(strategy, 1)],
            metrics_fn=lambda variables, batch, mask, key, model_state: {
                "seen": strategies.Mean(model_state["seen"] * mask.sum(), mask.sum())
            },
        )
        [predicted] = trainer.predict(state, [rows_of(strategy, 1)], of_model)
        assert bits(state.model_state) == before
        return found["loss"], counted["seen"], predicted.tobytes()

    [alone] = on_instances(1, REPLICAS, function)
    assert on_instances(2, REPLICAS, function) == [alone] * 2
    assert alone[1] == 2


def surviving_program(strategy, lost=-1, begin=lambda: None, end=lambda: None):
    """Return a program of two steps with the shared state, during the first of which an instance may be lost."""
    rows = np.random.default_rng(0).standard_normal((24, 3)).astype(np.float32)
    batches = strategy.distribute_dataset({"x": rows}, 2).epoch(0)
    trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1, momentum=0.9))
    state = trainer.init(VARIABLES, MODEL_STATE)
    if strategy.replicas.first_index == lost:
        begin()
    state, _ = trainer.step(state, next(batches))
    if strategy.replicas.first_index == lost:
        end()
    state, _ = trainer.step(state, next(batches))
    return bits(state)


@functools.cache
def left_alone():
    """Return the results of one instance that drives all replicas."""
    [found] = run_instances(1, 6, surviving_program)
    return found


def lose_at_message(lost, number):
    """Lose an instance at a message and check the others; return whether the message exists."""
    fault = OnMessage(lost, number)
    losing = functools.partial(surviving_program, lost=lost, begin=fault.begin, end=fault.end)
    found = run_instances(3, 6, losing, mechanism="ring", hub=ThreadHub(3, fault))
    wanted = [None if fault.has_struck and instance == lost else left_alone() for instance in range(3)]
    assert found == wanted, number
    return fault.has_struck


def test_survivors_agree_on_the_model_state_if_only_some_have_done_the_step(seed):
    assert lose_at_message(1, random.Random(seed).randrange(6))


@pytest.mark.complete
@pytest.mark.timeout(300)
def test_survivors_agree_on_the_model_state_after_the_loss_of_any_message():
    """The state is the new one if the step is complete, and the old one if survivors repeat the step."""
    number = 0
    while lose_at_message(0, number):
        number += 1
    assert number > 5


def test_digests_cover_the_shared_model_state(on_instances):
    def function(strategy):
        trainer = strategies.Trainer(
            strategy, loss_fn, optax.sgd(0.1, momentum=0.9), digest_every=1, model_state_aggregation=AGGREGATION
        )
        state = trainer.init(VARIABLES, MODEL_STATE)
        state, _ = trainer.step(state, rows_of(strategy, 0))
        state, _ = trainer.step(state, rows_of(strategy, 1))
        state.model_state["mean"] = state.model_state["mean"] + strategy.instance_index
        with pytest.raises(strategies.DivergenceError):
            trainer.step(state, rows_of(strategy, 2))
        return True

    assert on_instances(2, REPLICAS, function) == [True] * 2


class TestRefusals:
    def trainer(self, function=loss_fn, **options):
        return strategies.Trainer(strategies.IPUStrategy(2), function, optax.sgd(0.1), **options)

    def step(self, function, model_state=MODEL_STATE, **options):
        trainer = self.trainer(function, **options)
        return trainer.step(trainer.init(VARIABLES, model_state), {"x": np.ones((2, 3), np.float32)})

    def test_a_function_that_does_not_take_the_model_state(self):
        with pytest.raises(TypeError, match=r"takes \(variables, batch, key\), but .* let the function take it"):
            self.trainer(lambda variables, batch, key: 0.0).init(VARIABLES, MODEL_STATE)

    def test_a_function_that_takes_a_missing_model_state(self):
        with pytest.raises(TypeError, match=r"there is no model state; give one to init"):
            self.trainer().init(VARIABLES)

    def test_a_function_that_returns_no_model_state(self):
        def forgetful(variables, batch, key, model_state):
            return (batch["x"] @ variables["w"]).mean()

        with pytest.raises(TypeError, match=r"returns a model state of PyTreeDef\(None\), but gets"):
            self.step(forgetful)

    def test_a_leaf_of_another_dtype(self):
        def narrow(variables, batch, key, model_state):
            mean = model_state["mean"].astype(jnp.bfloat16)
            return strategies.Outcome((batch["x"] @ variables["w"]).mean(), {}, model_state | {"mean": mean})

        with pytest.raises(TypeError, match=r"returns bfloat16\[3\] as leaf \['mean'\] .* gets float32\[3\]"):
            self.step(narrow)

    def test_a_returned_model_state_that_was_not_given(self):
        def inventive(variables, batch, key):
            return strategies.Outcome((batch["x"] @ variables["w"]).mean(), {}, {"mean": 0.0})

        with pytest.raises(TypeError, match="returns a model state, but gets none; give it to init"):
            self.step(inventive, None)

    @pytest.mark.parametrize("word", ["median", 3])
    def test_an_unknown_aggregation(self, word):
        with pytest.raises(ValueError, match="model_state_aggregation has .*; use None, 'mean', 'first'"):
            self.trainer(model_state_aggregation={"mean": word})

    def test_aggregations_of_another_structure(self):
        with pytest.raises(ValueError, match="but the model state is a PyTreeDef"):
            self.trainer(model_state_aggregation={"other": "mean"}).init(VARIABLES, MODEL_STATE)

    @pytest.mark.parametrize(
        ("name", "word", "what"),
        [("seen", "mean", "only floating-point leaves have a mean"), ("key", "per_replica", "which is a random key")],
    )
    def test_an_aggregation_that_does_not_fit_the_dtype(self, name, word, what):
        with pytest.raises(ValueError, match=what):
            self.trainer(model_state_aggregation={**AGGREGATION, name: word}).init(VARIABLES, MODEL_STATE)

    def test_leaves_that_are_no_arrays(self):
        with pytest.raises(TypeError, match=r"leaf \['mean'\] of the model state is of type str"):
            self.trainer().init(VARIABLES, {"mean": "0"})


def test_one_aggregation_can_stand_for_a_tree():
    rule = ModelStateRule.of(
        {"a": {"b": np.float32(0), "c": np.int8(0)}, "d": np.float32(0)}, {"a": "first", "d": None}
    )
    assert dict(zip(rule.names, rule.reductions, strict=True)) == {
        "['a']['b']": "first",
        "['a']['c']": "first",
        "['d']": "mean",
    }


# ---- sums, equal values and constants


OTHERS = {"seen": np.int32(5), "total": np.float32(0.5), "turn": np.uint32([7, 0]), "fixed": np.ones(3, np.float32)}
WORDS = {"seen": "sum", "total": "sum", "turn": "alike", "fixed": "constant"}


def counting_loss_fn(variables, batch, key, model_state):
    """Compute a loss whose sums begin at zero in each step and pass from micro-batch to micro-batch."""
    loss = jnp.tanh(batch["x"] @ variables["w"] * model_state["fixed"][0]).mean()
    after = {
        "seen": model_state["seen"] + len(batch["x"]),
        "total": model_state["total"] + batch["x"].sum(),
        "turn": model_state["turn"] + jnp.uint32([0, 2]),
        "fixed": model_state["fixed"],
    }
    return strategies.Outcome(loss, {"begun": model_state["total"] == 0}, after)


@pytest.mark.parametrize("count", first_of([2, 1]))
def test_sums_are_added_exactly_and_equal_values_do_not_travel(on_instances, count):
    def function(strategy):
        trainer = strategies.Trainer(
            strategy,
            counting_loss_fn,
            optax.sgd(0.1),
            gradient_accumulation_count=count,
            model_state_aggregation=WORDS,
        )
        state = trainer.init({"w": VARIABLES["w"]}, OTHERS)
        for step in range(2):
            state, metrics = trainer.step(state, rows_of(strategy, step))
        return bits((state.variables, state.model_state)), metrics["begun"], int(state.model_state["seen"])

    results = [result for n in (1, 2, 4) for result in on_instances(n, REPLICAS, function)]
    assert all(result == results[0] for result in results)
    assert results[0][1:] == (1 / count, 5 + 2 * REPLICAS * 2)


def test_equal_values_advance_and_constants_stay(on_instances):
    def function(strategy):
        trainer = strategies.Trainer(strategy, counting_loss_fn, optax.sgd(0.1), model_state_aggregation=WORDS)
        state, _ = trainer.step(trainer.init({"w": VARIABLES["w"]}, OTHERS), rows_of(strategy, 0))
        return np.asarray(state.model_state["turn"]).tolist(), np.asarray(state.model_state["fixed"]).tolist()

    assert on_instances(2, REPLICAS, function) == [([7, 2], [1, 1, 1])] * 2


NARROW = {"int8": np.int8(-100), "int16": np.int16(20_000), "int32": np.int32(-(2**30)), "float16": np.float16(40_000)}
"""Values of one replica, which fit into the dtype, but not if they are multiplied by the number of replicas."""


def lonely_loss_fn(variables, batch, key, model_state):
    """Compute a loss; the replica whose rows begin with 1 adds to the sums, the others add nothing."""
    is_first = batch["x"][0, 0] == 1
    after = {name: leaf + jnp.where(is_first, NARROW[name], 0).astype(leaf.dtype) for name, leaf in model_state.items()}
    return strategies.Outcome((batch["x"] @ variables["w"]).mean(), model_state=after)


@pytest.mark.parametrize("instances", [1, 2])
def test_sums_that_fit_into_their_dtype_are_exact(on_instances, instances):
    def function(strategy):
        trainer = strategies.Trainer(strategy, lonely_loss_fn, optax.sgd(0.1), model_state_aggregation="sum")
        state = trainer.init(VARIABLES, {name: np.zeros((), value.dtype) for name, value in NARROW.items()})
        rows = np.zeros((len(strategy.local_replicas), 3), np.float32)
        rows[:, 0] = [replica == REPLICAS - 1 for replica in strategy.local_replicas]
        state, _ = trainer.step(state, {"x": rows})
        return {name: np.asarray(leaf) for name, leaf in state.model_state.items()}

    assert on_instances(instances, REPLICAS, function) == [NARROW] * instances


@pytest.mark.parametrize("instances", [1, 2])
def test_alike_values_that_differ_are_named_on_all_instances(on_instances, instances):
    def loss_fn(variables, batch, key, model_state):
        after = {"turn": model_state["turn"] + 1, "drawn": jax.random.uniform(key)}
        return strategies.Outcome((batch["x"] @ variables["w"]).mean(), model_state=after)

    def function(strategy):
        trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1), model_state_aggregation="alike")
        state = trainer.init(VARIABLES, {"turn": np.int32(0), "drawn": np.float32(0)})
        with pytest.raises(ValueError, match=r"replica 1 has made another value of leaf \['drawn'\] .* than replica 0"):
            trainer.step(state, rows_of(strategy, 0))

    on_instances(instances, REPLICAS, function)


def test_a_sum_of_values_that_are_no_numbers_is_refused():
    with pytest.raises(ValueError, match=r"'sum' for leaf \['flag'\], which is bool"):
        ModelStateRule.of({"flag": np.bool_(True)}, "sum")


@pytest.mark.parametrize("instances", [1, 2])
def test_a_state_trained_elsewhere_is_taken_over(on_instances, instances):
    """All instances get the state of instance 0, with its optimizer state and step number."""

    def function(strategy):
        trainer = strategies.Trainer(strategy, loss_fn, optax.adam(0.1), model_state_aggregation=AGGREGATION)
        state = trainer.init(VARIABLES, MODEL_STATE)
        for step in range(2):
            state, _ = trainer.step(state, rows_of(strategy, step))
        on = jax.tree.map(np.asarray, (state.variables, state.optimizer_state))
        shared = {**state.model_state, "largest": np.float32(-1.0)}
        is_first = strategy.instance_index == 0
        given = jax.tree.map(lambda leaf: leaf if is_first else np.zeros_like(leaf), on)
        again = strategies.Trainer(strategy, loss_fn, optax.adam(0.1), model_state_aggregation=AGGREGATION)
        taken = again.adopt(strategies.TrainState(*given, 2 if is_first else 9, model_state=shared))
        taken, _ = again.step(taken, rows_of(strategy, 2))
        state, _ = trainer.step(state, rows_of(strategy, 2))
        return bits(taken.variables) == bits(state.variables), taken.step

    assert on_instances(instances, REPLICAS, function) == [(True, 3)] * instances
