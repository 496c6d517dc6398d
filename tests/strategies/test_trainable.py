"""Frozen variables: they keep their bits, without gradients and optimizer state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import strategies
from strategies.jax.gradients.computation import Trainable

REPLICAS = 4
VARIABLES = {
    "body": {"w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), "order": np.int32([2, 0, 1])},
    "head": np.linspace(0.5, 1, 4, dtype=np.float32),
}
ROWS = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)


def loss_fn(variables, batch, key):
    hidden = jnp.tanh(batch[:, variables["body"]["order"]] @ variables["body"]["w"])
    return (hidden @ variables["head"]).mean()


def is_head(name, leaf):
    return name == "['head']"


def trained(strategy, trainable=is_head, variables=VARIABLES, loss_fn=loss_fn, **options):
    trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1, momentum=0.9), trainable=trainable, **options)
    state = trainer.init(variables)
    mine = strategy.local_replicas
    for _ in range(2):
        state, _ = trainer.step(state, ROWS[2 * mine.start : 2 * mine.stop])
    return state


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_only_trained_variables_change_and_have_optimizer_state():
    state = trained(strategies.IPUStrategy(REPLICAS))
    assert bits(state.variables["body"]) == bits(VARIABLES["body"])
    assert bits(state.variables["head"]) != bits(VARIABLES["head"])
    assert state.optimizer_state[0].trace["body"] == {"w": None, "order": None}
    assert state.optimizer_state[0].trace["head"].shape == (4,)


def test_trained_variables_match_those_beside_constants():
    def of_head(variables, batch, key):
        return loss_fn({**VARIABLES, "head": variables["head"]}, batch, key)

    strategy = strategies.IPUStrategy(REPLICAS)
    alone = trained(strategy, None, {"head": VARIABLES["head"]}, of_head)
    np.testing.assert_allclose(trained(strategy).variables["head"], alone.variables["head"], rtol=1e-6)


def test_a_tree_of_bools_is_equivalent_to_a_function():
    strategy = strategies.IPUStrategy(REPLICAS)
    assert bits(trained(strategy, {"body": False, "head": True})) == bits(trained(strategy))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"replicated_optimizer_state_sharding": True, "min_elements_for_sharding": 1},
        {"gradient_transfer_dtype": "bfloat16"},
        {"gradient_accumulation_count": 2, "check_numerics": True},
    ],
    ids=str,
)
def test_the_bits_are_the_same_however_replicas_are_spread(on_instances, options):
    def function(strategy):
        return bits(trained(strategy, **options).variables)

    [alone] = on_instances(1, REPLICAS, function)
    assert on_instances(2, REPLICAS, function) == [alone] * 2


def test_fused_steps_leave_frozen_variables_alone():
    strategy = strategies.IPUStrategy(1)
    trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1, momentum=0.9), trainable=is_head)
    one_by_one, together = trainer.init(VARIABLES), trainer.init(VARIABLES)
    batches = list(ROWS.reshape(4, 2, 3))
    for batch in batches:
        one_by_one, _ = trainer.step(one_by_one, batch)
    together, _ = trainer.run(together, batches, steps_per_execution=2)
    assert bits(together) == bits(one_by_one)
    assert bits(together.variables["body"]) == bits(VARIABLES["body"])


def test_a_checkpoint_has_all_variables(tmp_path):
    strategy = strategies.IPUStrategy(REPLICAS)
    trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1, momentum=0.9), trainable=is_head)
    with strategies.Checkpoints(tmp_path, trainer) as checkpoints:
        checkpoints.save(trained(strategy))
    with strategies.Checkpoints(tmp_path, trainer) as checkpoints:
        restored = checkpoints.restore(trainer.init(jax.tree.map(np.zeros_like, VARIABLES)))
    assert bits(restored) == bits(trained(strategy))


def test_a_non_finite_gradient_is_reported_for_the_right_variable():
    def infinite(variables, batch, key):
        return loss_fn(variables, batch, key) + jnp.sqrt(variables["head"][0] - 0.5)

    with pytest.raises(strategies.NonFiniteGradientError, match=r"variable \['head'\] on replica 0"):
        trained(strategies.IPUStrategy(REPLICAS), loss_fn=infinite, check_numerics=True)


def test_all_variables_are_trained_by_default():
    assert Trainable.of(VARIABLES, None).is_all
    with pytest.raises(
        TypeError, match=r"variable \['body'\]\['order'\] is of dtype int32, .* Trainer\(trainable=...\)"
    ):
        trained(strategies.IPUStrategy(REPLICAS), None)


@pytest.mark.parametrize(
    ("trainable", "error", "message"),
    [
        (lambda name, leaf: False, ValueError, "leaves no variable to train"),
        ({"body": False, "head": False}, ValueError, "leaves no variable to train"),
        (lambda name, leaf: 1, TypeError, r"trainable gives 1 for variable \['body'\]\['order'\]"),
        ({"head": True}, ValueError, "give a pytree of bools that is a prefix of it"),
        ({"body": None, "head": True}, ValueError, "give a pytree of bools that is a prefix of it"),
        (lambda name, leaf: True, TypeError, "only floating-point variables can be trained"),
    ],
    ids=["none", "no leaf", "no bool", "another tree", "a hole", "an integer"],
)
def test_invalid_choices_of_trained_variables_are_refused(trainable, error, message):
    with pytest.raises(error, match=message):
        trained(strategies.IPUStrategy(REPLICAS), trainable)


@pytest.mark.parametrize("instances", [1, 2])
def test_a_filter_that_changes_its_answer_is_refused_at_the_next_step(on_instances, instances):
    def function(strategy):
        phase = {"number": 1}
        trainer = strategies.Trainer(
            strategy, loss_fn, optax.sgd(0.1), trainable=lambda name, leaf: name == "['head']" or phase["number"] == 2
        )
        variables = {"body": {**VARIABLES["body"], "order": np.int32([2, 0, 1])}, "head": VARIABLES["head"]}
        state = trainer.init(variables)
        rows = ROWS[2 * strategy.local_replicas.start : 2 * strategy.local_replicas.stop]
        state, _ = trainer.step(state, rows)
        phase["number"] = 2
        with pytest.raises(
            RuntimeError, match=r"trainable has changed its answer for \['body'\]\['order'\], \['body'\]"
        ):
            trainer.step(state, rows)

    on_instances(instances, REPLICAS, function)
