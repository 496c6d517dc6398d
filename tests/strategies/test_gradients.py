"""Streaming of gradients during the backward pass: the program is cut as they finish, with the same bits."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from connected import ConnectedStrategy
from tiers import also

import strategies
from strategies import get_replica_context

WIDTH = 24  # a square matrix of float32 has 2.25 KiB, enough for two pieces
INPUTS = 2
BATCH = 6
KIB = 1 << 10
LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def _a_kib_is_large(monkeypatch):
    """Lower the limit of large gradients to a KiB, so that small models are cut too."""
    in_programs = "strategies.jax.gradients.gradient_programs"
    for name in (f"{in_programs}.LARGE_BYTES", f"{in_programs}.BUCKET_BYTES", "strategies.exchange.flat.LARGE_BYTES"):
        monkeypatch.setattr(name, KIB)


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


MODELS = {model.__name__: model for model in (mlp, nested, half)}


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
    [
        ("mlp", 2),
        ("nested", 2),  # in parts its gradients would be the same, and its loss would not
        *(also(*case) for case in [("mlp", 4), ("nested", 4), ("half", 2)]),
    ],
)
def test_streamed_gradients_have_the_same_bits(on_instances, model, instances):
    alone = trained_alone(model)
    streamed = on_instances(instances, 4, lambda strategy: train(strategy, model), variables_on_host=True)
    assert streamed == [alone] * instances
    assert alone[2] == 3


@pytest.mark.complete
def test_streamed_gradients_of_sharded_updates_have_the_same_bits(on_instances):
    """Gradients in pieces are reduced whole; other gradients go to the owners of the parts."""
    alone = trained_alone("mlp")
    streamed = on_instances(
        2, 4, lambda each: train(each, "mlp", replicated_optimizer_state_sharding=True), variables_on_host=True
    )
    assert streamed == [alone] * 2


def test_gradients_are_checked_while_they_are_streamed(on_instances):
    alone = trained_alone("mlp")
    streamed = on_instances(2, 4, lambda strategy: train(strategy, "mlp", check_numerics=True), variables_on_host=True)
    assert streamed == [alone] * 2


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


def test_each_gradient_byte_is_sent_once_and_large_gradients_in_pieces(on_instances):
    def program(strategy):
        sent = []
        recorder = Recorder(strategy.communicator, lambda name, nbytes: sent.append((name, nbytes)))
        strategy = ConnectedStrategy(strategy.instance, recorder, variables_on_host=True)
        train(strategy, "mlp", steps=1)
        return [entry for entry in sent if entry[0].startswith("gradients/")]

    for sent in on_instances(2, 4, program, variables_on_host=True):
        names = [name for name, _ in sent]
        assert len(set(names)) == len(names)
        small, *large = sorted(nbytes for _, nbytes in sent)
        assert [round(nbytes / KIB, 3) for nbytes in large] == [1.125, 1.125, 2.25]  # b in two pieces, c whole
        assert small < KIB
        gradients = 4 * (2 * WIDTH * WIDTH + INPUTS * WIDTH + WIDTH)
        assert gradients < sum(nbytes for _, nbytes in sent) < gradients + 256


def test_the_first_gradients_leave_before_the_last_are_computed(on_instances):
    """An instance computes the last gradients only after the first ones have left."""

    def program(strategy):
        may_go_on, waited = threading.Event(), []
        may_go_on.set()

        def wait():
            waited.append(may_go_on.wait(LIMIT_S))
            return np.float32(0)

        @jax.custom_vjp
        def late(x):
            return x

        zero = jax.ShapeDtypeStruct((), np.float32)
        late.defvjp(lambda x: (x, None), lambda _, gradient: (gradient + jax.pure_callback(wait, zero),))
        start, _ = mlp()

        def loss_fn(variables, batch, key):
            hidden = jax.nn.relu(late(batch @ variables["a"] + variables["bias"]))
            hidden = jnp.tanh(hidden @ variables["b"])
            return jnp.mean((hidden @ variables["c"]) ** 2)

        def note(name, nbytes):
            if name.startswith("gradients/0/"):
                may_go_on.set()

        recorder = Recorder(strategy.communicator, note)
        strategy = ConnectedStrategy(strategy.instance, recorder, variables_on_host=True)
        trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1))
        state = trainer.init(start)
        for _ in range(3):
            state, _ = trainer.step(state, np.ones((2 * BATCH, INPUTS), np.float32))
            may_go_on.clear()  # except in the first step, which compares programs
        (step,) = trainer._programs._steps.values()
        return len(step.gradients.buckets), waited

    for buckets, waited in on_instances(2, 4, program, variables_on_host=True):
        assert buckets == 3
        assert len(waited) >= 2 * 3
        assert all(waited)


def test_a_loss_with_its_own_collectives_is_not_cut(on_instances):
    """Its callbacks would wait behind the segments that wait for them."""

    def program(strategy):
        found = []
        for start, loss_fn in (normalised(), mlp()):
            trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1))
            step = trainer._programs.prepare(trainer.init(start), np.ones((2 * BATCH, INPUTS), np.float32))
            found.append(len(step.gradients.buckets))
        return found

    assert on_instances(2, 4, program, variables_on_host=True) == [[1, 3]] * 2


def test_without_host_variables_all_gradients_leave_at_the_end(on_instances):
    def program(strategy):
        return strategy.replicas.streams_gradients

    assert on_instances(2, 2, program) == [False, False]
    assert on_instances(2, 2, program, variables_on_host=True) == [True, True]
    assert not strategies.IPUStrategy(2).replicas.streams_gradients


def test_a_model_whose_bits_would_change_is_not_streamed(on_instances, monkeypatch):
    """The bits would change on one instance only; all instances decide together."""
    from strategies.jax.gradients import gradient_programs

    honest = gradient_programs.GradientPrograms.leaves
    found_by = []

    def leaves(programs):
        values = honest(programs)
        if len(programs.buckets) > 1 and not found_by:
            found_by.append(programs)
            values[0][0] = np.nextafter(values[0][0], 2, dtype=np.float32)
        return values

    monkeypatch.setattr(gradient_programs.GradientPrograms, "leaves", leaves)

    def program(strategy):
        start, loss_fn = mlp()
        trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1))
        step = trainer._programs.prepare(trainer.init(start), np.ones((2 * BATCH, INPUTS), np.float32))
        return len(step.gradients.buckets)

    assert on_instances(2, 4, program, variables_on_host=True) == [1, 1]
