"""Update of a step: the optimizer on mean gradients, apart from their computation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import strategies
from strategies.jax.gradients.model_state import control_words
from strategies.jax.options import StepOptions
from strategies.jax.updates.update import WholeStateUpdate

VARIABLES = {"w": np.array([1.0, -2.0], np.float32), "b": np.float32(0.5)}
MEANS = {"w": np.array([0.25, 1.0], np.float32), "b": np.float32(-1.0)}


@pytest.fixture
def alone():
    return strategies.IPUStrategy(1)


def updated(strategy, optimizer=None, means=MEANS, variables=VARIABLES, step=0, scale=1.0, **options):
    update = WholeStateUpdate(strategy.replicas, optimizer or optax.sgd(0.5), StepOptions(**options))
    placed = jax.tree.map(jnp.array, variables)  # a copy, since the update uses it up
    after, state = update.apply(placed, update.init(placed), means, control_words(step, False, scale))
    update.wait()
    return after, state


def test_variables_are_updated_by_the_optimizer(alone):
    after, _ = updated(alone)
    assert after["w"].tolist() == [0.875, -2.5]
    assert float(after["b"]) == 1.0


@pytest.mark.parametrize(
    ("variables", "gradients", "mapped", "wanted"),
    [
        ([1, 2, 3], [5, 4, 3], lambda gradient, variable: gradient**2, [25, 16, 9]),
        ([1, 5, 10], [15, 11, 6], lambda gradient, variable: jnp.clip(gradient, 7, 14), [14, 11, 7]),
        ([1, 5, 10], [15, 11, 6], lambda gradient, variable: gradient + 0.01 * variable, [15.01, 11.05, 6.1]),
    ],
    ids=["squared", "clipped", "decayed"],
)
def test_a_function_of_gradients_and_variables_runs_before_the_optimizer(
    strategy, variables, gradients, mapped, wanted
):
    """The original's `MapGradientOptimizer` does this on the mean over replicas, whose gradients are 0.5 apart."""

    def loss_fn(variables, batch, key):
        return jnp.sum(variables["w"] * batch)

    optimizer = optax.chain(optax.stateless_with_tree_map(mapped), optax.sgd(1.0))
    trainer = strategies.Trainer(strategy, loss_fn, optimizer)
    state = trainer.init({"w": np.float32(variables)})
    apart = np.float32([-0.75, -0.25, 0.25, 0.75])[:, None]
    state, _ = trainer.step(state, np.float32(gradients) + apart)
    np.testing.assert_allclose(np.float32(variables) - state.variables["w"], wanted, rtol=1e-6)


def test_squared_gradients_update_the_weights(strategy):
    """The loss is the product of 1, 2 and 3, whose gradients are 6, 3 and 2."""

    def loss_fn(variables, batch, key):
        return jnp.prod(variables["w"]) * batch.mean()

    squared = optax.stateless_with_tree_map(lambda gradient, variable: gradient**2)
    trainer = strategies.Trainer(strategy, loss_fn, optax.chain(squared, optax.sgd(1.0)))
    state, _ = trainer.step(trainer.init({"w": np.float32([1, 2, 3])}), np.ones(4, np.float32))
    assert state.variables["w"].tolist() == [-35, -7, -1]


def test_old_variables_and_state_are_used_up(alone):
    """The donation is declared to the compiler, which may write the new arrays into the same memory."""
    update = WholeStateUpdate(alone.replicas, optax.sgd(0.5, momentum=0.9), StepOptions())
    variables = {"w": jax.device_put(np.ones(1000, np.float32), alone.replicas.variables_device)}
    state = update.init(variables)
    jax.block_until_ready((variables, state))
    compiled = update._program.lower(
        variables, state, {"w": np.ones(1000, np.float32)}, control_words(0, False, 1.0)
    ).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == 2 * 4000


def test_means_are_divided_by_the_loss_scale(alone):
    scaled = jax.tree.map(lambda leaf: leaf * 8, MEANS)
    one, _ = updated(alone, means=scaled, scale=8.0, loss_scaling=8.0)
    other, _ = updated(alone)
    assert strategies.fingerprint(one) == strategies.fingerprint(other)


def test_the_optimizer_gets_the_norm_of_all_gradients(alone):
    clipped, _ = updated(alone, optax.chain(strategies.clip_by_global_norm(0.5), optax.sgd(1.0)))
    norm = np.sqrt(0.25**2 + 1 + 1)
    np.testing.assert_allclose(clipped["w"], VARIABLES["w"] - MEANS["w"] * 0.5 / norm, rtol=1e-6)


@pytest.mark.parametrize(("dtype", "seen"), [(None, "bfloat16"), (jnp.float32, "float32")])
def test_the_optimizer_gets_gradients_in_the_requested_dtype(alone, dtype, seen):
    found = []
    watching = optax.stateless(lambda gradients, _: found.append(gradients["w"].dtype) or gradients)
    narrow = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), VARIABLES)
    means = jax.tree.map(lambda leaf: np.asarray(jnp.asarray(leaf, jnp.bfloat16)), MEANS)
    after, _ = updated(alone, watching, means, narrow, gradient_accumulation_dtype=dtype)
    assert {str(each) for each in found} == {seen}
    assert after["w"].dtype == jnp.bfloat16


def test_stochastic_rounding_depends_on_seed_and_step_alone(alone):
    variables = {"w": jnp.ones(1000, jnp.bfloat16)}
    means = {"w": np.full(1000, -(2.0**-9), jnp.bfloat16)}  # a half of it is a quarter of a step

    def rounded(step, seed):
        options = {"stochastic_rounding": True, "seed": seed}
        return updated(alone, means=means, variables=variables, step=step, **options)[0]["w"]

    again, first, step, seed = (np.asarray(rounded(*way)) for way in ((0, 3), (0, 3), (1, 3), (0, 4)))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, step)
    assert not np.array_equal(first, seed)
    assert set(first.tolist()) == {1.0, 1.0078125}


def test_state_can_lie_in_host_memory_between_updates(alone):
    _, state = updated(alone, optax.adam(0.1), offload_optimizer_state=True)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state)} == {"pinned_host"}
