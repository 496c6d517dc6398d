"""Transfer of gradients in fewer bytes, and flat buffers for many arrays."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from strategies.exchange.flat import LARGE_BYTES, FlatLayout, GradientTransfer, Shards
from strategies.exchange.means import Bucket
from strategies.jax.gradients.gradient_programs import flatten

# ---- the argument


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_a_dtype_can_be_a_name_or_a_dtype_of_numpy_or_jax(name):
    assert (
        GradientTransfer.parse(name)
        == GradientTransfer.parse(jnp.dtype(name))
        == GradientTransfer.parse(getattr(jnp, name))
        == GradientTransfer(jnp.dtype(name))
    )


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn", "int8", "half precision", np.float64, bool, 16, ()])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match="use one of 'float16', 'bfloat16', or None") as caught:
        GradientTransfer.parse(dtype)
    assert repr(dtype) in str(caught.value)


def test_a_gradient_is_never_widened():
    assert GradientTransfer.parse(None).dtype_of(np.float32) == np.float32
    assert GradientTransfer.parse("float16").dtype_of(np.float64) == np.float16
    assert GradientTransfer.parse("bfloat16").dtype_of(jnp.bfloat16) == ml_dtypes.bfloat16
    assert GradientTransfer.parse("bfloat16").dtype_of(np.float16) == np.float16


# ---- positions of leaves in flat buffers


LEAVES = [
    np.arange(1, 7, dtype=np.float32).reshape(2, 3),
    np.arange(1, 4).astype(ml_dtypes.bfloat16),
    np.float32(8),
    np.array([9, 10], np.float32),
]


def written(layout, leaves, tail):
    into = [jnp.zeros(buffer.size, buffer.dtype) for buffer in layout.buffers]
    return [np.asarray(array) for array in jax.jit(partial(flatten, layout))(leaves, tail, into)]


def test_leaves_of_a_dtype_begin_at_multiples_of_64_bytes_and_end_with_a_tail():
    layout = FlatLayout.of(LEAVES, tail=2)
    wide, narrow = layout.buffers
    assert (wide.name, wide.size, wide.leaves, wide.starts) == ("float32", 36, (0, 2, 3), (0, 16, 32))
    assert (narrow.name, narrow.size, narrow.leaves, narrow.starts) == ("bfloat16", 3, (1,), (0,))
    assert [layout.buffer_of(leaf) for leaf in range(4)] == [0, 1, 0, 0]


def test_views_show_written_values_and_gaps_are_zero():
    layout = FlatLayout.of(LEAVES, tail=2)
    arrays = written(layout, LEAVES, jnp.array([5.0, 6.0]))
    for view, leaf in zip(layout.views(arrays), LEAVES, strict=True):
        np.testing.assert_array_equal(view, leaf)
        assert any(np.shares_memory(view, array) for array in arrays)
    assert layout.tail_view(arrays).tolist() == [5, 6]
    assert arrays[0].sum() == sum(float(LEAVES[number].sum()) for number in (0, 2, 3)) + 11


def test_the_tail_has_a_float32_buffer_even_alone():
    layout = FlatLayout.of([LEAVES[1]], tail=1)
    assert [(buffer.name, buffer.size) for buffer in layout.buffers] == [("float32", 1), ("bfloat16", 3)]
    assert written(layout, [LEAVES[1]], None)[0].tolist() == [0]


@pytest.mark.parametrize(("multiple", "size"), [(1, LARGE_BYTES // 4 + 1), (6, LARGE_BYTES // 4 + 2)])
def test_a_large_leaf_has_its_own_buffer_padded_to_a_multiple(multiple, size):
    large, small = np.ones(LARGE_BYTES // 4 + 1, np.float32), np.ones(2, np.float32)
    layout = FlatLayout.of([small, large], tail=1, multiple=multiple)
    first, second = layout.buffers
    assert (first.name, first.size, first.is_of_one) == ("float32", 3, False)
    assert (second.name, second.size, second.is_of_one) == ("float32/1", size, True)
    arrays = written(layout, [small, large], None)
    assert layout.view(1, arrays).all()
    assert not arrays[1][large.size :].any()


def test_the_mean_of_a_leaf_with_its_own_buffer_can_be_cut():
    leaves = [np.zeros((2, 3), np.float32), np.zeros(LARGE_BYTES // 4 + 1, np.float32), np.zeros(LARGE_BYTES, np.int8)]
    shards = Shards(replicas=3, local=2, min_elements=4)
    layout, given = FlatLayout.of(leaves, tail=1, multiple=shards.replicas), np.zeros(LARGE_BYTES + 2, np.int8)
    made = []

    def allocate(shape, dtype):
        made.append(shape)
        return np.zeros(shape, dtype)

    bucket = Bucket.of("gradients", layout, allocate, shards.sizes(leaves[:2]), {layout.buffer_of(2): given})
    assert made == [(7,)]
    assert bucket.scattered == {layout.buffer_of(1)}
    assert [bucket.mean(leaf).shape for leaf in range(3)] == [
        (2, 3),
        (2 * (LARGE_BYTES // 4 + 2) // 3,),
        (LARGE_BYTES,),
    ]
    assert np.shares_memory(bucket.mean(2), given)


def test_the_largest_small_leaf_shares_a_buffer():
    layout = FlatLayout.of([np.ones(LARGE_BYTES // 4 - 1, np.float32)], tail=0)
    assert [buffer.is_of_one for buffer in layout.buffers] == [False]
