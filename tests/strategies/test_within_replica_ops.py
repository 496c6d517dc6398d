"""Collectives between the shards of one replica."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import strategies
from collectives import UnsupportedBufferError
from strategies import within_replica_ops as ops

EACH = (ops.all_gather, ops.all_reduce, ops.reduce_scatter)


def lists(arrays):
    return [array.tolist() for array in arrays]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32])
def test_each_shard_gathers_all_values(dtype):
    gathered = ops.all_gather([np.full(2, number, dtype) for number in (1, 2, 3, 4)])
    assert lists(gathered) == [[1, 1, 2, 2, 3, 3, 4, 4]] * 4
    assert {array.dtype for array in gathered} == {np.dtype(dtype)}


def test_collectives_between_shards_have_gradients():
    def loss(function):
        return lambda shards: sum(jnp.mean(out**2) for out in function(shards))

    shards = [jnp.float32([1, 1]), jnp.float32([2, 2])]
    assert lists(jax.grad(loss(ops.all_gather))(shards)) == [[1, 1], [2, 2]]
    assert lists(jax.grad(loss(ops.all_reduce))(shards)) == [[6, 6], [6, 6]]
    assert lists(jax.grad(loss(ops.reduce_scatter))(shards)) == [[6, 6], [6, 6]]


def test_gathering_takes_different_sizes_axes_and_scalars():
    mixed = [np.zeros(0, np.float32), *(np.full(n, n, np.float32) for n in (2, 4))]
    assert lists(ops.all_gather(mixed)) == [[2, 2, 4, 4, 4, 4]] * 3
    assert ops.all_gather([np.zeros((2, 3)), np.ones((2, 3))])[0].shape == (4, 3)
    assert ops.all_gather([np.zeros((1, 2, 3)), np.zeros((1, 3, 3))], axis=1)[1].shape == (1, 5, 3)
    assert lists(ops.all_gather([np.int32(1), np.int32(2)])) == [[1, 2]] * 2
    assert lists(ops.all_gather([1, 1])) == [[1, 1]] * 2  # Python has one object for both


def test_shards_that_do_not_match_are_refused():
    one = np.ones((2, 3), np.float32)
    with pytest.raises(ValueError, match="along axis 2 of arrays of rank 2"):
        ops.all_gather([one, one + 1], axis=2)
    with pytest.raises(ValueError, match="equal along the other axes"):
        ops.all_gather([one, one[:, :2]])
    for function in EACH:
        with pytest.raises(ValueError, match="have ranks 0, 1"):
            function([np.float32(1), np.ones(1, np.float32)])
        with pytest.raises(ValueError, match="have dtypes float32, int32"):
            function([np.float32(1), np.int32(1)])
        with pytest.raises(ValueError, match="twice in the list of shards"):
            function([one, one])
        with pytest.raises(ValueError, match="is empty"):
            function([])


def test_shards_can_be_the_rows_of_an_array():
    assert lists(ops.all_reduce(np.arange(6, dtype=np.float32).reshape(2, 3))) == [[3, 5, 7]] * 2


def test_shards_on_devices_come_in_order():
    first, second = (jax.device_put(np.ones(2), device) for device in jax.devices()[:2])
    for function in EACH:
        with pytest.raises(strategies.DeviceError, match="in the order of their devices"):
            function([second, first])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32])
@pytest.mark.parametrize(
    ("op", "wanted"), [("ADD", 3), ("MUL", 2), ("MIN", 1), ("MAX", 2), ("SQUARE_ADD", 5), ("LOGICAL_OR", 1)]
)
def test_shards_are_reduced_by_every_operation(op, wanted, dtype):
    shards = [np.full(2, 1, dtype), np.full(2, 2, dtype)]
    assert lists(ops.all_reduce(shards, op)) == [[wanted] * 2] * 2
    assert lists(ops.reduce_scatter(shards, op)) == [[wanted]] * 2
    assert ops.all_reduce(shards, op)[0].dtype == dtype


def test_logical_operations_reduce_truth_values():
    shards = [np.array([True, True, False, False]), np.array([True, False, True, False])]
    assert lists(ops.all_reduce(shards, "LOGICAL_AND"))[0] == [True, False, False, False]
    assert lists(ops.all_reduce(shards, "LOGICAL_OR"))[0] == [True, True, True, False]


def test_short_shards_are_padded_with_zeros():
    assert lists(ops.reduce_scatter([np.full(5, n) for n in (1, 2, 3, 4)])) == [[10, 10], [10, 10], [10, 0], [0, 0]]
    assert lists(ops.reduce_scatter([np.full(2, n) for n in (1, 2, 3, 4)])) == [[10], [10], [0], [0]]
    assert lists(ops.all_reduce([np.int32([2]), np.int32([1, 1])])) == [[3, 1]] * 2
    assert lists(ops.all_reduce([np.int32(1), np.int32(2)])) == [[3]] * 2
    assert lists(ops.reduce_scatter([np.int32([1, 2]), np.int32([3, 4])], "LOCAL")) == [[1], [4]]
    with pytest.raises(ValueError, match="shards of rank 3"):
        ops.all_reduce([np.zeros((1, 1, 1)), np.ones((1, 1, 1))])


@pytest.mark.parametrize("function", [ops.all_reduce, ops.reduce_scatter])
def test_truth_values_are_combined_by_logical_operations_only(function):
    shards = [jnp.array([True, False]), jnp.array([True, True])]
    for op in ("ADD", "MEAN", "MUL", "MIN", "MAX", "SQUARE_ADD"):
        with pytest.raises(UnsupportedBufferError, match="shards cannot reduce bool; convert it to one of"):
            function(shards, op)
    found = jnp.concatenate(function(shards, "LOGICAL_AND"))
    assert found.dtype == bool
    assert found.tolist()[:2] == [True, False]
