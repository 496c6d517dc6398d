"""Gradient accumulation: several micro-batches per update, reduced in three ways."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from connected import ConnectedStrategy

import strategies
from collectives import connect
from popdist import Instance
from strategies import GradientAccumulationReductionMethod as Method
from strategies import Trainer

RNG = np.random.default_rng(7)
COUNT, ROWS, REPLICAS = 4, 2, 4
INPUTS = RNG.standard_normal((REPLICAS * COUNT * ROWS, 3)).astype(np.float32)
TARGETS = RNG.standard_normal(REPLICAS * COUNT * ROWS).astype(np.float32)
BATCH = {"x": INPUTS, "y": TARGETS}


def start():
    return {"w": jnp.array([1.0, -2.0, 0.5]), "b": jnp.float32(0.25)}


def loss_fn(variables, batch, key):
    error = batch["x"] @ variables["w"] + variables["b"] - batch["y"]
    return jnp.mean(error**2), {"rows": error.size, "noise": jax.random.uniform(key)}


def reused(variables, batch, key):
    """Compute a loss that uses `w` twice."""
    hidden = jnp.tanh(batch["x"] * variables["w"])
    return jnp.mean((hidden @ variables["w"] + variables["b"] - batch["y"]) ** 2)


def local_part(strategy, tree):
    rows = len(INPUTS) // strategy.num_replicas_in_sync
    part = slice(strategy.local_replicas.start * rows, strategy.local_replicas.stop * rows)
    return jax.tree.map(lambda leaf: leaf[part], tree)


def trained(strategy, loss_fn=loss_fn, optimizer=None, steps=1, **options):
    trainer = Trainer(strategy, loss_fn, optimizer or optax.sgd(0.125), gradient_accumulation_count=COUNT, **options)
    state = trainer.init(start())
    for _ in range(steps):
        state, metrics = trainer.step(state, local_part(strategy, BATCH))
    return state, metrics


def by_hand(loss_fn, optimizer, steps, method):
    """Compute the update on the host: micro-batch after micro-batch, then the mean over replicas."""
    variables = start()
    kept = optimizer.init(variables)
    divisor = REPLICAS if method == "sum" else REPLICAS * COUNT
    for _ in range(steps):
        total = jax.tree.map(jnp.zeros_like, variables)
        for number in range(REPLICAS * COUNT):
            part = {name: array[number * ROWS : (number + 1) * ROWS] for name, array in BATCH.items()}
            gradient = jax.grad(lambda v, p=part: loss_fn(v, p, jax.random.key(0)))(variables)
            total = jax.tree.map(jnp.add, total, gradient)
        changes, kept = optimizer.update(jax.tree.map(lambda leaf: leaf / divisor, total), kept, variables)
        variables = optax.apply_updates(variables, changes)
    return variables


OPTIMIZERS = {"adam": optax.adam(0.01), "sgd": optax.sgd(0.01), "momentum": optax.sgd(0.01, momentum=0.8)}
PAIRS = {("momentum", "running_mean")}


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(*pair, marks=() if pair in PAIRS else pytest.mark.complete)
        for pair in itertools.product(OPTIMIZERS, ("sum", "mean", "running_mean"))
    ],
)
def test_accumulation_matches_a_loop_on_the_host(strategy, method, name):
    optimizer = OPTIMIZERS[name]
    for loss in (lambda v, b, k: loss_fn(v, b, k)[0], reused):
        state, _ = trained(strategy, loss, optimizer, steps=2, reduction_method=method)
        wanted = by_hand(loss, optimizer, 2, method)
        for place, leaf in wanted.items():
            np.testing.assert_allclose(state.variables[place], leaf, rtol=2e-5, atol=1e-6)


@pytest.mark.complete
def test_many_micro_batches_are_a_loop_with_the_same_result(strategy):
    def end(count):
        trainer = Trainer(
            strategy, lambda v, b, k: loss_fn(v, b, k)[0], optax.sgd(0.1), gradient_accumulation_count=count
        )
        return trainer.step(trainer.init(start()), {"x": np.repeat(INPUTS, 2, 0), "y": np.repeat(TARGETS, 2)})[0]

    for name, leaf in end(8).variables.items():
        np.testing.assert_allclose(end(16).variables[name], leaf, rtol=1e-5)


@pytest.mark.complete
def test_the_default_reduction_method_is_the_mean(strategy):
    default, _ = trained(strategy)
    assert strategies.fingerprint(default.variables) == strategies.fingerprint(
        trained(strategy, reduction_method=Method.MEAN)[0].variables
    )
    total = trained(strategy, reduction_method="SUM")[0]
    assert strategies.fingerprint(total.variables) != strategies.fingerprint(default.variables)


@pytest.mark.parametrize(("method", "wanted"), [("sum", 8.0), ("mean", 1.0), ("running_mean", 1.0)])
def test_a_wider_accumulator_holds_what_float16_cannot(strategy, method, wanted):
    """The gradients are the largest float16, eight times."""
    largest = float(jnp.finfo(jnp.float16).max)
    seen = []

    def update(gradients, state, variables=None):
        seen.append(gradients["w"].dtype)
        return jax.tree.map(lambda g: -g, gradients), {"gradient": gradients["w"]}

    optimizer = optax.GradientTransformation(lambda v: {"gradient": v["w"].astype(jnp.float32)}, update)
    trainer = Trainer(
        strategy,
        lambda variables, batch, key: (variables["w"] * jnp.float16(largest)).sum() + 0 * batch.sum(),
        optimizer,
        gradient_accumulation_count=8,
        gradient_accumulation_dtype=lambda variable: jnp.float32 if variable.ndim else None,
        reduction_method=method,
    )
    state = trainer.init({"w": jnp.zeros(3, jnp.float16), "unused": jnp.float16(0)})
    state, _ = trainer.step(state, np.zeros((4 * 8, 1), np.float16))
    assert set(seen) == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(state.optimizer_state["gradient"], np.full(3, wanted * largest), rtol=1e-6)


@pytest.mark.parametrize("count", [3, 8, 10, 26])
@pytest.mark.parametrize("method", ["mean", "running_mean"])
def test_means_stay_within_float16(strategy, method, count):
    """XLA moves factors that are powers of two out of sums; ten rounded tenths are more than one."""
    largest = float(jnp.finfo(jnp.float16).max)
    keep = optax.GradientTransformation(jnp.zeros_like, lambda gradient, state, variable=None: (0 * state, gradient))
    trainer = Trainer(
        strategy,
        lambda variable, batch, key: (variable * batch).sum(),
        keep,
        gradient_accumulation_count=count,
        reduction_method=method,
    )
    for sign in (1, -1):
        state, _ = trainer.step(trainer.init(jnp.float16(1)), np.full(4 * count, sign * largest, np.float16))
        mean = float(state.optimizer_state)
        assert mean == sign * largest if method == "running_mean" else 0.99 < sign * mean / largest <= 1


@pytest.mark.parametrize("method", ["mean", "running_mean"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_infinity_and_nan_survive_a_mean(strategy, method, value):
    keep = optax.GradientTransformation(jnp.zeros_like, lambda gradient, state, variable=None: (0 * state, gradient))
    trainer = Trainer(
        strategy,
        lambda variable, batch, key: (variable * batch).sum(),
        keep,
        gradient_accumulation_count=3,
        reduction_method=method,
    )
    state, _ = trainer.step(trainer.init(jnp.float16(1)), np.array([1, value, 2] * 4, np.float16))
    np.testing.assert_equal(float(state.optimizer_state), value)


def test_feeds_of_micro_batches_come_in_their_order(strategy):
    infeed = strategies.InfeedQueue(np.arange(100, dtype=np.int32))
    outfeed = strategies.OutfeedQueue()

    def loss_fn(variable, batch, key):
        outfeed.enqueue((infeed.dequeue(), batch))
        return (variable * batch).sum()

    trainer = Trainer(strategy, loss_fn, optax.sgd(0.1), gradient_accumulation_count=5)
    trainer.step(trainer.init(jnp.float32(1)), np.arange(20, dtype=np.float32))
    numbers, rows = outfeed.dequeue()
    np.testing.assert_array_equal(numbers, np.arange(20).reshape(5, 4))
    np.testing.assert_array_equal(rows[..., 0].T, np.arange(20).reshape(4, 5))


@pytest.mark.parametrize("name", ["SUM", "sum", "Sum", "MEAN", "mean", "RUNNING_MEAN", "running_mean"])
def test_methods_have_names_in_any_case(name):
    assert Method.parse(name) is Method[name.upper()]


@pytest.mark.parametrize("method", list(Method))
def test_members_of_the_enum_are_methods(method):
    assert Method.parse(method) is method
    assert [one.value for one in Method] == [0, 1, 2]


@pytest.mark.parametrize("method", ["Exp", 10, None])
def test_other_methods_are_refused(strategy, method):
    with pytest.raises(ValueError, match="Cannot parse .* as one of GradientAccumulationReductionMethod."):
        Trainer(strategy, loss_fn, optax.sgd(0.1), reduction_method=method)


@pytest.mark.parametrize("count", [0, -1])
def test_fewer_than_one_micro_batch_is_refused(strategy, count):
    with pytest.raises(ValueError, match="gradient_accumulation_count is"):
        Trainer(strategy, loss_fn, optax.sgd(0.1), gradient_accumulation_count=count)


@pytest.mark.parametrize("dtype", ["int32", "float64", "nonsense", lambda variable: int])
def test_accumulators_are_of_floating_point_dtypes(strategy, dtype):
    trainer = Trainer(
        strategy, loss_fn, optax.sgd(0.1), gradient_accumulation_count=2, gradient_accumulation_dtype=dtype
    )
    with pytest.raises(ValueError, match="gradient_accumulation_dtype is"):
        trainer.step(trainer.init(start()), BATCH)


def test_rows_that_cannot_be_divided_are_refused(strategy):
    trainer = Trainer(strategy, loss_fn, optax.sgd(0.1), gradient_accumulation_count=3)
    with pytest.raises(ValueError, match="Detected a gradient accumulation operation with 3 micro-batches.* 8 rows"):
        trainer.step(trainer.init(start()), BATCH)


def test_metrics_are_means_over_micro_batches_of_different_keys(strategy):
    _, metrics = trained(strategy)
    assert metrics["rows"] == ROWS
    key = jax.random.fold_in(jax.random.key(0), 0)
    keys = [jax.random.fold_in(jax.random.fold_in(key, r), m) for r in range(REPLICAS) for m in range(COUNT)]
    np.testing.assert_allclose(metrics["noise"], np.mean([jax.random.uniform(each) for each in keys]), rtol=1e-6)


@pytest.mark.parametrize("instances", [2, pytest.param(4, marks=pytest.mark.complete)])
def test_the_bits_do_not_depend_on_the_instances(strategy, on_instances, instances):
    alone = strategies.fingerprint(trained(strategy, steps=3)[0].variables)
    found = on_instances(instances, REPLICAS, lambda each: strategies.fingerprint(trained(each, steps=3)[0].variables))
    assert found == [alone] * instances


@pytest.mark.parametrize("count", [8, *(pytest.param(few, marks=pytest.mark.complete) for few in (1, 2))])
def test_instances_exchange_gradients_once_per_update(on_instances, count):
    def calls(strategy):
        trainer = Trainer(strategy, loss_fn, optax.sgd(0.125), gradient_accumulation_count=count)
        state = trainer.init(start())
        batch = local_part(strategy, BATCH)
        state, _ = trainer.step(state, batch)
        before = strategy.communicator.calls_made
        trainer.step(state, batch)
        return strategy.communicator.calls_made - before

    assert on_instances(2, REPLICAS, calls) == [1, 1]


def test_the_effective_batch_size_is_logged(strategy, caplog):
    with caplog.at_level("INFO", "strategies.jax"):
        trained(strategy)
    assert "effective batch 32 = micro-batch 2 x 4 accumulated x 4 replicas" in caplog.text


def test_data_sets_read_the_micro_batches_of_each_replica_one_after_another(strategy):
    dataset = strategy.distribute_dataset(np.arange(64), ROWS, shuffle=False, gradient_accumulation_count=COUNT)
    first = np.asarray(next(iter(dataset.epoch(0))))
    np.testing.assert_array_equal(first, np.arange(REPLICAS * COUNT * ROWS))
    assert len(dataset) == 2
    alone = ConnectedStrategy(Instance(1, 2, 2, 2, 4, 1), connect("single"))
    other = alone.distribute_dataset(np.arange(64), ROWS, shuffle=False, gradient_accumulation_count=COUNT, prefetch=0)
    np.testing.assert_array_equal(np.asarray(next(iter(other.epoch(0)))), np.arange(16, 32))
