"""Trainer.run: many steps, with the bits of single ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiers import also

import strategies
from strategies import Trainer
from strategies.jax.fused_steps import FusedSteps

RNG = np.random.default_rng(11)
POINTS = RNG.standard_normal((96, 3)).astype(np.float32)
TARGETS = RNG.standard_normal(96).astype(np.float32)


def loss_fn(variables, batch, key):
    error = batch["x"] @ variables["w"] - batch["y"]
    return jnp.mean(error**2), {"rows": error.size}


def dataset_of(strategy):
    return strategy.distribute_dataset({"x": POINTS, "y": TARGETS}, 12 // strategy.num_replicas_in_sync, seed=1)


def run(strategy, steps_per_execution, loss_fn=loss_fn, optimizer=None, **options):
    trainer = Trainer(strategy, loss_fn, optimizer or optax.sgd(0.05, momentum=0.9), **options)
    state = trainer.init({"w": np.zeros(3, np.float32)})
    dataset, told = dataset_of(strategy), []
    for _ in range(2):
        state, metrics = trainer.run(
            state, dataset, steps_per_execution, lambda state, metrics: told.append((state.step, metrics["loss"]))
        )
    return strategies.fingerprint(state), metrics["loss"], told


@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        also(1, {}),
        (2, {}),
        also(1, {"gradient_accumulation_count": 2, "offload_optimizer_state": True}),
    ],
    ids=str,
)
def test_executions_of_any_length_have_the_bits_of_single_steps(replicas, options):
    strategy = strategies.IPUStrategy(replicas)
    wanted, loss, told = run(strategy, 1, **options)
    assert [step for step, _ in told] == list(range(1, 17))
    for length in (3, 50):
        found = run(strategy, length, **options)
        assert found[:2] == (wanted, loss)
        ends = {3: [3, 6, 8, 11, 14, 16], 50: [8, 16]}[length]
        assert found[2] == [told[step - 1] for step in ends]


def test_instances_meet_in_every_step(on_instances):
    wanted = run(strategies.IPUStrategy(4), 1)
    assert on_instances(2, 4, lambda strategy: run(strategy, 4)[:2]) == [wanted[:2]] * 2


def test_one_replica_makes_its_steps_in_one_program(monkeypatch):
    """Every execution is one call; the first one also runs each program for the comparison."""
    strategy = strategies.IPUStrategy(1)
    trainer = Trainer(strategy, loss_fn, optax.sgd(0.1))
    call, lengths = FusedSteps.__call__, []

    def called(self, state, batches):
        lengths.append(len(batches))
        return call(self, state, batches)

    monkeypatch.setattr(FusedSteps, "__call__", called)
    state = trainer.init({"w": np.zeros(3, np.float32)})
    batches = [batch for epoch in range(4) for batch in dataset_of(strategy).epoch(epoch)]
    state, metrics = trainer.run(state, batches, 8)
    assert lengths == [8, *[1] * 8] * 2 + [8] * 4
    assert state.step == 32
    assert set(metrics) == {"loss", "rows"}


def test_steps_whose_bits_would_change_in_one_program_run_one_by_one():
    """XLA computes a convolution's gradient differently in a loop; with or without that, the bits are equal."""
    images = RNG.standard_normal((32, 28, 28, 1)).astype(np.float32)
    first = {"kernel": RNG.standard_normal((3, 3, 1, 8)).astype(np.float32)}

    def loss(variables, batch, key):
        convolved = jax.lax.conv_general_dilated(
            batch, variables["kernel"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.mean(jax.nn.relu(convolved) ** 2)

    def end(length, optimizer):
        trainer = Trainer(strategies.IPUStrategy(1), loss, optimizer)
        return strategies.fingerprint(trainer.run(trainer.init(first), [images] * 8, length)[0])

    warming_up = optax.sgd(lambda count: jnp.where(count < 2, 0.0, 0.1))  # nothing changes in the first execution
    for optimizer in (optax.adam(0.01), warming_up):
        assert end(2, optimizer) == end(1, optimizer)


def test_metrics_do_not_wait_for_the_device():
    """Metrics of an execution in one program are an array that may still be computed."""
    trainer = Trainer(strategies.IPUStrategy(1), loss_fn, optax.sgd(0.1))
    batches = list(dataset_of(trainer.strategy).epoch(0)) * 2
    _, metrics = trainer.run(trainer.init({"w": np.zeros(3, np.float32)}), batches, 8)
    assert isinstance(metrics.means, jax.Array)


def test_run_needs_a_batch(strategy):
    trainer = Trainer(strategy, loss_fn, optax.sgd(0.1))
    state = trainer.init({"w": np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match="no batch"):
        trainer.run(state, [])
    with pytest.raises(ValueError, match="steps_per_execution is 0"):
        trainer.run(state, [{}], 0)


def test_a_batch_of_another_shape_is_explained_once(strategy, caplog):
    trainer = Trainer(strategy, loss_fn, optax.sgd(0.1))
    state = trainer.init({"w": np.zeros(3, np.float32)})
    with caplog.at_level("INFO", "strategies.jax"):
        for rows in (8, 8, 4, 8, 4):
            state, _ = trainer.step(state, {"x": POINTS[:rows], "y": TARGETS[:rows]})
    [message] = [record.message for record in caplog.records if "compiled again" in record.message]
    assert "['x'] was float32[8, 3] and is float32[4, 3]" in message


@pytest.mark.parametrize("options", [{}, {"replicated_optimizer_state_sharding": True}], ids=str)
@pytest.mark.parametrize("instances", [1, 2])
def test_nothing_is_compiled_after_the_first_step(on_instances, caplog, instances, options):
    def end(strategy):
        trainer = Trainer(strategy, loss_fn, optax.adam(0.1), **options)
        batches = list(dataset_of(strategy).epoch(0))
        state, _ = trainer.step(trainer.init({"w": np.zeros((3,), np.float32)}), batches[0])
        strategy.communicator.barrier()
        with jax.log_compiles():
            for batch in batches[1:]:
                state, _ = trainer.step(state, batch)
        return state.step

    with caplog.at_level("WARNING", "jax"):
        assert on_instances(instances, 4, end) == [8] * instances
    assert [record.message for record in caplog.records if record.message.startswith("Compiling")] == []


def test_a_loss_function_enqueues_each_value_once(strategy):
    """Feeds call Python, so steps with feeds run one by one without a comparison."""

    def outfed(length, **options):
        queue = strategies.OutfeedQueue()

        def loss(variables, batch, key):
            queue.enqueue(variables["w"].sum())
            return loss_fn(variables, batch, key)

        trainer = Trainer(strategies.IPUStrategy(1), loss, optax.sgd(0.1), **options)
        trainer.run(trainer.init({"w": np.zeros(3, np.float32)}), list(dataset_of(trainer.strategy).epoch(0)), length)
        return np.asarray(queue.dequeue()).shape

    assert outfed(1) == outfed(2) == (8,)
    assert outfed(1, gradient_accumulation_count=2) == (16,)


def test_run_continues_in_the_middle_of_an_epoch(strategy):
    trainer, dataset = Trainer(strategy, loss_fn, optax.sgd(0.1)), dataset_of(strategy)
    state = trainer.init({"w": np.zeros(3, np.float32)})
    for batch in dataset.epoch(0):
        state, _ = trainer.step(state, batch)
        if state.step == 3:
            break
    assert trainer.run(state, dataset)[0].step == 8


def test_checkpoints_due_inside_an_execution_are_saved_after_it(tmp_path, strategy):
    """A checkpoint is due every 3 steps, and `after_step` is called after every 4."""
    trainer = Trainer(strategy, loss_fn, optax.sgd(0.1))
    with strategies.Checkpoints(tmp_path, trainer, every=3, keep=9) as checkpoints:
        state = checkpoints.restore(trainer.init({"w": np.zeros(3, np.float32)}))

        def after(state, metrics):
            checkpoints.after_step(state)
            checkpoints.wait()

        trainer.run(state, [batch for epoch in (0, 1) for batch in dataset_of(strategy).epoch(epoch)], 4, after)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_{step:08d}" for step in (4, 8, 12, 16)]


def test_a_batch_can_be_empty(strategy):
    trainer = Trainer(strategy, lambda variables, batch, key: jnp.sum(variables["w"] ** 2), optax.sgd(0.1))
    assert trainer.step(trainer.init({"w": np.ones(3, np.float32)}), {})[1]["loss"] == 3
