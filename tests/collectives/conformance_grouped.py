"""Statements about every communicator that reduces several tensors in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np
import pytest
from conformance_checks import HEADLINE
from reference import LARGE, OPERATIONS, SPREADS, Reduced, contributions, dtype_of, replicas_of_ranks
from statements import About, Suite, assert_all_reduced, assert_same_bits, texts_of_all_ranks

from collectives import Communicator, LayoutMismatchError

suite = Suite()


@dataclass(frozen=True)
class Tensor:
    """A tensor of a group."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def arrays(self, replicas: Sequence[int]) -> list[np.ndarray]:
        """Return the contributions of these replicas."""
        length = int(np.prod(self.shape))
        return [array.reshape(self.shape) for array in contributions(self.dtype, length, replicas)]

    def empty(self) -> np.ndarray:
        return np.empty(self.shape, dtype_of(self.dtype))


MIXED = (
    Tensor("kernel", "float32", (211, 33)),
    Tensor("bias", "float32", (33,)),
    Tensor("scale", "float16", ()),
    Tensor("nothing", "float32", (0, 4)),
    Tensor("table", "bfloat16", (3, 5, 700)),
    Tensor("moment", "float64", (70_001,)),
    Tensor("steps", "int64", (1,)),
    Tensor("counts", "uint16", (40_000,)),
    Tensor("flags", "int8", (7,)),
)
FLOATS_ONLY = tuple(tensor for tensor in MIXED if tensor.dtype.startswith("float"))
MANY = tuple(Tensor(f"layer {number}", "float32", (number * 37 % 501,)) for number in range(120))
LARGE_ONES = (Tensor("first", "float32", (LARGE,)), Tensor("second", "float16", (LARGE // 7, 7)))


@lru_cache(maxsize=64)
def _reduced(tensor: Tensor, count: int, op: str) -> Reduced:
    return Reduced(tensor.arrays(range(count)), op)


def _reduce(
    communicator: Communicator,
    tensors: Sequence[Tensor],
    op: str = "sum",
    spread: str = "one each",
    outs: Sequence[np.ndarray] = (),
) -> None:
    """Assert that one call for all tensors, with results in `outs`, equals one call for each tensor."""
    of_ranks = replicas_of_ranks(spread, communicator.size)
    mine = [tensor.arrays(of_ranks[communicator.rank]) for tensor in tensors]
    outs = outs or [tensor.empty() for tensor in tensors]
    names = [tensor.name for tensor in tensors]
    assert communicator.grouped_ordered_all_reduce(mine, outs, op, names=names) is outs
    for tensor, out in zip(tensors, outs, strict=True):
        expected = _reduced(tensor, of_ranks[-1].stop, op)
        assert_all_reduced(communicator, out, expected, (tensor, op, spread), is_grouped=True)


# ---- results


@suite.add_for_each(tuple(product(OPERATIONS, SPREADS)), about=About.NUMBERS)
def a_group_has_the_results_of_single_calls(communicator: Communicator, case: tuple[str, str]) -> None:
    op, spread = case
    _reduce(communicator, MIXED, op, spread)


@suite.add_for_each(("sum", "mean"), about=About.NUMBERS)
def a_group_of_large_tensors_has_the_results_of_single_calls(communicator: Communicator, op: str) -> None:
    _reduce(communicator, LARGE_ONES, op, "two each")


@suite.add_for_each(("sum", "max"), about=About.NUMBERS)
def a_group_may_have_many_tensors(communicator: Communicator, op: str) -> None:
    _reduce(communicator, MANY, op)


@suite.add
def a_group_may_have_one_tensor_or_none(communicator: Communicator) -> None:
    _reduce(communicator, MIXED[:1])
    assert communicator.grouped_ordered_all_reduce([], [], names=[]) == []


@suite.add
def a_group_may_have_only_empty_tensors(communicator: Communicator) -> None:
    _reduce(communicator, [Tensor("nothing", "float32", (0,)), Tensor("no more", "int32", (3, 0))])


@suite.add
def groups_follow_each_other_and_single_calls(communicator: Communicator) -> None:
    for turn in range(10):
        _reduce(communicator, MIXED[turn % 4 :])
        buffer = np.full(3001, communicator.rank, np.int32)
        assert (communicator.all_reduce(buffer) == sum(range(communicator.size))).all()


# ---- places of results


@suite.add_for_each(tuple(product(("sum", "mean", "min"), range(3))), about=About.NUMBERS)
def results_of_a_group_may_replace_contributions(communicator: Communicator, case: tuple[str, int]) -> None:
    op, position = case
    of_ranks = replicas_of_ranks("three each", communicator.size)
    originals = [tensor.arrays(of_ranks[communicator.rank]) for tensor in MIXED]
    arrays = [[array.copy() for array in of_tensor] for of_tensor in originals]
    outs = [of_tensor[position] for of_tensor in arrays]
    communicator.grouped_ordered_all_reduce(arrays, outs, op, names=[tensor.name for tensor in MIXED])
    for tensor, after, before in zip(MIXED, arrays, originals, strict=True):
        expected = _reduced(tensor, of_ranks[-1].stop, op)
        assert_all_reduced(communicator, after[position], expected, tensor, is_grouped=True)
        for number in {0, 1, 2} - {position}:
            assert_same_bits(after[number], before[number], tensor)


@suite.add
def results_of_a_group_may_go_to_allocated_memory(communicator: Communicator) -> None:
    outs = [communicator.allocate(tensor.shape, dtype_of(tensor.dtype)) for tensor in MIXED]
    for spread in SPREADS:
        _reduce(communicator, MIXED, "mean", spread, outs)


# ---- different calls


@dataclass(frozen=True)
class Odd:
    """A tensor that one rank gives in place of the second to last of FLOATS_ONLY, and the words of messages about
    it.
    """

    tensor: Tensor
    words: tuple[str, ...]


ODD = {
    "resized": Odd(Tensor("nothing", "float32", (0, 5)), ("'nothing'", "float32[0,4]", "float32[0,5]")),
    "larger": Odd(Tensor("nothing", "float32", (LARGE,)), ("'nothing'", "float32[0,4]", f"float32[{LARGE}]")),
    "retyped": Odd(Tensor("nothing", "int32", (0, 4)), ("'nothing'", "float32[0,4]", "int32[0,4]")),
    "renamed": Odd(Tensor("something", "float32", (0, 4)), ("'nothing'", "'something'")),
}


@suite.add_for_each(tuple(ODD), at_least=2, about=About.CALLS)
def one_different_tensor_of_a_group_fails_on_all_ranks(communicator: Communicator, case: str) -> None:
    position = len(FLOATS_ONLY) - 2
    for odd_rank in {0, communicator.size - 1}:
        tensors = list(FLOATS_ONLY)
        if communicator.rank == odd_rank:
            tensors[position] = ODD[case].tensor
        arrays = [tensor.arrays([communicator.rank])[0].copy() for tensor in tensors]
        before = [array.copy() for array in arrays]
        with pytest.raises(LayoutMismatchError, match=HEADLINE) as caught:
            communicator.grouped_ordered_all_reduce(
                [[array] for array in arrays], arrays, names=[tensor.name for tensor in tensors]
            )
        text = str(caught.value)
        assert texts_of_all_ranks(communicator, text) == [text] * communicator.size
        missing = [word for word in (*ODD[case].words, f"rank {odd_rank} called") if word not in text]
        assert not missing, f"{missing} not in {text!r}"
        untouched = 0 if communicator.mechanism == "horovod" else position  # several calls may fail in the middle
        for array, original in zip(arrays[untouched:], before[untouched:], strict=True):
            assert_same_bits(array, original, case)
        _reduce(communicator, FLOATS_ONLY)


@suite.add_for_groups
def another_op_of_a_group_fails_on_all_ranks_and_leaves_all_buffers_unchanged(communicator: Communicator) -> None:
    op = "max" if communicator.rank == 0 else "sum"
    arrays = [tensor.arrays([communicator.rank])[0].copy() for tensor in FLOATS_ONLY]
    before = [array.copy() for array in arrays]
    with pytest.raises(LayoutMismatchError, match=HEADLINE) as caught:
        communicator.grouped_ordered_all_reduce(
            [[array] for array in arrays], arrays, op, names=[tensor.name for tensor in FLOATS_ONLY]
        )
    text = str(caught.value)
    assert texts_of_all_ranks(communicator, text) == [text] * communicator.size
    assert all(word in text for word in ("'kernel'", "max", "sum", "rank 0 called")), text
    for array, original in zip(arrays, before, strict=True):
        assert_same_bits(array, original)
