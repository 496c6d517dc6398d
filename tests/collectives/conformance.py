"""Statements about every communicator: results, groups, arguments, closing."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from reference import (
    FLOATS,
    INTEGERS,
    LARGE,
    MOVABLE,
    OPERATIONS,
    REDUCIBLE,
    SMALL_LENGTHS,
    SPREADS,
    Reduced,
    contribution,
    contributions,
    dtype_of,
    mine,
    reduced_contributions,
)
from statements import About, Suite, assert_all_reduced, assert_reduced, assert_same_bits, texts_of_all_ranks, twin_of

from collectives import ClosedError, CollectiveError, Communicator, LayoutMismatchError, UnsupportedBufferError

suite = Suite()

LARGE_CASES = (
    ("float16", "mean", "one or two"),
    ("float32", "sum", "one each"),
    ("float32", "sum", "three each"),
    ("bfloat16", "sum", "two each"),
    ("float64", "mean", "one or two"),
    ("int8", "sum", "three each"),
    ("int64", "max", "two each"),
    ("uint8", "mean", "one each"),
    ("uint8", "mean", "three each"),
    ("int32", "mean", "two each"),
    ("int64", "mean", "one or two"),
)


# ---- reductions


@suite.add_for_each(REDUCIBLE, about=About.DTYPES)
def an_ordered_reduction_has_the_bits_of_the_sequential_one(communicator: Communicator, dtype: str) -> None:
    small = product(SMALL_LENGTHS, OPERATIONS, ("one or two",))
    for length, op, spread in (*small, *product((3001,), OPERATIONS, SPREADS)):
        arrays, count = mine(communicator, dtype, length, spread)
        result = communicator.ordered_all_reduce(arrays, op=op)
        assert_all_reduced(communicator, result, reduced_contributions(dtype, length, count, op), (length, op, spread))


@suite.add_for_each(LARGE_CASES, about=About.NUMBERS)
def a_large_ordered_reduction_has_the_bits_of_the_sequential_one(
    communicator: Communicator, case: tuple[str, str, str]
) -> None:
    dtype, op, spread = case
    arrays, count = mine(communicator, dtype, LARGE, spread)
    result = communicator.ordered_all_reduce(arrays, op=op)
    assert_all_reduced(communicator, result, reduced_contributions(dtype, LARGE, count, op), case)


@suite.add_for_each((20_000, 40_000, 70_000, 150_000))
def lengths_between_small_and_large_are_reduced_alike(communicator: Communicator, length: int) -> None:
    for dtype, spread in product(("float16", "float32"), (*SPREADS, "five each")):
        arrays, count = mine(communicator, dtype, length, spread)
        result = communicator.ordered_all_reduce(arrays)
        assert_all_reduced(communicator, result, reduced_contributions(dtype, length, count, "sum"), (dtype, spread))


@suite.add_for_each(REDUCIBLE, about=About.DTYPES)
def all_reduce_works_in_place(communicator: Communicator, dtype: str) -> None:
    for length, op in product((*SMALL_LENGTHS, 70_001), OPERATIONS):
        buffer = contribution(dtype, length, communicator.rank).copy()
        assert communicator.all_reduce(buffer, op) is buffer
        assert_all_reduced(
            communicator, buffer, reduced_contributions(dtype, length, communicator.size, op), (length, op)
        )


@suite.add
def a_large_all_reduce_works_in_place(communicator: Communicator) -> None:
    buffer = contribution("float32", LARGE, communicator.rank).copy()
    communicator.all_reduce(buffer, name="gradients")
    assert_all_reduced(communicator, buffer, reduced_contributions("float32", LARGE, communicator.size, "sum"))


@suite.add
def ranks_are_summed_by_default(communicator: Communicator) -> None:
    buffer = np.array([communicator.rank], np.int32)
    assert communicator.all_reduce(buffer).tolist() == [sum(range(communicator.size))]


@suite.add_for_each(INTEGERS[:4], about=About.DTYPES)
def a_mean_of_negative_integers_is_truncated_towards_zero(communicator: Communicator, dtype: str) -> None:
    arrays = [np.array([-7, 7, -1, 1], dtype), np.array([0, 0, 0, 0], dtype)]
    result = communicator.ordered_all_reduce(arrays, op="mean")
    assert result.tolist() == [-3, 3, 0, 0]


@suite.add_for_each(INTEGERS, about=About.DTYPES)
def a_mean_of_integers_is_right_where_their_sum_does_not_fit(communicator: Communicator, dtype: str) -> None:
    largest = np.iinfo(dtype).max
    for length in (7, 70_001):
        arrays = [np.full(length, largest - 2, dtype), np.full(length, largest, dtype)]
        assert (communicator.ordered_all_reduce(arrays, op="mean") == largest - 1).all(), length


@suite.add_for_each(("min", "max"))
def nan_wins_every_minimum_and_maximum(communicator: Communicator, op: str) -> None:
    last = communicator.size - 1
    for dtype, length, holder in product(FLOATS, (7, 70_001), {0, last}):
        buffer = np.full(length, communicator.rank, dtype_of(dtype))
        if communicator.rank == holder:
            buffer[::3] = np.nan
        communicator.all_reduce(buffer, op)
        case = (dtype, length, holder)
        assert np.isnan(buffer[::3].astype(np.float32)).all(), case
        assert (buffer[1::3] == (0 if op == "min" else last)).all(), case


@suite.add_for_each(("float16", "float32"))
def an_overflow_is_a_result_and_no_error(communicator: Communicator, dtype: str) -> None:
    for length in (7, 70_001):
        largest = np.full(length, np.finfo(dtype).max, dtype)
        with np.errstate(all="raise"):
            result = communicator.ordered_all_reduce([largest, largest, -largest])
        expected = np.inf if dtype == "float32" or communicator.size > 1 else largest[0]
        assert (result == expected).all()


@suite.add
def infinities_of_both_signs_sum_to_nan_and_no_error(communicator: Communicator) -> None:
    for length in (7, 70_001):
        infinite = np.full(length, np.inf, np.float32)
        with np.errstate(all="raise"):
            result = communicator.ordered_all_reduce([infinite, -infinite])
        assert np.isnan(result).all()


# ---- places of results


@suite.add_for_each(("float32", "bfloat16", "int16"), about=About.NUMBERS)
def the_result_may_replace_any_contribution(communicator: Communicator, dtype: str) -> None:
    for length, op in product((7, 3001, 200_003), ("sum", "mean")):
        for position in range(3):
            originals, count = mine(communicator, dtype, length, "three each")
            arrays = [array.copy() for array in originals]
            result = communicator.ordered_all_reduce(arrays, arrays[position], op)
            case = (length, op, position)
            assert result is arrays[position], case
            assert_all_reduced(communicator, result, reduced_contributions(dtype, length, count, op), case)
            for number in {0, 1, 2} - {position}:
                assert_same_bits(arrays[number], originals[number], case)


@suite.add
def ranks_may_replace_contributions_at_different_positions(communicator: Communicator) -> None:
    originals, count = mine(communicator, "float32", LARGE, "two each")
    arrays = [array.copy() for array in originals]
    result = communicator.ordered_all_reduce(arrays, arrays[communicator.rank % 2])
    assert_all_reduced(communicator, result, reduced_contributions("float32", LARGE, count, "sum"))
    other = 1 - communicator.rank % 2
    assert_same_bits(arrays[other], originals[other])


@suite.add_for_each((7, 3001, LARGE))
def results_may_go_to_allocated_memory(communicator: Communicator, length: int) -> None:
    out = communicator.allocate((length,), np.float32)
    assert out.dtype == np.float32
    assert out.shape == (length,)
    assert out.__array_interface__["data"][0] % 64 == 0
    for spread in SPREADS:
        arrays, count = mine(communicator, "float32", length, spread)
        assert communicator.ordered_all_reduce(arrays, out) is out
        assert_all_reduced(communicator, out, reduced_contributions("float32", length, count, "sum"), spread)


@suite.add_for_each(("uint8", "int32", "int64", "uint64"), about=About.NUMBERS)
def means_of_integers_may_go_to_allocated_memory(communicator: Communicator, dtype: str) -> None:
    for length, spread in product((7, 3001, 70_001), ("one each", "one or two")):
        out = communicator.allocate((length,), dtype)
        arrays, count = mine(communicator, dtype, length, spread)
        for _ in range(3):
            communicator.ordered_all_reduce(arrays, out, "mean")
            expected = reduced_contributions(dtype, length, count, "mean")
            assert_all_reduced(communicator, out, expected, (length, spread))


@suite.add
def allocated_memory_stays_readable_until_the_next_reduction_into_it(communicator: Communicator) -> None:
    outs = [communicator.allocate((211, 33), dtype) for dtype in ("float32", "float32", "int16")]
    for turn in range(6):
        out = outs[turn % 3]
        array = np.full(out.shape, turn + communicator.rank, out.dtype)
        communicator.ordered_all_reduce([array], out, "max")
        for earlier in range(max(0, turn - 2), turn + 1):
            assert (outs[earlier % 3] == earlier + communicator.size - 1).all(), (turn, earlier)


@suite.add_for_each(("float16", "float32", "float64", "int32"), about=About.NUMBERS)
def a_repeated_reduction_into_one_array_has_the_bits_of_the_first(communicator: Communicator, dtype: str) -> None:
    for length, spread, op in product((7, 3001, 70_001), ("one each", "three each", "one or two"), ("sum", "mean")):
        arrays, count = mine(communicator, dtype, length, spread)
        allocated, private = communicator.allocate((length,), dtype), np.empty(length, dtype)
        expected = reduced_contributions(dtype, length, count, op)
        for turn, out in product(range(4), (allocated, private)):
            if turn == 2:  # with other arrays of the same layout
                arrays = [array.copy() for array in arrays]
            communicator.barrier()  # the others have read the result
            out[...] = 0
            communicator.barrier()
            assert communicator.ordered_all_reduce(arrays, out, op) is out
            assert_all_reduced(communicator, out, expected, (length, spread, op, turn))


@suite.add
def a_repeated_all_reduce_in_place_starts_from_the_new_values(communicator: Communicator) -> None:
    for length in (7, 3001, 70_001):
        buffer = np.empty(length, np.float32)
        for _ in range(4):
            buffer[...] = contribution("float32", length, communicator.rank)
            assert communicator.all_reduce(buffer, "mean") is buffer
            expected = reduced_contributions("float32", length, communicator.size, "mean")
            assert_all_reduced(communicator, buffer, expected, length)


@suite.add
def the_number_of_contributions_may_change_between_reductions_into_one_array(communicator: Communicator) -> None:
    for length in (7, 3001, 70_001):
        for out in (communicator.allocate((length,), np.float32), np.empty(length, np.float32)):
            for spread in ("one each",) * 4 + ("one or two", "three each", "one or two", "one each") * 2:
                arrays, count = mine(communicator, "float32", length, spread)
                communicator.ordered_all_reduce(arrays, out)
                expected = reduced_contributions("float32", length, count, "sum")
                assert_all_reduced(communicator, out, expected, (length, spread))


@suite.add_for_groups
def a_repeated_reduction_is_still_compared_with_the_calls_of_other_ranks(communicator: Communicator) -> None:
    for length in (7, 3001, 70_001):
        array = np.full(length, communicator.rank, np.float32)
        for out in (communicator.allocate((length,), np.float32), np.empty(length, np.float32)):
            for _ in range(3):
                communicator.ordered_all_reduce([array], out, name="layer 1")
            before = out.copy()
            name = "layer 2" if communicator.rank == communicator.size - 1 else "layer 1"
            with pytest.raises(LayoutMismatchError, match=r"(?s)'layer 1'.*'layer 2'"):
                communicator.ordered_all_reduce([array], out, name=name)
            assert_same_bits(out, before)
            communicator.ordered_all_reduce([array], out, name="layer 1")
            assert_same_bits(out, before)


@suite.add
def a_part_of_allocated_memory_takes_a_result_or_is_refused(communicator: Communicator) -> None:
    """Ranks that share memory can only take the whole array."""
    memory = communicator.allocate((100_000,), np.float32)
    for part in (slice(0, 70_001), slice(1, 70_002), slice(30_000, 30_000)):
        length = part.stop - part.start
        arrays = [contribution("float32", length, communicator.rank)]
        if communicator.mechanism == "window":
            with pytest.raises(UnsupportedBufferError, match="give ordered_all_reduce the whole array"):
                communicator.ordered_all_reduce(arrays, memory[part])
        else:
            result = communicator.ordered_all_reduce(arrays, memory[part])
            assert_all_reduced(
                communicator, result, reduced_contributions("float32", length, communicator.size, "sum"), part
            )


@suite.add
def allocated_memory_may_be_empty(communicator: Communicator) -> None:
    out = communicator.allocate((0, 3), np.float64)
    assert communicator.ordered_all_reduce([np.empty((0, 3))], out).shape == (0, 3)


@suite.add_for_groups
def a_result_in_allocated_memory_of_some_ranks_is_right_or_refused_by_all(communicator: Communicator) -> None:
    for length in (7, LARGE):
        allocated = communicator.allocate((length,), np.float32)
        out = allocated if communicator.rank == 0 else np.zeros(length, np.float32)
        arrays = [contribution("float32", length, communicator.rank)]
        if communicator.mechanism == "window" and length == LARGE:
            with pytest.raises(LayoutMismatchError, match="into shared memory"):
                communicator.ordered_all_reduce(arrays, out)
        else:
            result = communicator.ordered_all_reduce(arrays, out)
            assert_all_reduced(
                communicator, result, reduced_contributions("float32", length, communicator.size, "sum"), length
            )


@suite.add
def results_of_started_reductions_may_go_to_allocated_memory(communicator: Communicator) -> None:
    out = communicator.allocate((70_001,), np.float32)
    arrays, count = mine(communicator, "float32", 70_001, "one or two")
    for turn in range(3):
        handle = communicator.start_ordered_all_reduce(arrays, out, name=f"turn {turn}")
        assert handle.wait() is out
        assert_all_reduced(communicator, out, reduced_contributions("float32", 70_001, count, "sum"), turn)


@suite.add_for_each(((), (1,), (3, 5, 2), (0, 4), (211, 1, 333)))
def arrays_of_any_shape_are_reduced(communicator: Communicator, shape: tuple[int, ...]) -> None:
    arrays = [np.full(shape, communicator.rank + number, np.float32) for number in range(2)]
    expected = np.full(shape, communicator.size**2, np.float32)
    assert_same_bits(communicator.ordered_all_reduce(arrays), expected)
    buffer = np.full(shape, communicator.rank, np.int64)
    assert communicator.all_reduce(buffer, "max") is buffer
    assert_same_bits(buffer, np.full(shape, communicator.size - 1, np.int64))
    gathered = communicator.all_gather(arrays[0])
    assert gathered.shape == (communicator.size, *shape)
    assert all((row == rank).all() for rank, row in enumerate(gathered))
    assert_same_bits(communicator.broadcast(arrays[1]), np.full(shape, 1, np.float32))


@suite.add_for_each((7, 3001, LARGE))
def contributions_are_not_changed(communicator: Communicator, length: int) -> None:
    arrays = [array.copy() for array in contributions("float32", length, (0, 1, 2))]
    communicator.ordered_all_reduce(arrays, op="mean")
    communicator.all_gather(arrays[0])
    whole = np.tile(arrays[1], communicator.size)
    communicator.reduce_scatter(whole)
    for number, array in enumerate(arrays):
        assert_same_bits(array, contribution("float32", length, number))
    assert_same_bits(whole, np.tile(arrays[1], communicator.size))


class Named(np.ndarray):
    """A subclass of arrays that all its views have, too, as np.matrix has."""


@suite.add
def the_memory_of_a_subclass_is_reduced_and_moved_like_any_other(communicator: Communicator) -> None:
    total = sum(range(1, communicator.size + 1))
    for kind, length in product((np.matrix, Named), (2, 40_000)):
        array = np.full((length, 3), communicator.rank + 1.0).view(kind)
        assert (np.asarray(communicator.ordered_all_reduce([array, array])) == 2 * total).all()
        gathered = communicator.all_gather(array)
        assert gathered.shape == (communicator.size, length, 3)
        assert (gathered[-1] == communicator.size).all()
        assert communicator.all_reduce(array) is array
        assert (np.asarray(array) == total).all()


# ---- copies


@suite.add_for_each(MOVABLE, about=About.DTYPES)
def every_rank_can_broadcast(communicator: Communicator, dtype: str) -> None:
    for length, root in product((*SMALL_LENGTHS, 70_001), range(communicator.size)):
        buffer = contribution(dtype, length, communicator.rank).copy()
        assert communicator.broadcast(buffer, root) is buffer
        assert_same_bits(buffer, contribution(dtype, length, root), (length, root))


@suite.add
def a_broadcast_comes_from_rank_0_by_default_and_reads_only_there(communicator: Communicator) -> None:
    for length in (7, LARGE):
        sent = contribution("float32", length, 0)
        buffer = sent if communicator.rank == 0 else np.empty(length, np.float32)
        assert_same_bits(communicator.broadcast(buffer), sent)


@suite.add
def a_broadcast_carries_every_bit_of_nan(communicator: Communicator) -> None:
    payloads = np.array([0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000], np.uint32)
    buffer = payloads.view(np.float32).copy() if communicator.rank == 0 else np.zeros(4, np.float32)
    assert communicator.broadcast(buffer).view(np.uint32).tolist() == payloads.tolist()


@suite.add_for_each(MOVABLE, about=About.DTYPES)
def all_gather_stacks_the_arrays_of_all_ranks(communicator: Communicator, dtype: str) -> None:
    for length in (*SMALL_LENGTHS, 70_001):
        expected = np.stack(contributions(dtype, length, range(communicator.size)))
        block = contribution(dtype, length, communicator.rank)
        assert_same_bits(communicator.all_gather(block), expected, length)
        out = np.empty_like(expected)
        assert communicator.all_gather(block, out) is out
        assert_same_bits(out, expected, length)


@suite.add_for_each(MOVABLE, about=About.DTYPES)
def shift_gives_each_rank_the_array_of_another(communicator: Communicator, dtype: str) -> None:
    size, rank = communicator.size, communicator.rank
    for length, distance in product((*SMALL_LENGTHS, 70_001), range(size)):
        expected = contribution(dtype, length, (rank + distance) % size)
        block, out = contribution(dtype, length, rank), np.empty_like(expected)
        assert communicator.shift(block, out, distance) is out
        assert_same_bits(out, expected, (length, distance))
        assert_same_bits(communicator.shift(block, distance=distance), expected, (length, distance))


@suite.add_for_each(MOVABLE, about=About.DTYPES)
def gather_stacks_the_arrays_of_all_ranks_on_the_root(communicator: Communicator, dtype: str) -> None:
    for length, root in product((*SMALL_LENGTHS, 70_001), range(communicator.size)):
        block = contribution(dtype, length, communicator.rank)
        gathered = communicator.gather(block, root)
        if communicator.rank == root:
            assert_same_bits(gathered, np.stack(contributions(dtype, length, range(communicator.size))), (length, root))
        else:
            assert gathered is None


@suite.add_for_each(REDUCIBLE, about=About.DTYPES)
def reduce_scatter_gives_each_rank_its_block(communicator: Communicator, dtype: str) -> None:
    size, rank = communicator.size, communicator.rank
    for block, op in (*product((0, 1, 7), OPERATIONS), (9001, "sum"), (9001, "mean")):
        shape = (size * block, 2)
        arrays = [array.reshape(shape) for array in contributions(dtype, 2 * size * block, range(size))]
        expected = Reduced([array[rank * block : (rank + 1) * block] for array in arrays], op)
        assert_reduced(communicator, communicator.reduce_scatter(arrays[rank], op=op), expected, (block, op))
        out = np.empty_like(expected.bits)
        assert communicator.reduce_scatter(arrays[rank], out, op) is out
        assert_reduced(communicator, out, expected, (block, op))


@suite.add_for_each((7, 70_001))
def a_block_may_be_gathered_and_scattered_in_its_own_place(communicator: Communicator, length: int) -> None:
    size, rank = communicator.size, communicator.rank
    expected = np.stack(contributions("float32", length, range(size)))
    gathered = np.zeros_like(expected)
    gathered[rank] = expected[rank]
    assert_same_bits(communicator.all_gather(gathered[rank], gathered), expected)
    arrays = [array.reshape(size, length).copy() for array in contributions("float32", size * length, range(2 * size))]
    mine = arrays[2 * rank : 2 * rank + 2]
    block = Reduced([array[rank : rank + 1].copy() for array in arrays], "mean")
    out = communicator.ordered_reduce_scatter(mine, mine[1][rank : rank + 1], "mean")
    assert_reduced(communicator, out, block)


@suite.add
def a_large_reduce_scatter_gives_each_rank_its_block(communicator: Communicator) -> None:
    size, rank = communicator.size, communicator.rank
    block = LARGE // size
    arrays = [array[: block * size] for array in contributions("float32", LARGE, range(size))]
    expected = Reduced([array[rank * block : (rank + 1) * block] for array in arrays], "sum")
    assert_reduced(communicator, communicator.reduce_scatter(arrays[rank]), expected)


def _scatter_contributions(communicator: Communicator, dtype: str, block: int, op: str, spread: str) -> None:
    size, rank = communicator.size, communicator.rank
    arrays, count = mine(communicator, dtype, size * block, spread)
    own = slice(rank * block, (rank + 1) * block)
    expected = Reduced([array[own] for array in contributions(dtype, size * block, range(count))], op)
    out = np.empty(block, dtype_of(dtype))
    assert communicator.ordered_reduce_scatter(arrays, out, op, name="gradients") is out
    assert_reduced(communicator, out, expected, (block, op, spread))


@suite.add_for_each(("bfloat16", "float32", "int8"), about=About.NUMBERS)
def an_ordered_reduce_scatter_gives_each_rank_its_block_of_the_sequential_sum(
    communicator: Communicator, dtype: str
) -> None:
    for block, op, spread in product((0, 1, 7, 3001), ("sum", "mean", "max"), SPREADS):
        _scatter_contributions(communicator, dtype, block, op, spread)


@suite.add_for_each(
    (
        ("float32", "sum", "one each"),
        ("float32", "mean", "three each"),
        ("float16", "mean", "one or two"),
        ("bfloat16", "sum", "five each"),
    ),
    about=About.NUMBERS,
)
def a_large_ordered_reduce_scatter_gives_each_rank_its_block(
    communicator: Communicator, case: tuple[str, str, str]
) -> None:
    dtype, op, spread = case
    _scatter_contributions(communicator, dtype, 70_001, op, spread)  # several messages


@suite.add
def no_rank_leaves_a_barrier_before_all_have_arrived(communicator: Communicator) -> None:
    for _ in range(20):
        came = time.monotonic()
        communicator.barrier()
        left = time.monotonic()
        times = communicator.all_gather(np.array([came, left]))
        assert times[:, 1].min() >= times[:, 0].max()


@suite.add
def collectives_of_all_kinds_and_sizes_follow_each_other(communicator: Communicator) -> None:
    random = np.random.default_rng(17)
    size, rank = communicator.size, communicator.rank
    for turn in range(80):
        length = int(random.choice([0, 1, 13, 500, 9_000, 17_000, 66_000, 140_000]))
        kind, root = random.integers(6), int(random.integers(size))
        arrays = contributions("float32", length, range(size))
        case = (turn, kind, length)
        if kind == 0:
            assert_reduced(communicator, communicator.all_reduce(arrays[rank].copy()), Reduced(arrays, "sum"), case)
        elif kind == 1:
            assert_same_bits(communicator.broadcast(arrays[rank].copy(), root), arrays[root], case)
        elif kind == 2:
            assert_same_bits(communicator.all_gather(arrays[rank]), np.stack(arrays), case)
        elif kind == 3:
            gathered = communicator.gather(arrays[rank], root)
            assert gathered is None if rank != root else np.array_equal(gathered, np.stack(arrays)), case
        elif kind == 4:
            twice = [arrays[(rank + number) % size] for number in range(2)]
            replicas = [arrays[(owner + number) % size] for owner in range(size) for number in range(2)]
            assert_reduced(communicator, communicator.ordered_all_reduce(twice), Reduced(replicas, "sum"), case)
        else:
            wide = [np.tile(array, size) for array in arrays]
            assert_reduced(communicator, communicator.reduce_scatter(wide[rank]), Reduced(arrays, "sum"), case)


# ---- groups


@suite.add
def a_subgroup_of_all_ranks_is_independent_of_the_group(communicator: Communicator) -> None:
    everybody = range(communicator.size)
    with communicator.subgroup(everybody) as first, communicator.subgroup(everybody) as second:
        for number, group in enumerate((communicator, second, first)):
            buffer = np.full(5, communicator.rank + number, np.int32)
            group.all_reduce(buffer, "max")
            assert (buffer == communicator.size - 1 + number).all()


@suite.add
def the_ranks_of_a_subgroup_have_the_given_order(communicator: Communicator) -> None:
    last = communicator.size - 1
    with communicator.subgroup(range(last, -1, -1)) as group:
        assert group.rank == last - communicator.rank
        assert group.size == communicator.size
        gathered = group.all_gather(np.array(communicator.rank))
        assert gathered.tolist() == list(range(last, -1, -1))
        for length in (7, LARGE):
            arrays = contributions("float32", length, range(communicator.size))
            result = group.ordered_all_reduce([arrays[communicator.rank]])
            assert_same_bits(result, Reduced(arrays[::-1], "sum").bits, length)


@suite.add
def subgroups_work_side_by_side(communicator: Communicator) -> None:
    members = [rank for rank in range(communicator.size) if rank % 2 == communicator.rank % 2]
    with communicator.subgroup(members) as group:
        buffer = np.full(70_001, communicator.rank, np.int64)
        group.all_reduce(buffer)
        assert (buffer == sum(members)).all()
        group.start_all_reduce(buffer, "max", name="sum").wait()
        assert (buffer == sum(members)).all()
    communicator.barrier()


@suite.add
def a_subgroup_of_one_needs_no_other_rank(communicator: Communicator) -> None:
    with communicator.subgroup([communicator.rank]) as alone:
        assert (alone.rank, alone.size) == (0, 1)
        buffer = np.arange(5, dtype=np.float32)
        for op in OPERATIONS:
            assert alone.all_reduce(buffer, op).tolist() == [0, 1, 2, 3, 4]
        alone.barrier()
    communicator.barrier()


@suite.add_for_groups
def only_members_make_a_subgroup(communicator: Communicator) -> None:
    members = list(range(1, communicator.size))
    if communicator.rank == 0:
        with pytest.raises(ValueError, match=r"rank 0 is not among \[1"):
            communicator.subgroup(members)
    else:
        with communicator.subgroup(members) as group:
            assert group.all_gather(np.array(communicator.rank)).tolist() == members
    communicator.barrier()


@suite.add
def a_subgroup_can_be_divided_again(communicator: Communicator) -> None:
    with communicator.subgroup(range(communicator.size)) as group, group.subgroup([group.rank]) as alone:
        assert alone.all_reduce(np.array([3.0])).tolist() == [3.0]
    communicator.barrier()


@suite.add_about(About.ARGUMENTS)
def a_group_needs_different_ranks_that_exist(communicator: Communicator) -> None:
    for ranks in ([0, 0], [communicator.size], [-1]):
        with pytest.raises(ValueError, match=f"name different ranks of 0 to {communicator.size - 1}"):
            communicator.subgroup(ranks)


# ---- wrong arguments


def _read_only(length: int = 4) -> np.ndarray:
    array = np.zeros(length, np.float32)
    array.flags.writeable = False
    return array


def _masked() -> np.ma.MaskedArray:
    return np.ma.masked_equal(np.arange(4, dtype=np.float32), 2)


_good = np.zeros(4, np.float32)
_tall = np.zeros((2, 4), np.float32)

Wrong = Callable[[Communicator], object]
_WRONG_BUFFERS: dict[str, tuple[Wrong, str]] = {
    "read-only buffer": (lambda c: c.all_reduce(_read_only()), "not writable"),
    "strided buffer": (lambda c: c.all_reduce(np.zeros(8, np.float32)[::2]), "C-contiguous"),
    "transposed buffer": (lambda c: c.all_reduce(np.zeros((2, 3), np.float32).T), "C-contiguous"),
    "list": (lambda c: c.all_reduce([1.0, 2.0]), "list"),
    "number": (lambda c: c.all_reduce(1.0), "float"),
    "bool sum": (lambda c: c.all_reduce(np.zeros(4, bool)), "bool"),
    "complex": (lambda c: c.all_reduce(np.zeros(4, complex)), "complex128"),
    "objects": (lambda c: c.broadcast(np.array([None, "x"])), "object"),
    "texts": (lambda c: c.all_gather(np.array(["a", "b"])), "U1"),
    "foreign byte order": (lambda c: c.all_reduce(np.zeros(4, ">f4")), ">f4"),
    "masked": (lambda c: c.all_reduce(_masked()), "masked"),
    "masked contribution": (lambda c: c.ordered_all_reduce([_good, _masked()]), "masked"),
    "masked out": (lambda c: c.ordered_all_reduce([_good], _masked()), "masked"),
    "started masked": (lambda c: c.start_all_gather(_masked(), name="x"), "masked"),
    "list of lists": (lambda c: c.ordered_all_reduce([[1.0], [2.0]]), "list"),
    "mixed with a list": (lambda c: c.ordered_all_reduce([_good, [1.0] * 4]), "list"),
    "different dtypes": (lambda c: c.ordered_all_reduce([_good, np.zeros(4)]), "float64"),
    "different shapes": (lambda c: c.ordered_all_reduce([_good, np.zeros(5, "f4")]), "5"),
    "strided contribution": (lambda c: c.ordered_all_reduce([_good, np.zeros(8, "f4")[::2]]), "C-contiguous"),
    "out too short": (lambda c: c.ordered_all_reduce([_good], np.zeros(3, "f4")), "out"),
    "out of another dtype": (lambda c: c.ordered_all_reduce([_good], np.zeros(4)), "out"),
    "read-only out": (lambda c: c.ordered_all_reduce([_good], _read_only()), "not writable"),
    "list as out": (lambda c: c.ordered_all_reduce([_good], [0.0] * 4), "list"),
    "gather into a list": (lambda c: c.all_gather(_good, [0.0] * 4), "list"),
    "gather into the wrong shape": (lambda c: c.all_gather(_good, np.zeros((9, 4), "f4")), "out"),
    "scatter into the wrong dtype": (
        lambda c: c.reduce_scatter(np.zeros((c.size, 4), "f4"), np.zeros((1, 4))),
        "out",
    ),
    "group with a list": (
        lambda c: c.grouped_ordered_all_reduce([[[1.0]], [_good]], [_good.copy(), _good.copy()], names=["a", "b"]),
        "list",
    ),
    "group whose second tensor is strided": (
        lambda c: c.grouped_ordered_all_reduce(
            [[_good], [np.zeros(8, "f4")[::2]]], [_good.copy(), _good.copy()], names=["a", "b"]
        ),
        "C-contiguous",
    ),
    "group with a read-only out": (
        lambda c: c.grouped_ordered_all_reduce([[_good], [_good]], [_read_only(), _good.copy()], names=["a", "b"]),
        "not writable",
    ),
    "group with an out too short": (
        lambda c: c.grouped_ordered_all_reduce([[_good], [_good]], [_good[:3].copy(), _good], names=["a", "b"]),
        "out",
    ),
    "started with a list": (lambda c: c.start_all_reduce([1.0], name="x"), "list"),
    "started read-only": (lambda c: c.start_all_reduce(_read_only(), name="x"), "not writable"),
    "started with bool": (lambda c: c.start_all_reduce(np.zeros(4, bool), name="x"), "bool"),
    "started with different shapes": (
        lambda c: c.start_ordered_all_reduce([_good, np.zeros(5, "f4")], np.zeros(4, "f4"), name="x"),
        "5",
    ),
    "started with a short out": (
        lambda c: c.start_ordered_all_reduce([_good], np.zeros(3, "f4"), name="x"),
        "out",
    ),
    "started with another dtype out": (
        lambda c: c.start_ordered_all_reduce([_good], np.zeros(4), name="x"),
        "out",
    ),
    "started gather into the wrong shape": (
        lambda c: c.start_all_gather(_good, np.zeros((9, 4), "f4"), name="x"),
        "out",
    ),
}
# Each call reads four or more elements of a line and writes others that overlap with them.
_line = np.zeros(64, np.float32)
_OVERLAPS: dict[str, Wrong] = {
    "behind the first contribution": lambda c: c.ordered_all_reduce([_line[:4], _good], _line[1:5]),
    "before the second contribution": lambda c: c.ordered_all_reduce([_good, _line[4:8]], _line[1:5]),
    "a mean": lambda c: c.ordered_all_reduce([_line[:4]], _line[3:7], "mean"),
    "started": lambda c: c.start_ordered_all_reduce([_line[:4]], _line[1:5], name="x"),
    "gather behind the buffer": lambda c: c.all_gather(
        _line[4 * c.rank + 1 : 4 * c.rank + 5], _line[: 4 * c.size].reshape(c.size, 4)
    ),
    "started gather": lambda c: c.start_all_gather(
        _line[4 * c.rank + 1 : 4 * c.rank + 5], _line[: 4 * c.size].reshape(c.size, 4), name="x"
    ),
    "scatter behind the own block": lambda c: c.reduce_scatter(
        _line[: 4 * c.size], _line[4 * c.rank + 1 : 4 * c.rank + 5]
    ),
    "scatter of contributions": lambda c: c.ordered_reduce_scatter(
        [np.zeros(4 * c.size, "f4"), _line[: 4 * c.size]], _line[4 * c.rank + 1 : 4 * c.rank + 5]
    ),
    "started scatter": lambda c: c.start_reduce_scatter(
        _line[: 4 * c.size], _line[4 * c.rank + 1 : 4 * c.rank + 5], name="x"
    ),
    "two results of a group": lambda c: c.grouped_ordered_all_reduce(
        [[_good], [_good]], [_line[:4], _line[3:7]], names=["a", "b"]
    ),
    "a result in another tensor of a group": lambda c: c.grouped_ordered_all_reduce(
        [[_good], [_line[:4]]], [_line[:4], _line[10:14]], names=["a", "b"]
    ),
}
_WRONG_VALUES: dict[str, tuple[Wrong, str]] = {
    "unknown op": (lambda c: c.all_reduce(_good.copy(), "product"), "product.*use one of sum, mean, min, max"),
    "unknown ordered op": (lambda c: c.ordered_all_reduce([_good], op="and"), "use one of sum, mean, min, max"),
    "unknown started op": (
        lambda c: c.start_all_reduce(_good.copy(), "prod", name="x"),
        "use one of sum, mean, min, max",
    ),
    "root too large": (lambda c: c.broadcast(_good.copy(), c.size), "the ranks are 0 to"),
    "negative root": (lambda c: c.broadcast(_good.copy(), -1), "root is -1"),
    "started root too large": (lambda c: c.start_broadcast(_good.copy(), 99, name="x"), "root is 99"),
    "no contributions": (lambda c: c.ordered_all_reduce([]), "without contributions"),
    "started without contributions": (
        lambda c: c.start_ordered_all_reduce([], np.zeros(4, "f4"), name="x"),
        "without contributions",
    ),
    "scatter of a scalar": (lambda c: c.reduce_scatter(np.array(1.0)), "first axis"),
    "scatter of nothing": (lambda c: c.ordered_reduce_scatter([]), "without contributions"),
    "group of an unknown op": (
        lambda c: c.grouped_ordered_all_reduce(
            [[_good], [_good]], [_good.copy(), _good.copy()], "and", names=["a", "b"]
        ),
        "use one of sum, mean, min, max",
    ),
    "group with too few contributions": (
        lambda c: c.grouped_ordered_all_reduce([[_good]], [_good.copy(), _good.copy()], names=["a", "b"]),
        "give one of each for every tensor",
    ),
    "group with too few outs": (
        lambda c: c.grouped_ordered_all_reduce([[_good], [_good]], [_good.copy()], names=["a", "b"]),
        "give one of each for every tensor",
    ),
    "group with too few names": (
        lambda c: c.grouped_ordered_all_reduce([[_good], [_good]], [_good.copy(), _good.copy()], names=["a"]),
        "give one of each for every tensor",
    ),
    "group with too many names": (
        lambda c: c.grouped_ordered_all_reduce([[_good], [_good]], [_good.copy(), _good.copy()], names=["a", "b", "c"]),
        "give one of each for every tensor",
    ),
    "group without contributions": (
        lambda c: c.grouped_ordered_all_reduce([[_good], []], [_good.copy(), _good.copy()], names=["a", "b"]),
        "have 0 or 1 contributions; give one array per local replica",
    ),
    "group with unequal numbers of contributions": (
        lambda c: c.grouped_ordered_all_reduce([[_good], [_good] * 2], [_good.copy(), _good.copy()], names=["a", "b"]),
        "have 1 or 2 contributions",
    ),
    "start without a name": (lambda c: c.start_all_reduce(_good.copy(), name=""), "name"),
    "start of a broadcast without a name": (lambda c: c.start_broadcast(_good.copy(), name=""), "name"),
    "start of a gather without a name": (lambda c: c.start_all_gather(_good, name=""), "name"),
    "start of a scatter without a name": (
        lambda c: c.start_reduce_scatter(np.zeros((c.size, 1)), name=""),
        "name",
    ),
    "ordered start without a name": (
        lambda c: c.start_ordered_all_reduce([_good], np.zeros(4, "f4"), name=""),
        "name",
    ),
}


def _refused_alone(communicator: Communicator, wrong: Wrong, error: type[Exception], message: str, rank: int) -> None:
    """Assert that the call fails on `rank` while no other rank takes part, and leaves the ranks in step."""
    before = communicator.calls_made
    caught: Exception | None = None
    if communicator.rank == rank:
        try:
            wrong(communicator)
        except Exception as refusal:
            caught = refusal
    assert communicator.calls_made == before
    communicator.barrier()
    if communicator.rank == rank:
        assert isinstance(caught, error), repr(caught)
        assert re.search(message, str(caught)), caught


@suite.add_for_each(tuple(_WRONG_BUFFERS), about=About.ARGUMENTS)
def a_wrong_buffer_is_refused_before_other_ranks_are_involved(communicator: Communicator, case: str) -> None:
    wrong, message = _WRONG_BUFFERS[case]
    _refused_alone(communicator, wrong, UnsupportedBufferError, message, communicator.size - 1)


@suite.add_for_each(tuple(_OVERLAPS), about=About.ARGUMENTS)
def a_result_that_partly_overlaps_its_inputs_is_refused(communicator: Communicator, case: str) -> None:
    _refused_alone(communicator, _OVERLAPS[case], UnsupportedBufferError, "overlap partly|share memory", 0)


@suite.add_for_each(tuple(_WRONG_VALUES), about=About.ARGUMENTS)
def a_wrong_value_is_refused_before_other_ranks_are_involved(communicator: Communicator, case: str) -> None:
    wrong, message = _WRONG_VALUES[case]
    _refused_alone(communicator, wrong, ValueError, message, communicator.size - 1)


@suite.add_about(About.ARGUMENTS, at_least=2)
def a_length_that_does_not_divide_is_not_scattered(communicator: Communicator) -> None:
    def wrong(c: Communicator) -> object:
        return c.reduce_scatter(np.zeros(c.size * 3 + 1))

    _refused_alone(communicator, wrong, ValueError, "multiple of the number of ranks", 0)


@suite.add_about(About.ARGUMENTS, at_least=2)
def only_the_root_of_a_broadcast_may_be_read_only(communicator: Communicator) -> None:
    last = communicator.size - 1
    _refused_alone(communicator, lambda c: c.broadcast(_read_only()), UnsupportedBufferError, "not writable", last)


@suite.add_about(About.ARGUMENTS)
def a_wrong_buffer_is_a_type_error(communicator: Communicator) -> None:
    with pytest.raises(TypeError, match="convert it with np.asarray"):
        communicator.all_reduce([1.0])


# ---- closing


@suite.add
def a_closed_communicator_refuses_calls(communicator: Communicator) -> None:
    group = twin_of(communicator)
    group.close()
    group.close()
    with pytest.raises(ClosedError, match="closed"):
        group.barrier()
    with pytest.raises(ClosedError, match="closed"):
        group.start_all_reduce(np.zeros(3), name="late")
    communicator.barrier()


@suite.add
def leaving_the_block_closes(communicator: Communicator) -> None:
    with twin_of(communicator) as group:
        group.barrier()
    with pytest.raises(ClosedError):
        group.all_reduce(np.zeros(3))


@suite.add
def leaving_the_block_with_an_error_waits_for_no_other_rank(communicator: Communicator) -> None:
    class OwnError(Exception):
        pass

    group = twin_of(communicator)
    if communicator.rank == 0:
        with pytest.raises(OwnError), group:
            raise OwnError
    communicator.barrier()
    group.abandon()
    with pytest.raises(CollectiveError):
        group.barrier()


@suite.add
def calls_are_counted(communicator: Communicator) -> None:
    before = communicator.calls_made
    communicator.barrier()
    communicator.all_reduce(np.zeros(3))
    communicator.start_all_reduce(np.zeros(3), name="not counted").wait()
    assert communicator.calls_made == before + 2


@suite.add
def all_ranks_use_the_same_mechanism(communicator: Communicator) -> None:
    assert len(set(texts_of_all_ranks(communicator, communicator.mechanism))) == 1
