"""Transfer of gradients in fewer bytes: dtypes, residuals of int8 blocks, and bits independent of n."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from adding import added
from test_ring_traffic import allowed, sent_by_each_rank

import collectives
from strategies.exchange.flat import LARGE_BYTES, FlatLayout
from strategies.exchange.int8 import BLOCK, Int8Layout, Int8Reduction, encode
from strategies.exchange.means import Bucket
from strategies.exchange.shards import Shards
from strategies.exchange.transfer import GradientTransfer
from strategies.jax.gradients.leaving import XLA, flatten

SHAPES = ((3, 50), (), (64,), (0, 4), (1000,), (7,))
LAYOUT = Int8Layout(SHAPES)


def gradients(replica, step=0, layout=LAYOUT):
    random = np.random.default_rng([replica, step])
    return [
        (random.standard_normal(shape) * np.exp2(random.integers(-9, 9, shape))).astype(np.float32)
        for shape in layout.shapes
    ]


def zeros_of(layout):
    (residuals,) = layout.residuals_of_each(layout.new_residuals(1), 1)
    return residuals


COMPILED = jax.jit(encode, static_argnums=(0, 4))


def encoded(leaves, residuals=None, layout=LAYOUT):
    into = np.full(layout.payload_size, 99, np.int8)
    payload, lost = COMPILED(layout, leaves, residuals or zeros_of(layout), into, XLA)
    return np.asarray(payload), [np.asarray(array) for array in lost]


def decoded(payload, layout=LAYOUT):
    """Return the values of a payload, as the description of the format defines them."""
    values = payload[: layout.result_size].astype(np.float64).reshape(-1, BLOCK)
    scales = payload[layout.result_size :].view(np.uint8).astype(np.float64)
    blocks = values * np.where(scales == 255, np.nan, np.exp2(scales - 127))[:, None]
    assert (blocks == blocks.astype(np.float32))[scales != 255].all()
    return layout.views(blocks.astype(np.float32).reshape(-1))


def add_up(layout, payloads):
    """Return the mean of the payloads, computed in one process."""
    result = layout.new_result()
    with collectives.connect("single") as communicator:
        Int8Reduction(layout, communicator, len(payloads)).reduce(payloads, result, name="gradients")
    return result


# ---- the argument


@pytest.mark.parametrize("name", ["float16", "bfloat16", "int8"])
def test_a_dtype_can_be_a_name_or_a_dtype_of_numpy_or_jax(name):
    assert (
        GradientTransfer.parse(name)
        == GradientTransfer.parse(jnp.dtype(name))
        == GradientTransfer.parse(getattr(jnp, name))
        == GradientTransfer(jnp.dtype(name))
    )
    assert GradientTransfer.parse(name).is_quantised == (name == "int8")


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn", "uint8", "half precision", np.float64, bool, 16, ()])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match="use one of 'float16', 'bfloat16', 'int8', or None") as caught:
        GradientTransfer.parse(dtype)
    assert repr(dtype) in str(caught.value)


def test_a_gradient_is_never_widened():
    assert GradientTransfer.parse(None).dtype_of(np.float32) == np.float32
    assert GradientTransfer.parse("float16").dtype_of(np.float64) == np.float16
    assert GradientTransfer.parse("bfloat16").dtype_of(jnp.bfloat16) == ml_dtypes.bfloat16
    assert GradientTransfer.parse("bfloat16").dtype_of(np.float16) == np.float16
    with pytest.raises(ValueError, match="Int8Layout"):
        GradientTransfer.parse("int8").dtype_of(np.float32)


# ---- one replica


def test_a_payload_has_65_bytes_for_each_block_of_64_values():
    assert Int8Layout(((6400,),)).payload_size == 6500
    assert Int8Layout(((65,), (1,))).payload_size == 3 * 65
    assert Int8Layout.of(gradients(0)) == LAYOUT
    assert encoded(gradients(0))[0].shape == (LAYOUT.payload_size,)


def test_transferred_values_and_residuals_add_up_to_the_gradient(bits):
    leaves = gradients(0)
    payload, lost = encoded(leaves)
    for leaf, transferred, residual in zip(leaves, decoded(payload), lost, strict=True):
        assert bits(transferred + residual) == bits(leaf)
        if leaf.size > 1:
            assert 0 < abs(residual).max() <= abs(leaf).max() / 64


@pytest.mark.parametrize("value", [0.0, 1e-45, 1.2e-38, 3e-38, 1.0, 127.0, 127.9, -128.0, 3.4e38, -3.4e38])
def test_values_of_any_size_are_transferred(value):
    layout = Int8Layout(((70,),))
    payload, lost = encoded([np.full(70, value, np.float32)], layout=layout)
    wrong = abs(decoded(payload, layout)[0].astype(np.float64) - np.float32(value))
    assert (wrong <= max(abs(value) / 64, 2.0**-126)).all()
    assert np.isfinite(lost[0]).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_of_16_bits_are_quantised_as_float32(dtype, bits):
    narrow = [leaf.astype(jnp.dtype(dtype)) for leaf in gradients(0)]
    payload, lost = encoded(narrow)
    expected, expected_lost = encoded([leaf.astype(np.float32) for leaf in narrow])
    assert bits(payload) == bits(expected)
    assert [bits(array) for array in lost] == [bits(array) for array in expected_lost]


def sums_of_steps(gradients_of, steps):
    """Return the sum of transferred values after some steps, the sum of the gradients, and the last residual."""
    lost = zeros_of(LAYOUT)
    transferred, sums = ([np.zeros(shape) for shape in SHAPES] for _ in range(2))
    for step in range(steps):
        leaves = gradients_of(step)
        payload, lost = encoded(leaves, lost)
        for total, of_step in ((transferred, decoded(payload)), (sums, leaves)):
            for array, leaf in zip(total, of_step, strict=True):
                array += leaf
    return transferred, sums, lost


def test_the_sum_of_all_steps_arrives_except_for_the_residual():
    largest = 0.0
    for transferred, sums, kept in zip(*sums_of_steps(lambda step: gradients(0, step), 100), strict=True):
        np.testing.assert_allclose(transferred + kept, sums, rtol=0, atol=0.01)  # for values up to 1000, in float32
        largest = max(largest, *abs(transferred - sums).reshape(-1), 0)
    assert 0.02 < largest < 32  # the residual of one step


def test_gradients_below_half_a_unit_arrive_in_the_end():
    def leaves(step):
        constant = [np.full(shape, 0.1, np.float32) for shape in SHAPES]
        constant[4][::BLOCK] = 100  # so the unit of each of its blocks is 1
        return constant

    transferred, sums, _ = (of_leaves[4][1:BLOCK] for of_leaves in sums_of_steps(leaves, 52))
    assert (decoded(encoded(leaves(0))[0])[4][1:BLOCK] == 0).all()
    assert (transferred == np.round(sums)).all()


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 17, 63, 64])
def test_a_block_with_a_value_that_is_not_finite_is_nan_and_keeps_its_residual(value, position, bits):
    layout = Int8Layout(((65,), (3,)))
    before = [np.full(65, 0.25, np.float32), np.full(3, 0.5, np.float32)]
    leaves = gradients(0, layout=layout)
    leaves[0][position] = value
    payload, lost = encoded(leaves, before, layout)
    result = add_up(layout, [payload, encoded(gradients(1, layout=layout), None, layout)[0]])
    bad = np.arange(65) // BLOCK == position // BLOCK
    first, second = layout.views(result)
    assert np.isnan(first[bad]).all()
    assert np.isfinite(first[~bad]).all()
    assert np.isfinite(second).all()
    assert bits(lost[0][bad]) == bits(before[0][bad])
    assert np.isfinite(lost[0]).all()


def test_residuals_of_replicas_lie_one_after_another_and_are_copied(bits):
    residuals = LAYOUT.new_residuals(3)
    assert [array.shape for array in residuals] == [(9, 50), (3,), (192,), (0, 4), (3000,), (21,)]
    for array in residuals:
        array[...] = np.arange(array.size).reshape(array.shape)
    of_each = LAYOUT.residuals_of_each(residuals, 3)
    assert [[array.shape for array in of_one] for of_one in of_each] == [list(SHAPES)] * 3
    for array, parts in zip(residuals, zip(*of_each, strict=True), strict=True):
        assert bits(array) == bits(np.concatenate([np.atleast_1d(part) for part in parts]))
        assert not any(np.shares_memory(array, part) for part in parts)


# ---- all replicas


def payload_of(replica, layout=LAYOUT):
    """Return the payload of a replica; replicas differ so much that the order of their sum shows."""
    factor = np.float32(2.0 ** (1, 0, 0, 25, 9, 23)[replica])
    return encoded([factor * leaf for leaf in gradients(replica, layout=layout)], None, layout)[0]


def reduce(communicator, replicas, op="mean", layout=LAYOUT):
    each, more = divmod(replicas, communicator.size)
    start = communicator.rank * each + min(communicator.rank, more)
    mine = range(start, start + each + (communicator.rank < more))
    payloads = [payload_of(replica, layout) for replica in mine]
    result = layout.new_result()
    Int8Reduction(layout, communicator, replicas).reduce(payloads, result, op, name="gradients")
    return result


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize(("replicas", "ranks"), [(6, (1, 2, 3, 6)), (5, (2, 3))])
@pytest.mark.parametrize("mechanism", ["ring", "window"])
def test_the_result_has_the_order_of_the_tree_for_every_number_of_instances(op, replicas, ranks, mechanism, bits):
    parts = [decoded(payload_of(replica)) for replica in range(replicas)]
    totals = [added(of_leaf) for of_leaf in zip(*parts, strict=True)]
    in_a_chain = [np.add.accumulate(np.stack(of_leaf))[-1] for of_leaf in zip(*parts, strict=True)]
    assert (totals[0] != in_a_chain[0]).any()
    expected = [array / np.float32(replicas) if op == "mean" else array for array in totals]
    for size in ranks:
        settings = collectives.Settings(mechanism=mechanism)
        results = collectives.run_on_threads(size, lambda c: reduce(c, replicas, op), settings)
        for result in results:
            assert [bits(view) for view in LAYOUT.views(result)] == [bits(array) for array in expected], size


def test_long_gradients_are_added_up_in_parts(bits):
    layout = Int8Layout(((150_001,), (3,)))
    result = collectives.run_on_threads(2, lambda c: reduce(c, 2, "sum", layout))[0]
    first, second = (decoded(payload_of(replica, layout), layout) for replica in (0, 1))
    expected = [one + other for one, other in zip(first, second, strict=True)]
    assert [bits(view) for view in layout.views(result)] == [bits(array) for array in expected]


def test_an_overflow_of_the_sum_is_a_result():
    layout = Int8Layout(((3,),))
    payload = encoded([np.full(3, 3e38, np.float32)], None, layout)[0]
    assert np.isinf(layout.views(add_up(layout, [payload, payload]))[0]).all()


@pytest.mark.parametrize(("ranks", "local"), [(2, 1), (2, 2), (4, 1)])
def test_every_rank_sends_the_payloads_of_all_but_one_rank_once(ranks, local):
    """Two ranks with one replica each so send about a quarter of float32's bytes."""
    elements = 2**20
    layout = Int8Layout(((elements,),))
    payloads = [np.zeros(layout.payload_size, np.int8)] * local

    def program(communicator):
        Int8Reduction(layout, communicator, ranks * local).reduce(payloads, layout.new_result(), name="gradients")

    sent = sent_by_each_rank(ranks, program)
    assert max(sent) <= (ranks - 1) * allowed(local * layout.payload_size, 1)
    if ranks * local == 2:
        assert max(sent) <= 0.26 * 4 * elements


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
