"""Statements about `popdist.horovod` in every process of a job: `horovod_statements.py FOLDER` checks all of them.

Each process writes its failures into the folder: a JSON object of tracebacks by the names of the statements.
"""

import json
import os
import sys
import threading
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from reference import FLOATS, INTEGERS, MOVABLE, REDUCIBLE, contribution, dtype_of
from statements import Suite, assert_same_bits, failure_of

from collectives import LayoutMismatchError, UnsupportedBufferError

SUITE = Suite()
REDUCTIONS = {"Sum": np.add, "Min": np.minimum, "Max": np.maximum, "Product": np.multiply}
MISMATCH = "Tensor layouts did not match on all instances: "


def ranks(hvd):
    return range(hvd.size())


def assert_usable(hvd):
    assert hvd.allreduce(1.0, hvd.Sum) == hvd.size()


def assert_same_in_all(hvd, array):
    """Assert that all processes have the same bits."""
    rows = hvd.allgather(np.frombuffer(array.tobytes(), np.uint8)[None])
    assert (rows == rows[0]).all()


def small(dtype, rank):
    """Return values whose sums and products over three processes are exact in any order."""
    return np.array([1, 2, 3, 0, rank + 1], dtype_of(dtype))


# ---- basics


@SUITE.add
def the_backend_is_mpi_and_ranks_are_those_of_open_mpi(hvd):
    assert hvd.mpi_built()
    assert hvd.mpi_enabled()
    assert not any([hvd.nccl_built(), hvd.ddl_built(), hvd.gloo_built(), hvd.gloo_enabled()])
    assert hvd.rank() == int(os.environ["OMPI_COMM_WORLD_RANK"])
    assert hvd.local_rank() == int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"])
    assert hvd.size() == hvd.local_size() == int(os.environ["OMPI_COMM_WORLD_SIZE"])
    assert hvd.is_homogeneous()


@SUITE.add
def collectives_accept_scalars(hvd):
    value = np.float32(hvd.rank())
    np.testing.assert_array_equal(hvd.allgather(value[None]), np.arange(hvd.size(), dtype=np.float32))
    assert hvd.allreduce(value, hvd.Sum) == sum(ranks(hvd))
    assert hvd.allreduce(value) == np.float32(sum(ranks(hvd))) / np.float32(hvd.size())
    assert hvd.broadcast(value, 0) == 0.0


# ---- initialisation


@SUITE.add
def init_may_be_repeated(hvd):
    hvd.init()
    assert hvd.is_initialized()


@SUITE.add
def mpi_may_be_called_by_several_threads(hvd):
    assert hvd.mpi_threads_supported() is True


# ---- allreduce


@SUITE.add_for_each(REDUCIBLE)
def each_reduction_is_that_of_numpy(hvd, dtype):
    for name, ufunc in REDUCTIONS.items():
        if name in ("Min", "Max") and dtype in ("uint32", "uint64"):
            continue
        wanted = ufunc.reduce([small(dtype, rank) for rank in ranks(hvd)], dtype=dtype_of(dtype))
        assert_same_bits(hvd.allreduce(small(dtype, hvd.rank()), getattr(hvd, name)), wanted, name)


@SUITE.add_for_each(FLOATS)
def the_default_is_the_average(hvd, dtype):
    mean = hvd.allreduce(np.array([hvd.rank(), 7], dtype_of(dtype)))
    wanted = np.array([sum(ranks(hvd)) / hvd.size(), 7])
    assert_same_bits(mean, wanted.astype(dtype_of(dtype)))


@SUITE.add_for_each(INTEGERS)
def the_average_of_integers_is_truncated_towards_zero(hvd, dtype):
    values = [np.array([rank, 5 * rank], dtype) for rank in ranks(hvd)]
    signs = [1] if dtype.startswith("u") else [1, -1]
    for sign in signs:
        mean = hvd.allreduce(values[hvd.rank()] * np.array(sign, dtype), hvd.Average)
        wanted = np.array([sum(ranks(hvd)) // hvd.size(), 5 * sum(ranks(hvd)) // hvd.size()], dtype)
        assert_same_bits(mean, wanted * np.array(sign, dtype))


def truncated_mean(values, after=1):
    """Return the mean of Python integers of any size, truncated towards zero."""
    total = sum(values) * after
    return abs(total) // len(values) * (1 if total > 0 else -1)


@SUITE.add_for_each(INTEGERS)
def the_average_of_integers_is_right_where_their_sum_does_not_fit(hvd, dtype):
    limits = np.iinfo(dtype)
    columns = [
        [limits.max - rank for rank in ranks(hvd)],
        [limits.min + rank for rank in ranks(hvd)],
        [limits.max if rank else limits.min for rank in ranks(hvd)],
        [limits.max // 2 + rank for rank in ranks(hvd)],
    ]
    mean = hvd.allreduce(np.array([column[hvd.rank()] for column in columns], dtype))
    assert_same_bits(mean, np.array([truncated_mean(column) for column in columns], dtype))


@SUITE.add
def averages_of_a_group_are_each_of_their_own_dtype(hvd):
    tensors = [np.full(3, 250, np.uint8), np.full((2, 2), 1.5), np.array([(1 << 63) - 1]), np.ones(0, np.int16)]
    for mean, tensor in zip(hvd.grouped_allreduce(tensors), tensors, strict=True):
        assert_same_bits(mean, tensor)


@SUITE.add_for_each(("int8", "int16", "int32", "int64", "uint8", "uint16"))
def averages_of_integers_with_factors_are_right_where_their_sum_does_not_fit(hvd, dtype):
    most = min(np.iinfo(dtype).max, 1 << 40)
    value = np.array([most - hvd.rank(), most // 2], dtype)
    halves = hvd.allreduce(value, prescale_factor=0.5)
    assert_same_bits(halves, np.array([truncated_mean([(most - r) // 2 for r in ranks(hvd)]), most // 2 // 2], dtype))
    doubled = hvd.allreduce(value, postscale_factor=0.5)
    wanted = sum(most - rank for rank in ranks(hvd)) // 2 // hvd.size()
    assert_same_bits(doubled, np.array([wanted, most // 2 * hvd.size() // 2 // hvd.size()], dtype))
    grouped = hvd.grouped_allreduce([value, np.float32([3])], postscale_factor=0.5)
    assert_same_bits(grouped[1], np.float32([1.5]))


@SUITE.add_for_each(("int8", "int16", "int32", "int64", "uint8", "uint16"))
def averages_of_integers_that_do_not_fit_are_refused_by_all(hvd, dtype):
    most = np.iinfo(dtype).max
    factors = [{"prescale_factor": 2.0}, {"postscale_factor": 2.0}, {"prescale_factor": 1e30}]
    for each in (*factors, {"postscale_factor": float("inf")}):
        with pytest.raises(ValueError, match=f"the average of {dtype} with the factors .* does not fit into {dtype}"):
            hvd.allreduce(np.array([1, most], dtype), **each)
    assert_usable(hvd)


@SUITE.add_for_each(INTEGERS)
def sums_of_integers_wrap_around(hvd, dtype):
    largest = np.array([np.iinfo(dtype).max], dtype)
    with np.errstate(over="ignore"):
        wanted = np.add.reduce([largest] * hvd.size(), dtype=dtype)
    assert_same_bits(hvd.allreduce(largest, hvd.Sum), wanted)


@SUITE.add
def floats_of_16_bits_are_added_in_32_bits_and_rounded_once(hvd):
    value = np.float16([2048 if hvd.rank() == 0 else 1.5])
    wanted = np.float16([2048 + 1.5 * (hvd.size() - 1)])
    assert_same_bits(hvd.allreduce(value, hvd.Sum), wanted)


@SUITE.add_for_each(("float16", "bfloat16", "float32", "float64"))
def floats_are_multiplied_before_and_afterwards(hvd, dtype):
    value = np.array([hvd.rank() + 1, 4], dtype_of(dtype))
    total = np.array([sum(rank + 1 for rank in ranks(hvd)), 4 * hvd.size()])
    tripled = hvd.allreduce(value, hvd.Sum, prescale_factor=0.5, postscale_factor=6.0)
    assert_same_bits(tripled, (3 * total).astype(dtype_of(dtype)))
    doubled = hvd.allreduce(value, prescale_factor=0.5, postscale_factor=4.0)
    assert_same_bits(doubled, (2 * total / hvd.size()).astype(dtype_of(dtype)))


@SUITE.add
def the_factor_before_is_applied_to_each_value(hvd):
    large = np.float32([3e38])  # the sum of two is infinite
    assert hvd.allreduce(large, hvd.Sum, prescale_factor=1 / 8) == np.float32(3e38 / 8) * hvd.size()
    assert np.isinf(hvd.allreduce(large, hvd.Sum, postscale_factor=1 / 8)).all()


@SUITE.add_for_each(("int8", "int16", "int32", "int64", "uint8", "uint16"))
def integers_are_multiplied_in_float64_and_truncated(hvd, dtype):
    value, size = np.array([5, 2], dtype_of(dtype)), hvd.size()
    before = hvd.allreduce(value, hvd.Sum, prescale_factor=0.5)
    assert_same_bits(before, np.array([2 * size, size], value.dtype))
    afterwards = hvd.allreduce(value, hvd.Sum, postscale_factor=0.5)
    assert_same_bits(afterwards, np.array([5 * size // 2, size], value.dtype))
    if np.dtype(dtype).kind == "i":
        assert_same_bits(hvd.allreduce(-value, prescale_factor=0.5), np.array([-2, -1], value.dtype))


@SUITE.add
def invalid_reductions_and_factors_are_refused_before_communication(hvd):
    for op in ("Sum", 1, max):
        with pytest.raises(ValueError, match="Unsupported reduce op: .*; use one of popdist.horovod's Average, Sum"):
            hvd.allreduce(1.0, op)
    for factor in (None, "half", float("nan")):
        with pytest.raises(ValueError, match="prescale_factor is .*; give a number"):
            hvd.allreduce(1.0, prescale_factor=factor)
    assert_usable(hvd)


@SUITE.add
def a_scalar_stays_one(hvd):
    for value in (1.0, 1, np.float32(1), np.ones((), np.int8)):
        total = hvd.allreduce(value, hvd.Sum)
        assert_same_bits(total, np.asarray(value) * np.asarray(hvd.size(), np.asarray(value).dtype))


@SUITE.add_for_each([(0,), (3, 0), (0, 0, 2)])
def empty_tensors_stay_empty(hvd, shape):
    assert hvd.allreduce(np.ones(shape)).shape == shape
    assert hvd.broadcast(np.ones(shape), 0).shape == shape
    assert hvd.allgather(np.ones(shape)).shape == (hvd.size() * shape[0], *shape[1:])


@SUITE.add
def tensors_may_lie_in_memory_in_any_way_and_are_not_changed(hvd):
    matrix = np.arange(12.0).reshape(3, 4)
    read_only = matrix.copy()
    read_only.flags.writeable = False
    for tensor in (matrix.T, matrix[::-1, ::2], matrix[:, 1], read_only):
        before = tensor.copy()
        np.testing.assert_array_equal(hvd.allreduce(tensor, hvd.Sum), before * hvd.size())
        np.testing.assert_array_equal(hvd.broadcast(tensor, 0), before)
        np.testing.assert_array_equal(hvd.allgather(tensor), np.concatenate([before] * hvd.size()))
        np.testing.assert_array_equal(tensor, before)
    np.testing.assert_array_equal(hvd.allreduce([[1, 2], [3, 4]], hvd.Sum), np.array([[1, 2], [3, 4]]) * hvd.size())


@SUITE.add_for_each(["Average", "Sum", "Product"])
def all_processes_get_the_same_bits(hvd, op):
    for dtype in FLOATS:
        for length in (1, 7, 100_003):
            result = hvd.allreduce(contribution(dtype, length, hvd.rank()), getattr(hvd, op))
            assert_same_in_all(hvd, result)


@SUITE.add
def unsupported_tensors_are_refused_before_communication(hvd):
    for tensor in (np.array([True]), np.complex64([1]), "text"):
        with pytest.raises(UnsupportedBufferError, match="allreduce of .*: supported are float16, bfloat16"):
            hvd.allreduce(tensor)
    masked = np.ma.masked_equal(np.arange(4, dtype=np.float32), 2)
    for call in (hvd.allreduce, hvd.allgather, lambda tensor: hvd.broadcast(tensor, 0)):
        with pytest.raises(UnsupportedBufferError, match="is masked, and its mask would be lost"):
            call(masked)
    for dtype in ("uint32", "uint64"):
        with pytest.raises(UnsupportedBufferError, match=f"Min of {dtype}: Horovod cannot compare it"):
            hvd.allreduce(np.ones(1, dtype), hvd.Min)
        with pytest.raises(UnsupportedBufferError, match=f"factors for {dtype}: Horovod cannot multiply it"):
            hvd.allreduce(np.ones(1, dtype), postscale_factor=2)
    assert_usable(hvd)


@SUITE.add
def a_group_is_reduced_together(hvd):
    rank = hvd.rank()
    tensors = [np.float32(rank), np.ones((2, 0)), np.int8([[rank, -5]]), np.full(3, rank, dtype_of("bfloat16"))]
    results = hvd.grouped_allreduce(tensors, hvd.Sum)
    for tensor, result in zip(tensors, results, strict=True):
        assert (result.shape, result.dtype) == (tensor.shape, tensor.dtype)
    total = sum(ranks(hvd))
    assert results[0] == total
    np.testing.assert_array_equal(results[2], [[total, -5 * hvd.size()]])
    np.testing.assert_array_equal(results[3].astype(np.float32), [total] * 3)
    assert hvd.grouped_allreduce([]) == []


# ---- Adasum


def adasum(a, b):
    """Return the Adasum of two gradients, which counts their common part once (Maleki et al., 2020)."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    common = float(a.ravel() @ b.ravel())
    return sum(
        vector * (1 - common / (2 * norm)) if (norm := float(vector.ravel() @ vector.ravel())) else vector
        for vector in (a, b)
    )


PAIRS = {
    "orthogonal": ([1.0, 0, 2, 0], [0, 3.0, 0, -1]),
    "parallel": ([1.0, 2, 3], [2.0, 4, 6]),
    "equal": ([0.5, -1], [0.5, -1]),
    "opposite": ([1.0, 1], [-1.0, -1]),
    "of any kind": (contribution("float64", 999, 0), contribution("float64", 999, 1)),
    "one of them zero": ([0.0, 0], [1.0, -2]),
}


@SUITE.add_for_each(PAIRS)
def adasum_is_that_of_horovod(hvd, kind):
    for dtype, tolerance in (("float32", 1e-5), ("float64", 1e-12), ("float16", 2e-3), ("bfloat16", 2e-2)):
        pair = [np.asarray(values).astype(dtype_of(dtype)) for values in PAIRS[kind]]
        mine = pair[hvd.rank() % 2]
        if hvd.size() == 2:
            found = hvd.allreduce(mine, hvd.Adasum)
            assert found.dtype == mine.dtype
            scale = max(1.0, float(np.abs(adasum(*pair)).max()))
            np.testing.assert_allclose(found.astype(np.float64), adasum(*pair), atol=tolerance * scale)
            assert_same_in_all(hvd, found)
        else:
            with pytest.raises(NotImplementedError, match="Adasum with non-power of 2"):
                hvd.allreduce(mine, hvd.Adasum)
    assert_usable(hvd)


@SUITE.add
def adasum_is_for_floats(hvd):
    with pytest.raises(UnsupportedBufferError, match="Adasum of int32: Adasum supports floats only"):
        hvd.allreduce(np.int32([1]), hvd.Adasum)


# ---- allgather and broadcast


@SUITE.add_for_each(MOVABLE)
def allgather_puts_tensors_one_after_another(hvd, dtype):
    rows = [contribution(dtype, 3 * (rank + 1), rank).reshape(-1, 3) for rank in ranks(hvd)]
    assert_same_bits(hvd.allgather(rows[hvd.rank()]), np.concatenate(rows))


@SUITE.add
def allgather_takes_tensors_without_rows(hvd):
    for empty in ranks(hvd):
        rows = [np.full((0 if rank == empty else 2, 2, 1), rank, np.int16) for rank in ranks(hvd)]
        assert_same_bits(hvd.allgather(rows[hvd.rank()]), np.concatenate(rows))


@SUITE.add
def allgather_of_a_scalar_is_refused(hvd):
    with pytest.raises(ValueError, match="allgather of a scalar, which has no first dimension"):
        hvd.allgather(1.0)
    assert_usable(hvd)


@SUITE.add_for_each(MOVABLE)
def broadcast_gives_all_the_tensor_of_the_root(hvd, dtype):
    for root in ranks(hvd):
        for length in (1, 1000):
            sent = hvd.broadcast(contribution(dtype, length, hvd.rank()), root)
            assert_same_bits(sent, contribution(dtype, length, root))
        assert hvd.broadcast(np.asarray(hvd.rank()), root) == root


@SUITE.add
def broadcast_wants_a_root_that_exists(hvd):
    for root in (-1, hvd.size()):
        with pytest.raises(ValueError, match=f"root_rank is {root}, but the processes are 0 to {hvd.size() - 1}"):
            hvd.broadcast(1.0, root)
    with pytest.raises(TypeError, match=r"root_rank is 0\.0, not a whole number"):
        hvd.broadcast(1.0, 0.0)
    assert_same_bits(hvd.broadcast(np.float32(hvd.rank()), np.int64(1)), np.float32(1))
    assert_usable(hvd)


@SUITE.add
def objects_are_not_moved(hvd):
    for operation in (hvd.allgather, partial(hvd.broadcast, root_rank=0)):
        with pytest.raises(UnsupportedBufferError, match="an array of object: supported are"):
            operation(np.array([None]))
    assert_usable(hvd)


# ---- mismatched calls


MISMATCHES = {
    "dtype": (lambda hvd, is_one: hvd.allreduce(np.ones(2, np.float32 if is_one else np.float64)), "float64[2]"),
    "shape": (lambda hvd, is_one: hvd.allreduce(np.ones((2, 3) if is_one else (3, 2))), "float64[2,3]"),
    "op": (lambda hvd, is_one: hvd.allreduce(1.0, hvd.Sum if is_one else hvd.Max), "Max"),
    "factor": (lambda hvd, is_one: hvd.allreduce(1.0, prescale_factor=2.0 if is_one else 3.0), "factors 3 and 1"),
    "group": (lambda hvd, is_one: hvd.grouped_allreduce([1.0] * (2 if is_one else 3)), "float64[]"),
    "rows": (lambda hvd, is_one: hvd.allgather(np.ones((1, 2) if is_one else (1, 3))), "float64[3]"),
    "root": (lambda hvd, is_one: hvd.broadcast(1.0, 0 if is_one else 1), "root 1"),
    "operation": (lambda hvd, is_one: hvd.allgather([1.0]) if is_one else hvd.allreduce([1.0]), "allgather"),
}


@SUITE.add_for_each(MISMATCHES)
def calls_that_differ_are_an_error_with_the_same_text_everywhere(hvd, what):
    operation, fact = MISMATCHES[what]
    with pytest.raises(LayoutMismatchError) as caught:
        operation(hvd, hvd.rank() == hvd.size() - 1)
    text = str(caught.value)
    assert text.startswith(MISMATCH)
    assert fact in text
    everywhere = bytes(hvd.allgather(np.frombuffer(text.encode(), np.uint8))).decode()
    assert everywhere == text * hvd.size()
    assert_usable(hvd)


# ---- names


@SUITE.add
def named_operations_may_come_in_different_orders_from_different_threads(hvd):
    found = {}

    def work(number):
        name = f"tensor {number}"
        for round_ in range(3):
            total = hvd.allreduce(np.full(100, number + round_), hvd.Sum, name=name)
            rows = hvd.allgather(np.full(hvd.rank() + 1, number), name=name)
            sent = hvd.broadcast(np.full(5, hvd.rank()), number % hvd.size(), name=name)
            found[number, round_] = [total[-1], len(rows), sent[0]]

    numbers = range(4)
    order = [numbers[(place + hvd.rank()) % 4] for place in numbers]
    threads = [threading.Thread(target=work, args=(number,)) for number in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = sum(rank + 1 for rank in ranks(hvd))
    wanted = {(n, r): [(n + r) * hvd.size(), rows, n % hvd.size()] for n in numbers for r in range(3)}
    assert found == wanted


@SUITE.add
def a_communicator_wants_popdist_init(hvd):
    with pytest.raises(RuntimeError, match="call popdist.init first"):
        hvd.communicator()


def main(folder):
    warnings.simplefilter("error")
    from popdist import horovod as hvd

    hvd.init()
    failures = {statement.name: failure_of(statement, hvd) for statement in SUITE.statements}
    Path(folder, f"{hvd.rank()}.json").write_text(json.dumps(failures))


if __name__ == "__main__":
    main(sys.argv[1])
