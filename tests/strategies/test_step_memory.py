"""Memory traffic of a step: gradients are views of XLA's memory, and the update reads the sums in place."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from connected import ConnectedStrategy

import strategies


class Recorded:
    """A communicator that records the calls of the step and passes them to a wrapped one."""

    def __init__(self, communicator):
        self._communicator = communicator
        self.reductions = []
        self.allocated = []

    def __getattr__(self, name):
        return getattr(self._communicator, name)

    def ordered_all_reduce(self, contributions, out=None, op="sum", *, name=""):
        self.reductions.append((name, contributions, out))
        return self._communicator.ordered_all_reduce(contributions, out, op, name=name)

    def grouped_ordered_all_reduce(self, contributions, outs, op="sum", *, names):
        self.reductions += zip(names, contributions, outs, strict=True)
        return self._communicator.grouped_ordered_all_reduce(contributions, outs, op, names=names)

    def allocate(self, shape, dtype):
        self.allocated.append(self._communicator.allocate(shape, dtype))
        return self.allocated[-1]


def start():
    return {"w": jnp.ones((200, 30)), "h": jnp.ones(64, jnp.bfloat16), "b": jnp.zeros(7)}


def loss_fn(variables, batch, key):
    total = sum(jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in jax.tree.leaves(variables))
    return total * batch.mean(), {"mean": batch.mean()}


@pytest.fixture
def recorded(strategy):
    recorder = Recorded(strategy.communicator)
    return ConnectedStrategy(strategy.instance, recorder), recorder


def steps(strategy, number, variables=None):
    trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.01))
    state = trainer.init(start() if variables is None else variables)
    for _ in range(number):
        state, _ = trainer.step(state, np.ones(4, np.float32))
    return jax.block_until_ready(state)


def test_one_reduction_per_dtype_and_step(recorded):
    strategy, recorder = recorded
    steps(strategy, 3)
    assert [name for name, _, _ in recorder.reductions] == ["gradients/float32", "gradients/bfloat16"] * 3


def test_no_other_collective_runs_after_compilation(strategy):
    trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.01))
    state, _ = trainer.step(trainer.init({"w": jnp.ones(10)}), np.ones(4, np.float32))
    before = strategy.communicator.calls_made
    for _ in range(5):
        state, metrics = trainer.step(state, np.ones(4, np.float32))
    assert dict(metrics)
    assert strategy.communicator.calls_made == before + 5


def test_every_replica_contributes_a_view_of_xla_memory(recorded):
    strategy, recorder = recorded
    steps(strategy, 1)
    for _, contributions, _ in recorder.reductions:
        assert len(contributions) == 4
        for array in contributions:
            assert not array.flags.owndata
            assert not array.flags.writeable
        assert len({array.ctypes.data for array in contributions}) == 4


def test_replicas_read_their_rows_of_a_batch_in_place(strategy):
    batch = strategy.replicas.devices.place(np.arange(4096, dtype=np.float32))
    parts = strategy.replicas.devices.parts(batch)
    assert [part.ctypes.data - batch.unsafe_buffer_pointer() for part in parts] == [0, 4096, 8192, 12288]
    np.testing.assert_array_equal(np.concatenate(parts), np.arange(4096))


def test_all_replicas_read_the_same_variables(strategy):
    given = strategy.broadcast({"w": np.ones(4096, np.float32)})
    assert all(shared is given for shared in strategy.replicas.devices.share(given))
    assert len(strategy.replicas.devices.share(given)) == 4


def test_the_sums_are_written_into_the_same_memory_in_every_step(recorded):
    strategy, recorder = recorded
    steps(strategy, 4)
    places = [out.ctypes.data for _, _, out in recorder.reductions]
    assert places == [buffer.ctypes.data for buffer in recorder.allocated] * 4


def test_the_update_reads_the_sums_in_place(recorded):
    """The sums are aligned for XLA, which then makes no copy of a host array."""
    strategy, recorder = recorded
    steps(strategy, 1)
    for buffer in recorder.allocated:
        assert buffer.ctypes.data % 64 == 0
        on_device = jax.device_put(buffer, jax.local_devices()[0])
        assert on_device.unsafe_buffer_pointer() == buffer.ctypes.data


@pytest.mark.complete
def test_memory_does_not_grow_with_the_steps(strategy):
    trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.01, momentum=0.9))
    state = trainer.init(start())
    others = jax.live_arrays()  # held, so that no array of another test is freed between two counts
    counts = []
    for _ in range(4):
        for _ in range(3):
            state, _ = trainer.step(state, np.ones(4, np.float32))
        jax.block_until_ready(state)
        gc.collect()
        counts.append(len(jax.live_arrays()))
    del others
    assert counts[1:] == counts[1:2] * 3
