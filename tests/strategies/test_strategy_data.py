"""Data sets through a strategy: the elements of the replicas of each instance."""

import jax
import numpy as np
import pytest

import strategies
from strategies import InputContext, Masked

ROWS = np.arange(50, dtype=np.int32)


def read(strategy, **options):
    """Return the elements that each local replica reads in each step."""
    dataset = strategy.distribute_dataset({"x": ROWS}, batch_size=4, seed=5, **options)
    local = len(strategy.local_replicas)
    return [np.asarray(batch["x"]).reshape(local, 4).tolist() for batch in dataset.epoch(2)]


@pytest.mark.parametrize("instances", [2, 3, 6])
def test_replicas_read_the_same_rows_on_any_number_of_instances(on_instances, instances):
    alone = read(strategies.IPUStrategy(num_replicas=6))
    assert len(alone) == 50 // 24
    parts = on_instances(instances, 6, read)
    assert [sum((part[step] for part in parts), []) for step in range(len(alone))] == alone


def test_every_row_is_read_at_most_once_in_an_epoch(strategy):
    rows = np.ravel(read(strategy))
    assert len(set(rows)) == len(rows) == 48


def test_batches_lie_on_the_device_of_the_replicas(strategy):
    batch = next(iter(strategy.distribute_dataset(ROWS, batch_size=4, shuffle=False).epoch(0)))
    assert isinstance(batch, jax.Array)
    assert batch.device == strategy.replicas.devices.devices[0]
    assert [part.tolist() for part in strategy.replicas.devices.parts(batch)][1] == [4, 5, 6, 7]


def test_the_remainder_can_be_padded_and_masked(strategy):
    dataset = strategy.distribute_dataset(ROWS, batch_size=4, remainder="pad")
    batches = list(dataset.epoch(0))
    assert len(batches) == 4
    assert all(isinstance(batch, Masked) for batch in batches)


def test_a_batch_larger_than_the_data_is_refused(strategy):
    with pytest.raises(ValueError, match="50"):
        strategy.distribute_dataset(ROWS, batch_size=13)


class TestFromAFunction:
    """Data sets from a function: each instance calls it once with its own context."""

    @pytest.mark.parametrize("instances", [1, 2, 4])
    def test_every_instance_has_its_own_pipeline(self, on_instances, instances):
        found = on_instances(
            instances, 4, lambda s: list(s.distribute_datasets_from_function(lambda context: [context]))
        )
        assert found == [[InputContext(instances, index, 4)] for index in range(instances)]

    def test_the_batch_of_a_replica_follows_from_the_global_one(self):
        assert InputContext(2, 0, 8).get_per_replica_batch_size(64) == 8
        with pytest.raises(ValueError, match="60 is not divisible by 8 replicas; use 56 or 64"):
            InputContext(2, 0, 8).get_per_replica_batch_size(60)

    def test_a_data_set_from_a_function_can_be_trained_on(self, strategy):
        import jax.numpy as jnp
        import optax

        def make(context):
            rows = context.get_per_replica_batch_size(8) * context.num_replicas_in_sync // context.num_input_pipelines
            return [np.full(rows, step, np.float32) for step in range(3)]

        trainer = strategies.Trainer(strategy, lambda v, batch, key: v["w"] * batch.mean(), optax.sgd(1.0))
        state = trainer.init({"w": jnp.float32(0)})
        for batch in strategy.distribute_datasets_from_function(make):
            state, _ = trainer.step(state, batch)
        assert float(state.variables["w"]) == -3
