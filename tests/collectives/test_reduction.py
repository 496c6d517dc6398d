"""The arithmetic of the ordered reduction compared with plain NumPy, for all dtypes and without ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from reference import FLOATS, INTEGERS, OPERATIONS, REDUCIBLE, chained, contributions, dtype_of, reduced
from statements import assert_same_bits

from collectives.reduction import BLOCK_BYTES, Reduction, join, normalise_op, shares
from collectives.tree import TreeNode, subtrees

pytestmark = pytest.mark.usefixtures("with_either")

COUNTS = (1, 2, 3, 5, 8, 12)
LENGTHS = (0, 1, 7, 3001)


def longer_than_a_block(dtype: str) -> int:
    return 2 * BLOCK_BYTES // np.dtype(dtype_of(dtype)).itemsize + 5


def result_of(op: str, sources: Sequence[np.ndarray], count: int | None = None) -> np.ndarray:
    out = np.empty_like(sources[0])
    Reduction(op, out.dtype).reduce(sources, out, count or len(sources))
    return out


# ---- results


@pytest.mark.parametrize("dtype", REDUCIBLE)
def test_contributions_are_combined_in_the_order_of_the_tree(dtype: str) -> None:
    for op in OPERATIONS:
        for count in COUNTS:
            for length in (*LENGTHS, longer_than_a_block(dtype)):
                sources = contributions(dtype, length, range(count))
                assert_same_bits(result_of(op, sources), reduced(sources, op), (op, count, length))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_swap_of_two_replicas_changes_the_sum(dtype: str) -> None:
    """Without this, the test above would prove little. A swap within the first pair to be added changes nothing."""
    sources = contributions(dtype, 3001, range(12))
    for first in range(11):
        swapped = [*sources[:first], sources[first + 1], sources[first], *sources[first + 2 :]]
        assert (result_of("sum", sources) == result_of("sum", swapped)).all() == (first % 2 == 0), first


@pytest.mark.parametrize("dtype", REDUCIBLE)
def test_ranks_that_add_their_own_contributions_get_the_result_of_one_rank(dtype: str, seed: int) -> None:
    """Each rank folds the largest nodes inside of its block, for any block boundaries; one rank finishes."""
    chance = np.random.default_rng(seed)
    for op in OPERATIONS:
        reduction = Reduction(op, dtype_of(dtype))
        if reduction.divides_first:
            continue
        sources = contributions(dtype, 3001, range(9))
        ends = [0, *sorted(chance.choice(np.arange(1, 9), 2, replace=False)), 9]
        nodes = [node for start, stop in pairwise(ends) for node in subtrees(start, stop, 9)]
        sums = [np.empty(3001, reduction.dtype_of(node)) for node in nodes]
        for node, total in zip(nodes, sums, strict=True):
            reduction.fold(sources[node.first : node.stop], total)
        out = np.empty(3001, reduction.dtype)
        reduction.reduce(sums, out, 9, tuple(nodes))
        assert_same_bits(out, reduced(sources, op), (op, ends))


@pytest.mark.parametrize("dtype", REDUCIBLE)
@pytest.mark.parametrize("length", [7, 3001])
def test_the_result_may_replace_the_last_sum(dtype: str, length: int) -> None:
    nodes = (TreeNode(0, 4), TreeNode(4, 5), TreeNode(5, 6), TreeNode(6, 8))
    for op in ("sum", "mean", "max"):
        reduction = Reduction(op, dtype_of(dtype))
        if not reduction.is_direct:
            continue
        contributed = contributions(dtype, length, range(8))
        for position in range(4):
            sources = [reduced(contributed[node.first : node.stop], "max" if op == "max" else "sum") for node in nodes]
            reduction.reduce(sources, sources[position], 8, nodes)
            assert_same_bits(sources[position], reduced(contributed, op), (op, position))


@pytest.mark.parametrize("dtype", REDUCIBLE)
def test_a_complete_partial_result_is_finished(dtype: str) -> None:
    for op in OPERATIONS:
        reduction = Reduction(op, dtype_of(dtype))
        if reduction.divides_first:
            continue
        sources = contributions(dtype, 3001, range(3))
        total = np.empty(3001, reduction.accumulator)
        reduction.fold(sources, total)
        out = total if reduction.is_direct else np.empty(3001, reduction.dtype)
        reduction.finish(total, out, 3)
        assert_same_bits(out, reduced(sources, op), op)


@pytest.mark.parametrize("dtype", REDUCIBLE)
@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_result_may_replace_any_contribution_and_leaves_the_others(dtype: str, count: int) -> None:
    for op in ("sum", "mean", "max"):
        for length in (7, longer_than_a_block(dtype)):
            originals = contributions(dtype, length, range(count))
            for position in range(count):
                sources = [array.copy() for array in originals]
                Reduction(op, dtype_of(dtype)).reduce(sources, sources[position], count)
                assert_same_bits(sources[position], reduced(originals, op), (op, length, position))
                for number in set(range(count)) - {position}:
                    assert_same_bits(sources[number], originals[number], (op, length, position))


@pytest.mark.parametrize("dtype", REDUCIBLE)
@pytest.mark.parametrize("position", range(4))
def test_a_fold_may_replace_one_of_its_sources(dtype: str, position: int) -> None:
    reduction = Reduction("sum", dtype_of(dtype))
    originals = [array.astype(reduction.accumulator) for array in contributions(dtype, 3001, range(4))]
    sources = [array.copy() for array in originals]
    reduction.fold(sources, sources[position])
    assert_same_bits(sources[position], reduced(originals, "sum"))


def test_one_source_folds_to_itself() -> None:
    (source,) = contributions("float32", 7, range(1))
    into = source.copy()
    Reduction("sum", np.dtype("float32")).fold([into], into)
    assert_same_bits(into, source)
    other = np.empty(7, np.float64)
    Reduction("sum", np.dtype("float64")).fold([source], other)
    assert_same_bits(other, source.astype(np.float64))


# ---- dtypes of partial results


WIDER_SUMS = {"float16": "float32", "bfloat16": "float32"}
WIDER_MEANS = WIDER_SUMS | {
    f"{sign}int{bits}": f"{sign}int{wide}" for sign in ("", "u") for bits, wide in ((8, 32), (16, 32), (32, 64))
}


@pytest.mark.parametrize("dtype", REDUCIBLE)
@pytest.mark.parametrize("op", OPERATIONS)
def test_sums_of_16_bit_floats_and_means_of_integers_are_kept_wider(dtype: str, op: str) -> None:
    reduction = Reduction(op, dtype_of(dtype))
    wider = {"sum": WIDER_SUMS, "mean": WIDER_MEANS}.get(op, {})
    assert reduction.accumulator == dtype_of(wider.get(dtype, dtype))
    assert reduction.divides_first == (op == "mean" and dtype in ("int64", "uint64"))
    assert reduction.is_direct == (dtype not in wider and not reduction.divides_first)
    assert reduction.dtype_of(TreeNode(3, 4)) == dtype_of(dtype)
    assert reduction.dtype_of(TreeNode(0, 2)) == reduction.accumulator


def test_the_error_of_a_sum_grows_with_the_logarithm() -> None:
    """The error is at most half as large as a sequential sum's."""
    sources = [np.random.default_rng(number).standard_normal(20_000).astype(np.float32) for number in range(64)]
    exact = np.sum([source.astype(np.float64) for source in sources], axis=0)
    of_tree, of_chain = (
        np.sqrt(np.mean((total - exact) ** 2)) for total in (result_of("sum", sources), chained(sources))
    )
    assert of_tree <= of_chain / 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_floats_are_rounded_once(dtype: str) -> None:
    """The sum 1 + u/2 + u/2 is 1 + u, although each u/2 alone would be lost."""
    unit = float(ml_dtypes.finfo(dtype_of(dtype)).eps)
    sources = [np.array([value], dtype_of(dtype)) for value in (1, unit / 2, unit / 2)]
    assert result_of("sum", sources)[0] == 1 + unit


# ---- means


@pytest.mark.parametrize("dtype", INTEGERS)
def test_a_mean_of_integers_is_truncated_towards_zero(dtype: str, seed: int) -> None:
    chance = np.random.default_rng(seed)
    info = np.iinfo(dtype)
    values = chance.integers(info.min, info.max, 500, dtype, endpoint=True)
    values[:4] = (info.min, info.max, 0, 1)
    for count in (1, 2, 3, 7, 8, 100):
        sources = [values, *(np.zeros_like(values) for _ in range(count - 1))]
        expected = [abs(value) // count * (1 if value >= 0 else -1) for value in values.tolist()]
        assert result_of("mean", sources).tolist() == expected, count


@pytest.mark.parametrize("dtype", INTEGERS)
def test_a_mean_of_integers_is_right_where_their_sum_does_not_fit(dtype: str) -> None:
    """The mean of 250 to 253 as uint8 is 251.5, and that of -128 to -125 as int8 is -126.5; both are truncated."""
    info = np.iinfo(dtype)
    largest = [np.full(3, info.max - 2 - number, dtype) for number in range(4)]
    assert result_of("mean", largest).tolist() == [info.max - 4] * 3
    smallest = [np.full(3, info.min + number, dtype) for number in range(4)]
    assert result_of("mean", smallest).tolist() == [1 if info.min == 0 else info.min + 2] * 3


@pytest.mark.parametrize("dtype", INTEGERS)
def test_a_total_added_in_the_dtype_itself_is_divided(dtype: str) -> None:
    total = np.array([100, 99, 7, 0], dtype)
    out = np.empty_like(total)
    Reduction("mean", out.dtype).finish(total, out, 200)
    assert out.tolist() == [0, 0, 0, 0]
    Reduction("mean", out.dtype).finish(total, total, 3)
    assert total.tolist() == [33, 33, 2, 0]


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_64_bit_quotients_and_remainders_are_joined_to_the_mean(dtype: str, count: int) -> None:
    sources = contributions(dtype, 3001, range(count))
    out = np.empty(3001, dtype)
    join(*(result_of("sum", parts) for parts in shares(sources, count)), out, count)
    assert_same_bits(out, reduced(sources, "mean"))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_mean_is_divided_once_by_the_number_of_contributions(dtype: str) -> None:
    for count in range(1, 18):
        total = contributions(dtype, 3001, range(1))[0]
        out = total.copy()
        Reduction("mean", dtype_of(dtype)).finish(out, out, count)
        assert_same_bits(out, total / total.dtype.type(count), count)


@pytest.mark.parametrize("count", [3, 4])
def test_the_count_of_a_mean_is_that_of_all_ranks(count: int) -> None:
    sources = contributions("float32", 7, range(2))
    assert_same_bits(result_of("mean", sources, count), (sources[0] + sources[1]) / np.float32(count))


# ---- special values


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", OPERATIONS)
def test_nan_in_any_position_wins(dtype: str, op: str) -> None:
    for position in range(3):
        sources = [np.full(7, number, dtype_of(dtype)) for number in range(3)]
        sources[position][::2] = np.nan
        result = result_of(op, sources).astype(np.float64)
        assert np.isnan(result[::2]).all()
        assert not np.isnan(result[1::2]).any()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_overflow_and_infinities_are_results_and_no_errors(dtype: str) -> None:
    largest = np.full(longer_than_a_block(dtype), np.finfo(dtype).max, dtype)
    infinite = np.full_like(largest, np.inf)
    with np.errstate(all="raise"):
        assert (result_of("sum", [largest, largest]) == np.inf).all()
        assert np.isnan(result_of("sum", [infinite, -infinite])).all()
        assert (result_of("mean", [infinite, largest]) == np.inf).all()
        in_float32 = result_of("sum", [largest, largest, -largest])
    assert (in_float32 == (largest[0] if dtype == "float16" else np.inf)).all()


@pytest.mark.parametrize("dtype", INTEGERS)
def test_sums_of_integers_wrap(dtype: str) -> None:
    largest = np.full(7, np.iinfo(dtype).max, dtype)
    assert_same_bits(result_of("sum", [largest, np.ones_like(largest)]), np.full(7, np.iinfo(dtype).min, dtype))


# ---- names


@pytest.mark.parametrize("op", OPERATIONS)
def test_names_of_operations_ignore_case(op: str) -> None:
    assert normalise_op(op.upper()) == normalise_op(op.title()) == op


@pytest.mark.parametrize("op", ["product", "", "avg", None])
def test_an_unknown_operation_is_answered_with_the_known_ones(op: object) -> None:
    with pytest.raises(ValueError, match="use one of sum, mean, min, max"):
        normalise_op(op)  # type: ignore[arg-type]
