"""A step that stays on the device has the bits of one whose gradients go through the host, and nobody waits for it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import strategies
from strategies.defaults import Defaults
from strategies.errors import StrategyError
from strategies.jax.on_device.arithmetic import JaxArithmetic
from strategies.jax.on_device.queue import MOST, StepQueue
from strategies.jax.on_device.scaling import scale_after
from strategies.loss_scaling import LossScaling

ROWS, INPUTS, HIDDEN, CLASSES = 96, 16, 512, 4
OVERFLOWING = LossScaling(initial=2.0**24, factor=3.0, interval=4)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9))


def variables():
    draw = np.random.default_rng(0)

    def normal(*shape):
        return (draw.standard_normal(shape) * 0.1).astype(np.float32)

    # One buffer for a leaf alone, and one that several leaves share.
    return {"w": normal(INPUTS, HIDDEN), "b": normal(HIDDEN), "m": normal(HIDDEN, HIDDEN), "v": normal(HIDDEN, CLASSES)}


def rows():
    draw = np.random.default_rng(1)
    x = draw.standard_normal((ROWS, INPUTS)).astype(np.float32)
    return {"x": x, "y": draw.integers(0, CLASSES, ROWS).astype(np.int32)}


def loss_fn(variables, batch, key):
    hidden = jax.nn.relu(batch["x"] @ variables["w"] + variables["b"])
    hidden = hidden * jax.random.bernoulli(key, 0.9, hidden.shape)
    logits = jax.nn.relu(hidden @ variables["m"]) @ variables["v"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses.mean(), {"accuracy": (logits.argmax(-1) == batch["y"]).mean()}


def with_state(variables, batch, key, model_state):
    loss, metrics = loss_fn(variables, batch, key)
    mean = model_state["mean"] * 0.9 + batch["x"].mean(0) * 0.1
    seen, own = jnp.float32(batch["x"].shape[0]), model_state["own"] + batch["x"].sum()
    new = {"mean": mean, "seen": seen, "own": own, "first": model_state["first"] + 1}
    return strategies.Outcome(loss, metrics, model_state=new)


STATE = {"mean": np.zeros(INPUTS, np.float32), "seen": np.float32(0), "own": np.float32(0), "first": np.int32(3)}
AGREED = {"mean": "mean", "seen": "sum", "own": "per_replica", "first": "first"}


def on(exchange, replicas):
    return strategies.IPUStrategy(num_replicas=replicas, defaults=Defaults(exchange=exchange))


def trained(exchange, replicas, optimizer=None, loss=loss_fn, model_state=None, **options):
    """The bits of everything after an epoch."""
    strategy = on(exchange, replicas)
    trainer = strategies.Trainer(strategy, loss, optimizer or optax.adamw(1e-2), **options)
    count = options.get("gradient_accumulation_count", 1)
    dataset = strategy.distribute_dataset(rows(), batch_size=4, seed=0, gradient_accumulation_count=count)
    state = trainer.init(variables(), model_state)
    seen = []
    for batch in dataset.epoch(0):
        state, metrics = trainer.step(state, batch)
        seen.append(metrics)
    leaves = jax.tree.leaves((state.variables, state.optimizer_state, state.loss_scale, state.model_state))
    return state.step, [np.asarray(leaf).tobytes() for leaf in leaves], [dict(metrics) for metrics in seen]


@pytest.mark.parametrize("replicas", [1, 4])
def test_it_has_the_bits_of_the_host_for_every_number_of_replicas(replicas):
    assert trained("compiled", replicas, CLIPPED) == trained("host", replicas, CLIPPED)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_scaling": OVERFLOWING, "compute_dtype": "float16"},
        {"gradient_transfer_dtype": "bfloat16"},
        {"gradient_transfer_dtype": "float16", "gradient_accumulation_count": 2},
        {"replicated_optimizer_state_sharding": True, "min_elements_for_sharding": 1},
        {"replicated_optimizer_state_sharding": True, "loss_scaling": OVERFLOWING, "compute_dtype": "float16"},
        {"check_numerics": True},
        {"trainable": lambda name, variable: "b" not in name},
        {"loss": with_state, "model_state": STATE, "model_state_aggregation": AGREED},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_it_has_the_bits_of_the_host_with(options):
    assert trained("compiled", 3, **options) == trained("host", 3, **options)


def test_a_model_state_stays_where_a_gradient_is_not_finite():
    given = {"loss": with_state, "model_state": STATE, "model_state_aggregation": AGREED}
    scaled = {"loss_scaling": OVERFLOWING, "compute_dtype": "float16"}
    found = trained("compiled", 2, **given, **scaled)
    assert found == trained("host", 2, **given, **scaled)
    assert found[2][-1]["skipped_steps"] > 0


def test_each_replica_has_a_device_and_the_sums_are_made_as_soon_as_both_halves_are_there(monkeypatch):
    made = []
    totals = JaxArithmetic.totals

    def seen(self, nodes, sums):
        made.append(tuple(map(tuple, nodes)))
        return totals(self, nodes, sums)

    monkeypatch.setattr(JaxArithmetic, "totals", seen)
    strategy = on("compiled", 8)
    assert len(set(strategy.replicas.devices.devices)) == 8
    trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1))
    dataset = strategy.distribute_dataset(rows(), batch_size=4, seed=0)
    trainer.step(trainer.init(variables()), next(iter(dataset.epoch(0))))
    pairs = [((0, 1), (1, 2)), ((2, 3), (3, 4)), ((0, 2), (2, 4)), ((4, 5), (5, 6)), ((6, 7), (7, 8)), ((4, 6), (6, 8))]
    assert made == pairs  # the last two are added where they are divided


def test_nobody_reads_an_array_or_waits_for_one(monkeypatch):
    strategy = on("compiled", 4)
    trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1), loss_scaling=LossScaling(initial=8.0, interval=2))
    dataset = strategy.distribute_dataset(rows(), batch_size=2, seed=0)
    batches = dataset.epoch(0)
    state, _ = trainer.step(trainer.init(variables()), next(batches))

    def refuse(*arguments, **options):
        raise AssertionError("a value was read, or waited for")

    def ready(array):
        assert array.is_ready(), "an array was waited for"  # only a failure is looked for
        return array

    kind = type(state.variables["w"])
    with monkeypatch.context() as reading:
        for name in ("__array__", "__float__", "__int__", "__bool__", "tolist", "item"):
            reading.setattr(kind, name, refuse)
        reading.setattr(kind, "block_until_ready", ready)
        reading.setattr(jax, "block_until_ready", refuse)
        for _ in range(5):
            state, metrics = trainer.step(state, next(batches))
    assert metrics["loss"] > 0
    assert metrics["loss_scale"] == 64


class Unfinished:
    """A result that a device never computes."""

    def is_deleted(self):
        return False

    def is_ready(self):
        return False

    def block_until_ready(self):
        raise jax.errors.JaxRuntimeError("no such number")


def test_a_failure_on_the_device_is_told_with_its_step():
    queue = StepQueue()
    queue.add(6, jnp.zeros(()))
    for step in range(7, 7 + MOST):
        queue.add(step, Unfinished())
    words = f"step 7 has failed on the device, and step {7 + MOST} was begun meanwhile: no such number"
    with pytest.raises(StrategyError, match=words):
        queue.add(7 + MOST, Unfinished())
    queue.add(20, jnp.zeros(()))  # those behind it have failed with it


@pytest.mark.parametrize(("options", "reason"), [({"gradient_transfer_dtype": "int8"}, "gradients travel as int8")])
def test_a_forced_device_refuses_what_needs_the_host(options, reason):
    with pytest.raises(ValueError, match=reason):
        trained("compiled", 2, **options)


def test_a_forced_device_refuses_collectives_of_replicas():
    def loss(variables, batch, key):
        return strategies.get_replica_context().all_reduce("mean", loss_fn(variables, batch, key)[0])

    with pytest.raises(ValueError, match="collectives of replicas or feeds"):
        trained("compiled", 2, loss=loss)


@pytest.mark.parametrize("factor", [1.0, 1.7, 2.0, 3.0])
def test_the_scale_of_losses_moves_as_on_the_host(factor):
    scaling = LossScaling(initial=1000.0, factor=factor, interval=3)
    on_host = on_device = scaling.start()
    for is_finite in (np.random.default_rng(0).random(40) < 0.8).tolist():
        on_host = scaling.after(on_host, is_finite)
        on_device = scale_after(scaling, on_device, jnp.asarray(is_finite))
        found = [np.asarray(getattr(on_device, name)) for name in ("scale", "good_steps", "skipped")]
        assert [(one.dtype, one.item()) for one in found] == [
            (np.float32, on_host.scale),
            (np.int32, on_host.good_steps),
            (np.int32, on_host.skipped),
        ]
