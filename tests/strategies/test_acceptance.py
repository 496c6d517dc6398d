"""Acceptance rows of the original's single-process strategy, translated."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import strategies
from strategies import InputContext, get_replica_context


def test_s17_the_sum_of_six_elements(strategy):
    """S-17: a data set of ones; six elements add up to 6.0."""
    dataset = strategies.IPUStrategy().distribute_dataset(np.ones(6, np.float32), batch_size=1)
    total = sum(float(strategies.IPUStrategy().run(jnp.sum, args=(batch,))[0]) for batch in dataset.epoch(0))
    assert total == 6.0


def test_s19_datasets_from_a_function():
    """S-19: one pipeline, number 0, and the data set comes back untouched."""
    seen = []

    def make(context):
        seen.append(context)
        return [1, 2, 3, 4]

    assert strategies.IPUStrategy().distribute_datasets_from_function(make) == [1, 2, 3, 4]
    assert seen == [InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=1)]


def test_s20_an_int32_result(strategy):
    """S-20: [1.0, 2.0] as int32."""
    for result in strategy.run(lambda x: x.astype(jnp.int32), args=(np.array([1, 2], np.float32),)):
        assert result.dtype == np.int32
        assert list(result) == [1, 2]


@pytest.mark.parametrize(("op", "wanted"), [("SUM", 1.0), ("MEAN", 0.5)])
def test_s21_the_reduced_replica_index(op, wanted):
    """S-21: two replicas reduce their index."""

    def fn():
        context = get_replica_context()
        return context.all_reduce(op, context.replica_id_in_sync_group.astype(jnp.float32))

    assert list(strategies.IPUStrategy(2).run(fn)) == [wanted, wanted]


def test_p07_a_sum_of_squares(on_instances):
    """P-07, M-06: x = i + 1 squared and summed over two instances."""

    def program(strategy):
        x = strategy.per_replica(lambda r: float(r + 1))
        return float(strategy.reduce("sum", strategy.run(lambda x: x * x, args=(x,))))

    assert on_instances(2, 2, program) == [5.0, 5.0]


@pytest.mark.parametrize(("replicas", "instances"), [(1, 1), (2, 1), (4, 1), (4, 2), (8, 4)])
def test_p32_to_p34_a_step_of_gradient_descent(on_instances, replicas, instances):
    """P-32, P-34: w = 1, all of 16 points of [0, 1] in one global batch; w = 0.311111 after a step."""

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


def test_p33_accumulating_the_loss_of_four_parts_is_the_same(strategy):
    """P-33: one replica that runs four micro-batches in a scan."""

    def loss_fn(variables, batch, key):
        parts = batch.reshape(4, 4)
        return jax.lax.scan(lambda c, x: (c + jnp.mean((x * variables["w"]) ** 2) / 4, None), 0.0, parts)[0]

    trainer = strategies.Trainer(strategies.IPUStrategy(1), loss_fn, optax.sgd(1.0))
    state, _ = trainer.step(trainer.init({"w": jnp.float32(1)}), np.linspace(0, 1, 16, dtype=np.float32))
    assert float(state.variables["w"]) == pytest.approx(0.311111, abs=1e-6)
