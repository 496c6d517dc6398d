"""Steps that stay on the device: the bits of steps through the host, without waiting for the device."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiers import also

import strategies
from collectives.arrays import aligned_empty
from strategies.defaults import Defaults
from strategies.errors import StrategyError
from strategies.jax.on_device.paths import JaxArithmetic
from strategies.jax.on_device.step import MOST_STEPS, StepQueue, scale_after
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


def loss_fn(variables, batch, key, kept=1.0):
    hidden = jax.nn.relu(batch["x"] @ variables["w"] + variables["b"]) * kept
    logits = jax.nn.relu(hidden @ variables["m"]) @ variables["v"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses.mean(), {"accuracy": (logits.argmax(-1) == batch["y"]).mean()}


def with_dropout(variables, batch, key):
    """Return the loss with dropout; other losses draw nothing, since programs that draw take long to compile."""
    return loss_fn(variables, batch, key, jax.random.bernoulli(key, 0.9, (HIDDEN,)))


def with_state(variables, batch, key, model_state):
    loss, metrics = loss_fn(variables, batch, key)
    mean = model_state["mean"] * 0.9 + batch["x"].mean(0) * 0.1
    seen, own = jnp.float32(batch["x"].shape[0]), model_state["own"] + batch["x"].sum()
    new = {"mean": mean, "seen": seen, "own": own, "first": model_state["first"] + 1}
    return strategies.Outcome(loss, metrics, model_state=new)


def weighted(variables, batch, key):
    """Return the loss with the number of rows of the first two classes as its weight, above the range of float16."""
    loss, metrics = loss_fn(variables, batch, key)
    return strategies.Outcome(loss, metrics, weight=1e5 * (batch["y"] < 2).sum())


STATE = {"mean": np.zeros(INPUTS, np.float32), "seen": np.float32(0), "own": np.float32(0), "first": np.int32(3)}
AGREED = {"mean": "mean", "seen": "sum", "own": "per_replica", "first": "first"}


def on(exchange, replicas):
    return strategies.IPUStrategy(num_replicas=replicas, defaults=Defaults(exchange=exchange))


def trained(exchange, replicas, optimizer=None, loss=loss_fn, model_state=None, **options):
    """Return fingerprints of everything after an epoch: pytest takes minutes to compare long bytes."""
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
    return state.step, [strategies.fingerprint(leaf) for leaf in leaves], [dict(metrics) for metrics in seen]


@pytest.mark.parametrize("replicas", [1, 4])
def test_a_step_has_the_bits_of_the_host_for_every_number_of_replicas(replicas):
    assert trained("compiled", replicas, CLIPPED, with_dropout) == trained("host", replicas, CLIPPED, with_dropout)


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
        {"loss": weighted, "loss_scaling": OVERFLOWING, "compute_dtype": "float16"},
        also({"loss": weighted, "replicated_optimizer_state_sharding": True, "min_elements_for_sharding": 1}),
        also({"loss": weighted, "gradient_transfer_dtype": "bfloat16", "gradient_accumulation_count": 2}),
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_a_step_has_the_bits_of_the_host_with_each_option(options):
    replicas = 2 if options else 3  # a mean of three is divided, and each replica compiles for a device
    assert trained("compiled", replicas, **options) == trained("host", replicas, **options)


def test_a_model_state_stays_if_a_gradient_is_not_finite():
    given = {"loss": with_state, "model_state": STATE, "model_state_aggregation": AGREED}
    scaled = {"loss_scaling": OVERFLOWING, "compute_dtype": "float16"}
    found = trained("compiled", 2, **given, **scaled)
    assert found == trained("host", 2, **given, **scaled)
    assert found[2][-1]["skipped_steps"] > 0


def test_each_replica_has_a_device_and_sums_begin_when_both_halves_are_ready(monkeypatch):
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
    assert made == pairs  # the division adds the last two


def test_a_step_reads_no_array_and_waits_for_none(monkeypatch):
    strategy = on("compiled", 4)
    trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1), loss_scaling=LossScaling(initial=8.0, interval=2))
    dataset = strategy.distribute_dataset(rows(), batch_size=2, seed=0)
    batches = dataset.epoch(0)
    state, _ = trainer.step(trainer.init(variables()), next(batches))

    def refuse(*arguments, **options):
        raise AssertionError("a value was read, or waited for")

    def ready(array):
        assert array.is_ready(), "an array was waited for"  # only failures are looked for
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


def test_batches_of_an_execution_can_share_memory():
    def written_again():
        memory = {name: np.empty_like(array[:8]) for name, array in rows().items()}
        for start in range(6):
            for name, array in rows().items():
                memory[name][:] = array[start : start + 8]
            yield memory

    def variables_after(batches):
        trainer = strategies.Trainer(on("auto", 1), loss_fn, optax.sgd(0.1))
        state, _ = trainer.run(trainer.init(variables()), batches, steps_per_execution=3)
        return strategies.fingerprint(state.variables)

    assert variables_after(written_again()) == variables_after(jax.tree.map(np.copy, each) for each in written_again())


class Unfinished:
    """A result that a device never computes."""

    def is_deleted(self):
        return False

    def is_ready(self):
        return False

    def block_until_ready(self):
        raise jax.errors.JaxRuntimeError("no such number")


def test_a_failure_on_the_device_names_its_step():
    queue = StepQueue()
    queue.add(6, jnp.zeros(()))
    for step in range(7, 6 + MOST_STEPS):
        queue.await_room()
        queue.add(step, Unfinished())
    queue.await_room()
    queue.add(6 + MOST_STEPS, Unfinished())
    words = f"step 7 has failed on the device, and step {6 + MOST_STEPS} was the last one begun: no such number"
    with pytest.raises(StrategyError, match=words):
        queue.await_room()
    queue.await_room()  # later steps have failed with it


class Interrupted(Unfinished):
    """A result for which the program waits when its user presses Ctrl-C."""

    def block_until_ready(self):
        raise KeyboardInterrupt


def test_an_interrupt_while_steps_are_queued_leaves_the_state():
    trainer = strategies.Trainer(on("compiled", 1), loss_fn, optax.sgd(0.1))
    batch = {name: array[:4] for name, array in rows().items()}
    state, _ = trainer.step(trainer.init(variables()), batch)
    for step in range(MOST_STEPS):
        trainer._engine._queue.add(step, Interrupted())
    with pytest.raises(KeyboardInterrupt):
        trainer.step(state, batch)
    trainer._engine._queue._steps.clear()
    state, metrics = trainer.step(state, batch)
    assert metrics["loss"] > 0
    assert state.step == 2


@pytest.mark.parametrize(("exchange", "replicas", "steps"), [("compiled", 1, 6), ("compiled", 2, 6), ("auto", 1, 40)])
def test_the_program_can_overwrite_a_batch_after_the_step(exchange, replicas, steps):
    def loss(variables, batch, key):
        hidden = batch["x"]
        for _ in range(4):
            hidden = jnp.tanh(hidden @ variables["w"])
        return (hidden**2).mean()

    def trained(clears):
        trainer = strategies.Trainer(on(exchange, replicas), loss, optax.sgd(0.1))
        state = trainer.init({"w": np.eye(HIDDEN, dtype=np.float32)})
        for step in range(steps):
            batch = {"x": aligned_empty(2048 * replicas * HIDDEN).view(np.float32).reshape(-1, HIDDEN)}
            batch["x"][...] = np.random.default_rng(step).standard_normal(HIDDEN)
            state, _ = trainer.step(state, batch)
            if clears:
                batch["x"][...] = 0
        return np.asarray(state.variables["w"]).tobytes()

    assert trained(clears=True) == trained(clears=False)


def test_device_memory_is_freed_with_the_trainer():
    strategy = on("compiled", 2)
    trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1))
    batch = {name: array[:8] for name, array in rows().items()}
    state, metrics = trainer.step(trainer.init(variables()), batch)
    programs = weakref.ref(trainer._programs)
    gc.disable()
    try:
        del trainer
        assert programs() is None
    finally:
        gc.enable()
    assert metrics["loss"] > 0


def test_a_forced_device_refuses_options_that_need_the_host():
    with pytest.raises(ValueError, match="replicas are pipelines"):
        trained("compiled", 2, pipeline=strategies.Pipelining([0, 0]), gradient_accumulation_count=2)


def test_a_forced_device_refuses_collectives_of_replicas():
    def loss(variables, batch, key):
        return strategies.get_replica_context().all_reduce("mean", loss_fn(variables, batch, key)[0])

    with pytest.raises(ValueError, match="collectives of replicas or feeds"):
        trained("compiled", 2, loss=loss)


@pytest.mark.parametrize("factor", [1.0, 1.7, 2.0, 3.0])
def test_the_loss_scale_moves_as_on_the_host(factor):
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
