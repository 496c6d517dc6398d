"""Gradients on their way through the hosts of several instances, with the bits of one instance."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from connected import ConnectedStrategy
from tiers import also

import strategies
from strategies import get_replica_context

WIDTH = 24  # a square matrix of float32 has 2.25 KiB
INPUTS = 2
BATCH = 6
KIB = 1 << 10


@pytest.fixture(autouse=True)
def _a_kib_is_large(monkeypatch):
    """Lower the limit of large gradients to a KiB, so that gradients of small models have buffers of their own."""
    monkeypatch.setattr("strategies.exchange.flat.LARGE_BYTES", KIB)


def weights(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32) / np.float32(shape[0] ** 0.5)


def mlp():
    start = {"a": weights(INPUTS, WIDTH), "b": weights(WIDTH, WIDTH, seed=1), "c": weights(WIDTH, WIDTH, seed=2)}
    start["bias"] = jnp.zeros(WIDTH)

    def loss_fn(variables, batch, key):
        hidden = jax.nn.relu(batch @ variables["a"] + variables["bias"])
        hidden = jnp.tanh(hidden @ variables["b"])
        return jnp.mean((hidden @ variables["c"]) ** 2)

    return start, loss_fn


def nested():
    """Compute nested jits, recomputation, a scan, a custom gradient and dropout."""
    start = {"a": weights(INPUTS, WIDTH), "blocks": jnp.stack([weights(WIDTH, WIDTH, seed=s) for s in (1, 2)])}
    start["z"] = weights(WIDTH, WIDTH, seed=3)

    @jax.custom_vjp
    def halve(x):
        return x / 2

    halve.defvjp(lambda x: (x / 2, None), lambda _, gradient: (gradient / 2,))

    @jax.jit
    def dense(x, kernel):
        return x @ kernel

    def loss_fn(variables, batch, key):
        hidden = jax.nn.gelu(dense(batch, variables["a"]))
        hidden, _ = jax.lax.scan(lambda h, kernel: (jnp.tanh(h @ kernel), None), hidden, variables["blocks"])
        hidden = jax.checkpoint(lambda h: jax.nn.silu(dense(h, variables["z"])))(hidden)
        kept = jax.random.bernoulli(key, 0.9, hidden.shape)
        return jnp.mean(halve(jnp.where(kept, hidden, 0)) ** 2)

    return start, loss_fn


def normalised():
    """Compute statistics over all replicas in the middle of the program, and metrics."""
    start = {"a": weights(INPUTS, WIDTH), "b": weights(WIDTH, WIDTH, seed=1), "scale": jnp.ones(WIDTH)}

    def loss_fn(variables, batch, key):
        hidden = batch @ variables["a"]
        mean = get_replica_context().all_reduce("mean", hidden.mean(0))
        hidden = (hidden - mean) * variables["scale"]
        out = hidden @ variables["b"]
        return jnp.mean(out**2), {"largest": jnp.max(out), "mean": jnp.mean(mean)}

    return start, loss_fn


def half():
    """Compute with two dtypes, so that there are two buffers."""
    start = {"a": weights(INPUTS, WIDTH), "b": weights(WIDTH, 2 * WIDTH, seed=1).astype(jnp.bfloat16)}

    def loss_fn(variables, batch, key):
        hidden = jnp.tanh(batch @ variables["a"]).astype(jnp.bfloat16)
        return jnp.mean((hidden @ variables["b"]).astype(jnp.float32) ** 2)

    return start, loss_fn


MODELS = {model.__name__: model for model in (mlp, nested, normalised, half)}


def train(strategy, model, steps=3, **options):
    start, loss_fn = MODELS[model]()
    trainer = strategies.Trainer(strategy, loss_fn, optax.adam(0.001), **options)
    data = np.random.default_rng(0).standard_normal((BATCH * 4 * steps, INPUTS)).astype(np.float32)
    state = trainer.init(start)
    for batch in strategy.distribute_dataset(data, batch_size=BATCH).epoch(0):
        state, metrics = trainer.step(state, batch)
    return strategies.fingerprint(state.variables), dict(metrics), state.step


@functools.cache
def trained_alone(model):
    return train(strategies.IPUStrategy(4), model)


@pytest.mark.parametrize(
    ("model", "instances"),
    [("mlp", 2), ("nested", 2), *(also(*case) for case in [("mlp", 4), ("nested", 4), ("half", 2), ("normalised", 2)])],
)
@pytest.mark.parametrize("on_host", [False, True])
def test_several_instances_have_the_bits_of_one(on_instances, model, instances, on_host):
    alone = trained_alone(model)
    found = on_instances(instances, 4, lambda strategy: train(strategy, model), variables_on_host=on_host)
    assert found == [alone] * instances
    assert alone[2] == 3


@pytest.mark.complete
def test_sharded_updates_of_variables_on_the_host_have_the_same_bits(on_instances):
    """Large gradients go to the owners of the parts."""
    alone = trained_alone("mlp")
    found = on_instances(
        2, 4, lambda each: train(each, "mlp", replicated_optimizer_state_sharding=True), variables_on_host=True
    )
    assert found == [alone] * 2


def test_checks_of_gradients_change_no_bit(on_instances):
    alone = trained_alone("mlp")
    found = on_instances(2, 4, lambda strategy: train(strategy, "mlp", check_numerics=True), variables_on_host=True)
    assert found == [alone] * 2


class Recorder:
    """A communicator that records the reductions."""

    def __init__(self, communicator, note):
        self._communicator = communicator
        self._note = note

    def __getattr__(self, name):
        return getattr(self._communicator, name)

    def ordered_all_reduce(self, contributions, out=None, op="sum", *, name=""):
        self._note(name, contributions[0].nbytes)
        return self._communicator.ordered_all_reduce(contributions, out, op, name=name)

    def grouped_ordered_all_reduce(self, contributions, outs, op="sum", *, names):
        for name, arrays in zip(names, contributions, strict=True):
            self._note(name, arrays[0].nbytes)
        return self._communicator.grouped_ordered_all_reduce(contributions, outs, op, names=names)


@pytest.mark.parametrize("on_host", [False, True])
def test_each_gradient_byte_is_sent_once_and_large_gradients_alone(on_instances, on_host):
    def program(strategy):
        sent = []
        recorder = Recorder(strategy.communicator, lambda name, nbytes: sent.append((name, nbytes)))
        strategy = ConnectedStrategy(strategy.instance, recorder, variables_on_host=on_host)
        train(strategy, "mlp", steps=1)
        return [entry for entry in sent if entry[0].startswith("gradients/")]

    for sent in on_instances(2, 4, program, variables_on_host=on_host):
        names = [name for name, _ in sent]
        assert len(set(names)) == len(names)
        small, *large = sorted(nbytes for _, nbytes in sent)
        assert [round(nbytes / KIB, 3) for nbytes in large] == [2.25, 2.25]  # b and c
        assert small < KIB
        gradients = 4 * (2 * WIDTH * WIDTH + INPUTS * WIDTH + WIDTH)
        assert gradients < sum(nbytes for _, nbytes in sent) < gradients + 256


def test_variables_on_the_host_stream_gradients_of_pytorch_over_a_network(on_instances):
    def program(strategy):
        return strategy.replicas.streams_gradients

    assert on_instances(2, 2, program) == [False, False]
    assert on_instances(2, 2, program, variables_on_host=True) == [True, True]
    assert not strategies.IPUStrategy(2).replicas.streams_gradients
