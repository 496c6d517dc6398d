"""Random states of a model: each replica draws from its own, and all advance alike."""

from __future__ import annotations

import jax.numpy as jnp
import keras
import numpy as np
import pytest

from strategies.errors import StrategyError
from strategies.jax.gradients.model_state import ALIKE, CONSTANT, FIRST, MEAN
from strategies.keras.state import Seeds, reductions_of

SEEDS = Seeds((True, False))
VALUES = [jnp.array([3, 7], jnp.uint32), jnp.float32(5)]


def begun_by(replica, draw=None):
    state, other = SEEDS.of_replica(VALUES, jnp.int32(replica), None if draw is None else jnp.int32(draw))
    assert other == VALUES[1]
    return tuple(np.asarray(state).tolist())


def test_each_replica_has_its_own_state_and_the_first_has_that_of_the_model():
    assert begun_by(0) == (3, 7)
    assert len({begun_by(replica) for replica in range(8)}) == 8


def test_every_replica_and_draw_begins_with_another_state():
    assert len({begun_by(replica, draw) for replica in range(3) for draw in range(3)}) == 9


def test_the_state_of_the_model_advances_by_the_draws_of_one_replica():
    for replica in (0, 5):
        begun = SEEDS.of_replica(VALUES, jnp.int32(replica))
        made = [begun[0] + jnp.array([0, 2], jnp.uint32), jnp.float32(6)]
        state, other = SEEDS.after(VALUES, begun, made)
        assert (np.asarray(state).tolist(), other) == ([3, 9], 6)


def test_replicas_agree_on_a_variable_by_its_aggregation():
    first = keras.Variable(0.0, trainable=False, aggregation="only_first_replica")
    mean, count = keras.Variable(0.0, trainable=False), keras.Variable(0, trainable=False, dtype="int32")
    variables = [first, mean, count, mean, count]
    flags, changed = [False] * 4 + [True], [True] * 3 + [False, True]
    assert reductions_of(variables, flags, changed) == [FIRST, MEAN, FIRST, CONSTANT, ALIKE]


def test_a_variable_that_is_to_be_summed_is_refused_if_a_step_changes_it():
    """Its mean, or replica 0's count, would silently be another number than with one replica."""
    for dtype in ("float32", "int32"):
        total = keras.Variable(0, trainable=False, dtype=dtype, aggregation="sum")
        assert reductions_of([total], [False], [False]) == [CONSTANT]
        with pytest.raises(StrategyError, match="has aggregation='sum', but layers get means over replicas; use"):
            reductions_of([total], [False], [True])
