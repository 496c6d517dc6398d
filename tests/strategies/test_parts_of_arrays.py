"""How arrays are cut into one part for each replica, and put together again."""

import jax.numpy as jnp
import numpy as np
import pytest

from strategies.shards import ALIGNMENT, Shards

SHAPES = [(1,), (7,), (24,), (5, 5), (3, 1, 7), ((1 << 16) + 1,)]


def parts_of(array, replicas, instances, **options):
    """What each instance takes of an array."""
    local = replicas // instances
    shards = Shards(replicas, local, 1, **options)
    parts = [shards.take(array, jnp.int32(index * local)) for index in range(instances)]
    assert {part.shape for part in parts} == {shards.shape(array)}
    return shards, parts


@pytest.mark.parametrize("is_aligned", [False, True])
@pytest.mark.parametrize(("replicas", "instances"), [(1, 1), (3, 3), (4, 2), (6, 3)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_parts_of_all_replicas_put_together_are_the_array(shape, replicas, instances, is_aligned):
    array = jnp.arange(1, 1 + np.prod(shape), dtype=jnp.float32).reshape(shape)
    shards, parts = parts_of(array, replicas, instances, is_aligned=is_aligned)
    assert shards.join(np.stack(parts), array).tolist() == array.tolist()


@pytest.mark.parametrize(("replicas", "instances"), [(3, 3), (4, 2)])
def test_behind_the_last_element_there_are_zeros(replicas, instances):
    array = jnp.ones(13)
    _, parts = parts_of(array, replicas, instances)
    numbers = np.concatenate([part.reshape(-1) for part in parts])
    assert numbers[:13].tolist() == [1] * 13
    assert not numbers[13:].any()
    assert numbers.size % replicas == 0


def test_small_arrays_and_scalars_stay_whole():
    shards = Shards(4, 2, min_elements=8)
    for array in (jnp.ones(7), jnp.ones(())):
        assert shards.shape(array) == array.shape
        assert shards.take(array, jnp.int32(2)) is array
    assert shards.shape(jnp.ones(8)) == (4,)


def test_parts_of_large_arrays_are_aligned():
    large = jnp.ones((1 << 16) + 1)
    assert Shards(3, 1, 1, is_aligned=True).part(large) % ALIGNMENT == 0
    assert Shards(3, 1, 1).part(large) == -(-large.size // 3)
