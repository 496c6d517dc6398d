"""The steps after the first: what they look up, count by count, and the memory that they read in place."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from profiling import call_profiled

import strategies
from strategies.exchange.flat import private_memory
from strategies.jax.gradients.gradient_programs import HostViews
from strategies.jax.updates.update import in_place

PACKAGE = str(Path(strategies.__file__).parent)
MOST_CALLS = 150
"""The most calls of functions of `strategies` in a prepared step; 131 were counted with two replicas in an instance."""


def loss_fn(variables, batch, key):
    return sum(jnp.mean(batch["x"] @ each) for each in variables.values())


def prepared(strategy, count=1, optimizer=None):
    """Return a function that makes a step, of a kind that was made before, with `count` variables."""
    trainer = strategies.Trainer(strategy, loss_fn, optimizer or optax.sgd(0.1))
    dataset = strategy.distribute_dataset({"x": np.ones((24, 3), np.float32)}, batch_size=2)
    state = trainer.init({f"w{number}": np.ones((3, 2), np.float32) for number in range(count)})
    batches = list(dataset.epoch(0))

    def step():
        nonlocal state
        state, metrics = trainer.step(state, batches[0])
        return state, metrics

    for _ in range(3):
        step()
    return step


def calls_of(function):
    """Return the number of calls of Python functions of `strategies`, generators' resumptions included."""
    count = 0

    def see(frame, event, _):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    call_profiled(function, see)
    return count


def counted(strategy, count):
    return calls_of(prepared(strategy, count))


@pytest.mark.parametrize("instances", [1, 2])
def test_a_prepared_step_calls_few_functions_and_none_for_each_variable(on_instances, instances):
    few, many = (max(on_instances(instances, 2, partial(counted, count=count))) for count in (1, 30))
    assert few < MOST_CALLS
    assert many - few < 29, "replicas may take turns in one and have threads in the other, which is a few calls"


def test_a_prepared_step_makes_no_plan_and_reads_the_same_memory(on_instances):
    def kept(strategy):
        trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1))
        state = trainer.init({"w": np.ones((3, 2), np.float32)})
        seen = []
        for _ in range(3):
            state, _ = trainer.step(state, {"x": jnp.ones((4, 3), jnp.float32)})
            (step,) = trainer._programs._steps.values()
            [bucket] = step.gradients.buckets
            seen.append([id(step), id(bucket.whole), *(id(mean) for mean in jax.tree.leaves(step.update_means))])
        return seen

    for seen in on_instances(2, 2, kept):
        assert seen[1:] == seen[:-1]


class TestOtherShapes:
    """A step of other shapes than the last one is found, or prepared, as the first one was."""

    @pytest.fixture
    def trainer(self):
        return strategies.Trainer(strategies.IPUStrategy(2), loss_fn, optax.sgd(0.5))

    @pytest.mark.parametrize("rows", [(4, 4, 6, 4), (4, 6, 6, 4)])
    def test_batches_of_two_shapes_take_turns(self, trainer, rows):
        state = trainer.init({"w": np.ones((3, 2), np.float32)})
        for count in rows:
            state, _ = trainer.step(state, {"x": jnp.full((count, 3), count, jnp.float32)})
        gradients = sum(rows) / 2  # of the mean over two columns
        assert np.array_equal(state.variables["w"], np.full((3, 2), 1 - 0.5 * gradients))

    def test_a_variable_of_the_same_shape_under_another_name_is_another_variable(self, trainer):
        state = trainer.init({"a": np.full((3, 2), 7, np.float32), "b": np.zeros((3, 2), np.float32)})
        batch = {"x": jnp.ones((4, 3), jnp.float32)}
        for _ in range(2):
            state, _ = trainer.step(state, batch)
        state.variables["c"] = state.variables.pop("a")
        state, _ = trainer.step(state, batch)
        assert {name: float(leaf[0, 0]) for name, leaf in state.variables.items()} == {"b": -0.75, "c": 6.25}
        assert len(trainer._programs._steps) == 2

    def test_an_array_of_numpy_is_checked_in_each_step(self, trainer):
        state = trainer.init({"w": np.ones((3, 2), np.float32)})
        for _ in range(2):
            state, _ = trainer.step(state, {"x": np.ones((4, 3), np.int64)})
        with pytest.raises(ValueError, match="do not fit into int32"):
            trainer.step(state, {"x": np.full((4, 3), 1 << 40)})


class TestMemory:
    def test_means_are_read_as_they_are_when_a_program_runs(self):
        mean = private_memory((3, 5), np.dtype(np.float32))
        mean[...] = 1
        device = jax.local_devices(backend="cpu")[0]
        read = in_place({"w": mean}, device)
        total = jax.jit(lambda tree: tree["w"].sum())
        assert float(total(read)) == 15
        mean[...] = 2
        assert float(total(read)) == 30

    @pytest.mark.parametrize(
        "mean",
        [
            private_memory((17,), np.dtype(np.float32))[1:],
            private_memory((0,), np.dtype(np.float32)),
            private_memory((4, 4), np.dtype(np.float32)).T[1:],
            private_memory((4,), np.dtype(jnp.bfloat16)),
        ],
        ids=["not aligned", "empty", "not contiguous", "bfloat16"],
    )
    def test_other_means_stay_arrays_of_the_host(self, mean):
        assert in_place([mean], jax.local_devices(backend="cpu")[0])[0] is mean

    @pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int8])
    def test_a_view_is_made_again_only_if_the_buffer_has_moved(self, dtype):
        views = HostViews()
        buckets = [(jax.block_until_ready(jnp.arange(64, dtype=dtype)),)]
        [first] = views.of(buckets, 0)
        [again] = views.of(buckets, 0)
        assert again is first
        assert first.dtype == dtype
        assert not first.flags.writeable
        # Its memory is another one: the old buffer lives in `kept`.
        buckets[0] = (jax.block_until_ready(jnp.arange(64, 128, dtype=dtype)),)
        [moved] = views.of(buckets, 0)
        assert moved is not first
        assert np.array_equal(moved, np.arange(64, 128).astype(dtype))


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_program_may_change_arrays_of_numpy_that_it_has_put_into_a_state(replicas):
    trainer = strategies.Trainer(strategies.IPUStrategy(num_replicas=replicas), loss_fn, optax.adam(0.1))
    batch = {"x": np.ones((2 * replicas, 512), np.float32)}
    fresh = trainer.init({"w": np.zeros((512, 4096), np.float32)})

    def stepped(value):
        given = private_memory((512, 4096), np.dtype(np.float32))
        given[...] = 1
        state, _ = trainer.step(
            replace(fresh, variables={"w": given}, optimizer_state=trainer.init({"w": given}).optimizer_state), batch
        )
        given[...] = value
        return strategies.fingerprint(state.variables)

    wanted = stepped(1)
    assert [stepped(np.nan) for _ in range(3)] == [wanted] * 3
