"""Low precision: compute dtypes, loss scaling, transfer of gradients, stochastic rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiers import first_of

import strategies
from strategies import LossScaling, Trainer, cross_replica_ops
from strategies.jax.gradients.model_state import control_words
from strategies.jax.options import StepOptions
from strategies.jax.updates.update import WholeStateUpdate, round_stochastically

RNG = np.random.default_rng(3)
INPUTS = RNG.standard_normal((32, 5)).astype(np.float32)
TARGETS = RNG.standard_normal((32, 1)).astype(np.float32)
BATCH = {"x": INPUTS, "y": TARGETS, "id": np.arange(32, dtype=np.int32)}


def start():
    return {"w": jnp.asarray(RNG_WEIGHTS), "b": jnp.zeros((40, 1))[:1]}


RNG_WEIGHTS = RNG.standard_normal((5, 1)).astype(np.float32)


def loss_fn(variables, batch, key):
    return jnp.mean((batch["x"] @ variables["w"] + variables["b"] - batch["y"]) ** 2)


def local_part(strategy, tree):
    rows = len(INPUTS) // strategy.num_replicas_in_sync
    part = slice(strategy.local_replicas.start * rows, strategy.local_replicas.stop * rows)
    return jax.tree.map(lambda leaf: leaf[part], tree)


def trained(strategy, loss_fn=loss_fn, optimizer=None, steps=3, batch=BATCH, variables=None, **options):
    trainer = Trainer(strategy, loss_fn, optimizer or optax.adam(0.01), **options)
    state = trainer.init(variables if variables is not None else start())
    for _ in range(steps):
        state, metrics = trainer.step(state, local_part(strategy, batch))
    return state, metrics


def fingerprint(strategy, **options):
    return strategies.fingerprint(trained(strategy, **options)[0].variables)


@pytest.mark.parametrize("dtype", first_of(["bfloat16", jnp.float16]))
def test_a_trainer_computes_in_low_precision_and_keeps_float32_variables(strategy, dtype):
    seen = []

    def watched(variables, batch, key):
        seen.append((variables["w"].dtype, batch["x"].dtype, batch["id"].dtype))
        return loss_fn(variables, batch, key)

    state, metrics = trained(strategy, watched, compute_dtype=dtype)
    assert set(seen) == {(jnp.dtype(dtype), jnp.dtype(dtype), jnp.dtype("int32"))}
    assert {leaf.dtype for leaf in jax.tree.leaves(state.variables)} == {jnp.dtype("float32")}
    exact, wanted = trained(strategy)
    assert metrics["loss"] == pytest.approx(wanted["loss"], rel=0.02)
    assert strategies.fingerprint(state.variables) != strategies.fingerprint(exact.variables)


@pytest.mark.parametrize(
    "options",
    [
        {"compute_dtype": "float16", "loss_scaling": "dynamic"},
        {"gradient_transfer_dtype": "bfloat16", "loss_scaling": 64.0, "gradient_accumulation_count": 2},
        *(
            pytest.param(options, marks=pytest.mark.complete)
            for options in (
                {"compute_dtype": "bfloat16", "gradient_transfer_dtype": "bfloat16"},
                {"gradient_transfer_dtype": "float16", "loss_scaling": 256},
            )
        ),
    ],
    ids=str,
)
def test_the_bits_do_not_depend_on_the_instances(strategy, on_instances, options):
    alone = fingerprint(strategy, **options)
    assert on_instances(2, 4, lambda each: fingerprint(each, **options)) == [alone] * 2


@pytest.mark.complete
def test_stochastic_rounding_has_the_same_bits_on_any_number_of_instances(strategy, on_instances):
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), start())
    options = {"variables": narrow, "stochastic_rounding": True}
    alone = fingerprint(strategy, **options)
    assert fingerprint(strategy, variables=narrow) != alone
    sharded = {**options, "replicated_optimizer_state_sharding": True, "min_elements_for_sharding": 1}
    assert on_instances(2, 4, lambda each: fingerprint(each, **sharded)) == [alone] * 2


@pytest.mark.complete
def test_stochastic_rounding_has_the_same_bits_without_sharding(strategy, on_instances):
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), start())
    options = {"variables": narrow, "stochastic_rounding": True}
    alone = fingerprint(strategy, **options)
    assert on_instances(2, 4, lambda each: fingerprint(each, **options)) == [alone] * 2


class TestLossScaling:
    def test_a_power_of_two_changes_no_bit(self, strategy):
        options = {"optimizer": optax.sgd(0.01)}  # Adam would not see another scale
        state, metrics = trained(strategy, loss_scaling=1024, **options)
        assert strategies.fingerprint(state.variables) == fingerprint(strategy, **options)
        assert (metrics["loss_scale"], metrics["skipped_steps"]) == (1024, 0)
        assert metrics["loss"] == trained(strategy, **options)[1]["loss"]

    def test_loss_scaling_keeps_gradients_that_float16_would_lose(self, strategy):
        def tiny(variables, batch, key):
            return (variables["w"] * jnp.asarray(2.0**-13, variables["w"].dtype)).mean() * batch["x"].astype(
                variables["w"].dtype
            ).sum() * 0 + (variables["w"] ** 2 * jnp.asarray(2.0**-24, variables["w"].dtype)).sum()

        variables = {"w": jnp.full((4, 1), 0.25)}
        options = {"variables": variables, "optimizer": optax.sgd(1.0), "steps": 1, "compute_dtype": "float16"}
        lost, _ = trained(strategy, tiny, **options)
        kept, _ = trained(strategy, tiny, loss_scaling=2.0**10, **options)
        np.testing.assert_array_equal(lost.variables["w"], variables["w"])
        np.testing.assert_allclose(kept.variables["w"] - variables["w"], np.full((4, 1), -(2.0**-25)), rtol=1e-3)

    @pytest.mark.parametrize("scaling", [0, -1.0, float("nan"), True, "static", 2.0**25])
    def test_other_scales_are_refused(self, strategy, scaling):
        with pytest.raises(ValueError, match="scale|loss_scaling"):
            Trainer(strategy, loss_fn, optax.sgd(0.1), loss_scaling=scaling)

    def test_an_interval_that_is_not_an_integer_is_refused(self):
        with pytest.raises(TypeError, match="the interval of the loss scale is 1.5; an integer"):
            LossScaling(interval=1.5)

    def test_check_numerics_excludes_loss_scaling(self, strategy):
        with pytest.raises(ValueError, match="use one of them"):
            Trainer(strategy, loss_fn, optax.sgd(0.1), loss_scaling=2, check_numerics=True)


class TestTransfer:
    def test_gradients_of_16_bits_are_added_in_float32(self, strategy, bits):
        """In bfloat16 256 + 1 is 256; the float32 sum of 256, 1, 1, 1 is rounded once."""

        def loss(variables, batch, key):
            return (variables["w"] * batch["x"]).sum()

        batch = {"x": np.array([[256.0], [1.0], [1.0], [1.0]], np.float32)}
        trainer = Trainer(strategy, loss, optax.sgd(1.0), gradient_transfer_dtype="bfloat16")
        state, _ = trainer.step(trainer.init({"w": jnp.zeros((1, 1))}), batch)
        wanted = np.float32(jnp.bfloat16(259 / 4))
        assert bits(-state.variables["w"][0, 0]) == bits(wanted)
        assert state.variables["w"].dtype == np.float32

    @pytest.mark.parametrize("dtype", ["float8", "int8", 8])
    def test_other_dtypes_are_refused(self, strategy, dtype):
        with pytest.raises(ValueError, match="gradient_transfer_dtype is"):
            Trainer(strategy, loss_fn, optax.sgd(0.1), gradient_transfer_dtype=dtype)


@pytest.mark.parametrize("dtype", ["int8", "complex64", "float99"])
def test_compute_dtypes_are_of_floating_point(strategy, dtype):
    with pytest.raises(ValueError, match="compute_dtype is"):
        Trainer(strategy, loss_fn, optax.sgd(0.1), compute_dtype=dtype)


@pytest.mark.parametrize(("dtype", "step"), [("bfloat16", 2.0**-7), ("float16", 2.0**-10)])
def test_stochastic_rounding_is_exact_on_the_average(dtype, step):
    """A quarter of the random numbers round 1 plus a quarter of the distance up to the next number."""
    values = jnp.full(40_000, 1 + step / 4, jnp.float32)
    rounded = round_stochastically(values, dtype, jax.random.bits(jax.random.key(1), values.shape, jnp.uint32))
    assert rounded.dtype == jnp.dtype(dtype)
    found = np.asarray(rounded.astype(jnp.float32))
    assert set(np.unique(found)) == {1.0, np.float32(1 + step)}
    assert (found > 1).mean() == pytest.approx(0.25, abs=0.01)


def test_replicas_round_by_their_own_random_numbers_or_by_a_shared_key(on_instances):
    """Numbers differ by default, are equal with a key in the model state, change in each step, and follow the seed."""

    def loss_fn(variables, batch, key, model_state):
        mine, next_key = jax.random.split(model_state["key"])

        def rounded(key):
            bits = jax.random.bits(key, (64,), jnp.uint32)
            values = round_stochastically(jnp.full(64, 1 + 2.0**-8, jnp.float32), "bfloat16", bits)
            return cross_replica_ops.all_gather(values.astype(jnp.float32))

        new = {"key": next_key, "own": rounded(key), "shared": rounded(mine)}
        return strategies.Outcome(variables["w"] * batch.mean(), model_state=new)

    def program(strategy):
        trainer = Trainer(strategy, loss_fn, optax.sgd(0.1), seed=5, model_state_aggregation="alike")
        nothing = np.zeros((4, 64), np.float32)
        state = trainer.init({"w": np.float32(1)}, {"key": jax.random.key(3), "own": nothing, "shared": nothing})
        found = []
        for _ in range(2):
            state, _ = trainer.step(state, np.ones(len(strategy.local_replicas), np.float32))
            found.append([np.array(state.model_state[name]) for name in ("own", "shared")])
        return found

    [first, second] = on_instances(2, 4, program)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, on_instances(1, 4, program)[0])
    for own, shared in first:
        assert len({row.tobytes() for row in own}) == 4
        assert len({row.tobytes() for row in shared}) == 1
    for before, after in zip(*first, strict=True):
        assert before.tobytes() != after.tobytes()


def test_stochastic_rounding_keeps_representable_and_non_finite_numbers():
    values = jnp.array([0.0, -1.5, jnp.inf, -jnp.inf, 2.0**-30], jnp.float32)
    bits = jnp.full(values.shape, 0xFFFFFFFF, jnp.uint32)
    found = round_stochastically(values, "float16", bits)
    np.testing.assert_array_equal(found, np.array([0.0, -1.5, np.inf, -np.inf, 0.0], np.float16))
    assert jnp.isnan(round_stochastically(jnp.array([jnp.nan]), "bfloat16", bits[:1])).all()


def test_small_updates_count_with_stochastic_rounding(strategy):
    """A change of 1/1000 of a bfloat16's last place, 2000 times, is lost in rounding to the nearest."""

    def loss(variables, batch, key):
        return variables["w"].astype(jnp.float32).mean() + 0 * batch.sum()

    def end(**options):
        trainer = Trainer(strategy, loss, optax.sgd(64 * 2.0**-8 / 100), **options)
        state = trainer.init({"w": jnp.ones(64, jnp.bfloat16)})
        for _ in range(40):
            state, _ = trainer.step(state, np.zeros((4, 1), np.float32))
        return np.asarray(state.variables["w"].astype(jnp.float32)).mean()

    assert end() == 1.0
    assert end(stochastic_rounding=True) == pytest.approx(1 - 40 * 2.0**-8 / 100, abs=4e-4)


def test_rounding_and_replicas_use_different_random_bits(strategy):
    """A loss function may draw from the key of replica 2 at step 5, which differs from that of variable 2."""
    own = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 5), 2)
    update = WholeStateUpdate(strategy.replicas, optax.sgd(0.1), StepOptions(stochastic_rounding=True))
    bits = update._bits(2, (64,), control_words(5, False, 1.0))
    assert (np.asarray(bits) != np.asarray(jax.random.bits(own, (64,), jnp.uint32))).mean() > 0.9
