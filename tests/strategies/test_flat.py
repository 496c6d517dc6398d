"""Where leaves lie in flat buffers."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from strategies.exchange.flat import LARGE_BYTES, FlatLayout
from strategies.gradients.encoding import flatten

LEAVES = [
    np.arange(1, 7, dtype=np.float32).reshape(2, 3),
    np.arange(1, 4).astype(ml_dtypes.bfloat16),
    np.float32(8),
    np.array([9, 10], np.float32),
]


def written(layout, leaves, tail):
    into = [jnp.zeros(buffer.size, buffer.dtype) for buffer in layout.buffers]
    return [np.asarray(array) for array in jax.jit(partial(flatten, layout))(leaves, tail, into)]


def test_leaves_of_a_dtype_begin_at_multiples_of_64_bytes_with_a_tail_behind_them():
    layout = FlatLayout.of(LEAVES, tail=2)
    wide, narrow = layout.buffers
    assert (wide.name, wide.size, wide.leaves, wide.starts) == ("float32", 36, (0, 2, 3), (0, 16, 32))
    assert (narrow.name, narrow.size, narrow.leaves, narrow.starts) == ("bfloat16", 3, (1,), (0,))
    assert layout.homes == ("float32", "bfloat16", "float32", "float32")


def test_what_is_written_is_seen_in_views_and_gaps_are_zero():
    layout = FlatLayout.of(LEAVES, tail=2)
    arrays = written(layout, LEAVES, jnp.array([5.0, 6.0]))
    for view, leaf in zip(layout.views(arrays), LEAVES, strict=True):
        np.testing.assert_array_equal(view, leaf)
        assert any(np.shares_memory(view, array) for array in arrays)
    assert layout.tail_view(arrays).tolist() == [5, 6]
    assert arrays[0].sum() == sum(float(LEAVES[number].sum()) for number in (0, 2, 3)) + 11


def test_there_is_a_buffer_of_float32_even_for_the_tail_alone():
    layout = FlatLayout.of([LEAVES[1]], tail=1)
    assert [(buffer.name, buffer.size) for buffer in layout.buffers] == [("float32", 1), ("bfloat16", 3)]
    assert written(layout, [LEAVES[1]], None)[0].tolist() == [0]


@pytest.mark.parametrize(("multiple", "size"), [(1, LARGE_BYTES // 4 + 1), (6, LARGE_BYTES // 4 + 2)])
def test_a_large_leaf_lies_alone_up_to_a_multiple(multiple, size):
    large, small = np.ones(LARGE_BYTES // 4 + 1, np.float32), np.ones(2, np.float32)
    layout = FlatLayout.of([small, large], tail=1, multiple=multiple)
    first, second = layout.buffers
    assert (first.name, first.size, first.is_of_one) == ("float32", 3, False)
    assert (second.name, second.size, second.is_of_one) == ("float32/1", size, True)
    arrays = written(layout, [small, large], None)
    assert layout.view(1, arrays).all()
    assert not arrays[1][large.size :].any()


def test_the_largest_small_leaf_lies_with_the_others():
    layout = FlatLayout.of([np.ones(LARGE_BYTES // 4 - 1, np.float32)], tail=0)
    assert [buffer.is_of_one for buffer in layout.buffers] == [False]
