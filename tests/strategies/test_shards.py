"""How an array is cut into one part for each replica."""

import jax
import numpy as np
import pytest

from strategies.replicas.shards import Shards


def array(*shape):
    return np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)


@pytest.mark.parametrize(("shape", "part"), [((4, 5), 7), ((21,), 7), ((19,), 7), ((3,), 1)])
def test_parts_are_equally_large(shape, part):
    assert Shards(replicas=3, local=1, min_elements=1).part(array(*shape)) == part


def test_small_arrays_and_scalars_stay_whole():
    shards = Shards(replicas=2, local=1, min_elements=6)
    assert [shards.divides(np.zeros(shape)) for shape in [(6,), (2, 3), (5,), ()]] == [True, True, False, False]
    assert not Shards(2, 1, 0).divides(np.zeros(()))
    assert shards.shape(np.zeros((5, 1))) == (5, 1)


def test_a_part_keeps_as_many_axes_as_the_array():
    assert Shards(3, 2, 1).shape(array(4, 5, 1)) == (14, 1, 1)


@pytest.mark.parametrize("instances", [1, 2, 4])
@pytest.mark.parametrize("shape", [(4, 5), (3, 7), (17,)])
def test_the_parts_of_all_instances_make_the_array(instances, shape):
    local = 4 // instances
    shards, whole = Shards(4, local, 1), array(*shape)
    parts = [np.asarray(jax.jit(shards.take)(whole, np.int32(i * local))) for i in range(instances)]
    assert {part.shape for part in parts} == {shards.shape(whole)}
    joined = np.concatenate(parts)
    np.testing.assert_array_equal(shards.join(joined, whole), whole)
    assert not joined.reshape(-1)[whole.size :].any()  # padded with zeros


def test_what_is_not_cut_is_taken_as_it_is():
    whole = array(5)
    assert Shards(4, 1, 6).take(whole, np.int32(1)) is whole
