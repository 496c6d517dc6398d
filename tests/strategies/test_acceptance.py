"""Acceptance tests of the original's single-process strategy, translated."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import strategies
from strategies import InfeedMode, InfeedQueue, InputContext, OutfeedQueue, get_replica_context, loops


def test_six_elements_of_ones_sum_to_six(strategy):
    dataset = strategies.IPUStrategy().distribute_dataset(np.ones(6, np.float32), batch_size=1)
    total = sum(float(strategies.IPUStrategy().run(jnp.sum, args=(batch,))[0]) for batch in dataset.epoch(0))
    assert total == 6.0


def test_a_data_set_is_iterated_inside_and_outside_a_scope(strategy):
    """Batches are arguments of programs, so Python may take them anywhere."""
    stock = [np.float32(1), np.float32(2)]
    dataset = strategy.distribute_dataset(np.arange(8, dtype=np.float32), batch_size=1, shuffle=False)
    outside = np.asarray(next(iter(dataset.epoch(0))))
    with strategy.scope():
        assert type(iter(stock)) is type(iter([]))
        np.testing.assert_array_equal(next(iter(dataset.epoch(0))), outside)
        assert float(InfeedQueue(stock).dequeue()) == 1


def test_one_process_reads_a_data_set_from_a_function_unchanged():
    """The only pipeline has number 0."""
    seen = []

    def make(context):
        seen.append(context)
        return [1, 2, 3, 4]

    assert strategies.IPUStrategy().distribute_datasets_from_function(make) == [1, 2, 3, 4]
    assert seen == [InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=1)]


def test_results_can_be_cast_to_int32(strategy):
    """The values are [1.0, 2.0]."""
    for result in strategy.run(lambda x: x.astype(jnp.int32), args=(np.array([1, 2], np.float32),)):
        assert result.dtype == np.int32
        assert list(result) == [1, 2]


@pytest.mark.parametrize(("op", "wanted"), [("SUM", 1.0), ("MEAN", 0.5)])
def test_replica_indices_are_reduced(op, wanted):
    """The strategy has two replicas."""

    def fn():
        context = get_replica_context()
        return context.all_reduce(op, context.replica_id_in_sync_group.astype(jnp.float32))

    assert list(strategies.IPUStrategy(2).run(fn)) == [wanted, wanted]


def test_squares_are_summed_over_two_instances(on_instances):
    """The values are x = i + 1 on two instances."""

    def program(strategy):
        x = strategy.per_replica(lambda r: float(r + 1))
        return float(strategy.reduce("sum", strategy.run(lambda x: x * x, args=(x,))))

    assert on_instances(2, 2, program) == [5.0, 5.0]


def test_losses_are_averaged_after_or_before_the_outfeed(on_instances):
    """Losses averaged on the host, on the devices, and by one replica with all rows agree to four places."""
    batches = np.random.default_rng(1).standard_normal((12, 5, 3)).astype(np.float32)  # 3 iterations of 4 replicas

    def measured(rows):
        error = rows @ np.float32([1, -2, 3]) - 1
        return {"loss": jnp.mean(error**2), "near": jnp.mean(jnp.abs(error) < 1, dtype=jnp.float32)}

    def program(strategy):
        infeed, single, reduced = InfeedQueue(batches, mode=InfeedMode.WHOLE), OutfeedQueue(), OutfeedQueue()

        def body(rows):
            found = measured(rows)
            single.enqueue(found)
            reduced.enqueue(get_replica_context().all_reduce("mean", found))

        strategy.run(lambda: loops.repeat(3, body, infeed=infeed))
        found = single.dequeue()
        of_replicas = [jax.tree.map(lambda leaf, place=place: leaf[:, place], found) for place in range(2)]
        on_host = strategy.reduce("mean", strategies.PerReplica(of_replicas), axis=0)
        on_devices = jax.tree.map(lambda leaf: leaf.mean(axis=0)[0], reduced.dequeue())
        return on_host, on_devices

    whole = measured(batches.reshape(60, 3))
    for on_host, on_devices in on_instances(2, 4, program):
        for name, wanted in whole.items():
            np.testing.assert_allclose([on_host[name], on_devices[name]], wanted, rtol=0, atol=5e-5)


@pytest.mark.parametrize(("replicas", "instances"), [(1, 1), (2, 1), (4, 1), (4, 2), (8, 4)])
def test_a_step_of_gradient_descent_gives_the_weight_of_the_original(on_instances, replicas, instances):
    """w = 1 and 16 points of [0, 1] in one global batch give w = 0.311111 after a step."""

    def program(strategy):
        def loss_fn(variables, batch, key):
            return jnp.mean((batch * variables["w"]) ** 2)

        trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(1.0))
        points = np.linspace(0, 1, 16, dtype=np.float32)
        dataset = strategy.distribute_dataset(points, batch_size=16 // replicas)
        state = trainer.init({"w": jnp.float32(1)})
        for batch in dataset.epoch(0):
            state, _ = trainer.step(state, batch)
        return float(state.variables["w"])

    np.testing.assert_allclose(on_instances(instances, replicas, program), 0.311111, atol=1e-6)


def test_accumulating_the_loss_of_four_parts_gives_the_same_step(strategy):
    """One replica runs four micro-batches in a scan."""

    def loss_fn(variables, batch, key):
        parts = batch.reshape(4, 4)
        return jax.lax.scan(lambda c, x: (c + jnp.mean((x * variables["w"]) ** 2) / 4, None), 0.0, parts)[0]

    trainer = strategies.Trainer(strategies.IPUStrategy(1), loss_fn, optax.sgd(1.0))
    state, _ = trainer.step(trainer.init({"w": jnp.float32(1)}), np.linspace(0, 1, 16, dtype=np.float32))
    assert float(state.variables["w"]) == pytest.approx(0.311111, abs=1e-6)
