"""Collectives on values, one per instance, as the original's host collectives."""

import functools

import pytest
from many_checks import Checks

HEAD = """\
import numpy as np, ml_dtypes
import popdist, pytest
import collectives
popdist.init()
index, count = popdist.getInstanceIndex(), popdist.getNumInstances()

def refuses(function, *arguments, **named):
    with pytest.raises(collectives.LayoutMismatchError, match="Tensor layouts did not match on all instances"):
        function(*arguments, **named)
    popdist.synchronize()

def equal(found, wanted, dtype=None):
    assert np.array_equal(found, wanted), (index, found, wanted)
    assert dtype is None or np.asarray(found).dtype == dtype, (index, found.dtype)
"""

# All functions work without a launcher, too.
ALONE = {
    "gathers reduces and broadcasts to itself": (
        "for name in (None, 'x'):\n"
        "    equal(popdist.allgather([1.0, 2.0], tensor_name=name), [[1.0, 2.0]])\n"
        "    for op in ('SUM', 'MEAN', 'MIN', 'MAX', 'sum'):\n"
        "        equal(popdist.allreduce(3, op, tensor_name=name), 3)\n"
        "    for value in (True, 2, 2.5, [[1, 2], [3, 4]]):\n"
        "        equal(popdist.broadcast(value, tensor_name=name), value)\n"
    ),
    "never changes what it is given": (
        "given = np.ones(3)\n"
        "given.flags.writeable = False\n"
        "popdist.allreduce(given); popdist.broadcast(given); popdist.allgather(given[::2])\n"
    ),
    "masked arrays are refused": (
        "masked = np.ma.masked_equal(np.arange(4), 2)\n"
        "for function in (popdist.allreduce, popdist.broadcast, popdist.allgather):\n"
        "    for name in (None, 'x'):\n"
        "        with pytest.raises(collectives.UnsupportedBufferError, match='its mask would be lost'):\n"
        "            function(masked, tensor_name=name)\n"
    ),
    "unknown operations and roots are refused": (
        "with pytest.raises(ValueError, match=\"Unsupported reduce op: 'PRODUCT'\"):\n"
        "    popdist.allreduce(1.0, 'PRODUCT')\n"
        "for root in (1, -1):\n"
        "    with pytest.raises(ValueError, match=f'root is {root}'):\n"
        "        popdist.broadcast(1.0, root)\n"
        "for name in (None, 'x'):\n"
        "    with pytest.raises(TypeError, match='root is 0.5, not a whole number; name one of the ranks'):\n"
        "        popdist.broadcast(1.0, 0.5, name)\n"
        "equal(popdist.broadcast(1.0, np.int64(0)), 1.0)\n"
    ),
}

TOGETHER = {
    # The dtypes of the original, and bfloat16, float64, bool.
    "values of every dtype": (
        "names = 'float16 float32 float64 int8 int16 int32 int64 uint8 uint64'.split()\n"
        "for dtype in (*names, ml_dtypes.bfloat16):\n"
        "    dtype = np.dtype(dtype)\n"
        "    mine = np.array(index, dtype)\n"
        "    for name in (None, f'a tensor of {dtype}'):\n"
        "        equal(popdist.allgather(mine, name), np.arange(count), dtype)\n"
        "        equal(popdist.allreduce(mine, 'SUM', name), sum(range(count)), dtype)\n"
        "        mean = np.array((count - 1) / 2).astype(dtype)\n"
        "        equal(popdist.allreduce(mine, 'MEAN', name), mean, dtype)\n"
        "        equal(popdist.allreduce(mine, 'MAX', name), count - 1, dtype)\n"
        "        equal(popdist.broadcast(np.array(42 if index == 0 else 0, dtype), 0, name), 42, dtype)\n"
        "equal(popdist.broadcast(np.array([index == 0, True])), [True, True], bool)\n"
        "equal(popdist.allgather(np.bool_(index == 0)), [True] + [False] * (count - 1), bool)\n"
    ),
    "a mean of negative integers is truncated towards zero": (
        "equal(popdist.allreduce(np.int32(-1 if index == 0 else 0), 'MEAN'), 0, np.int32)\n"
    ),
    "shapes": (
        "for shape in ((), (0,), (1,), (2, 3), (2, 0, 3), (70001,)):\n"
        "    equal(popdist.allgather(np.full(shape, index)).shape, (count, *shape))\n"
        "    equal(popdist.allreduce(np.full(shape, 1.0)), np.full(shape, count))\n"
        "    equal(popdist.broadcast(np.full(shape, index), 1), np.full(shape, 1))\n"
        "rows = np.arange(12).reshape(3, 4)\n"
        "equal(popdist.allreduce(rows.T), rows.T * count)\n"
        "equal(popdist.broadcast(rows[:, ::2]), rows[:, ::2])\n"
    ),
    "every instance can be the root": (
        "for root in range(count):\n"
        "    for name in (None, f'from {root}'):\n"
        "        equal(popdist.broadcast(np.int32(index * 10), root_rank=root, tensor_name=name), root * 10)\n"
    ),
    # All three collectives run from several threads, so that they are in progress at once.
    "named calls come in any order": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "names = ['x', 'y', 'z'] if index % 2 == 0 else ['z', 'y', 'x']\n"
        "def gather(n): return n, popdist.allgather(np.int32(index + 10 * ord(n)), tensor_name=n).tolist()\n"
        "def reduce(n): return n, int(popdist.allreduce(np.int32(ord(n)), tensor_name=n + '/sum'))\n"
        "def cast(n): return n, int(popdist.broadcast(np.int32(index + ord(n)), 1, tensor_name=n + '/root'))\n"
        "with ThreadPoolExecutor(9) as pool:\n"
        "    for _ in range(5):\n"
        "        gathered, reduced, sent = (list(pool.map(f, names)) for f in (gather, reduce, cast))\n"
        "        assert dict(gathered) == {n: [i + 10 * ord(n) for i in range(count)] for n in 'xyz'}\n"
        "        assert dict(reduced) == {n: count * ord(n) for n in 'xyz'}\n"
        "        assert dict(sent) == {n: 1 + ord(n) for n in 'xyz'}\n"
    ),
    # The communicator must stay usable.
    "different layouts are an error on every instance": (
        "odd = index % 2\n"
        "for function in (popdist.allgather, popdist.allreduce, popdist.broadcast):\n"
        "    refuses(function, np.zeros((), np.int32 if odd else np.float32))\n"
        "    refuses(function, np.zeros((1, 1) if odd else (), np.float32))\n"
        "    refuses(function, np.zeros((2, 3) if odd else (3, 2), np.float32))\n"
        "refuses(popdist.allreduce, 1.0, 'SUM' if odd else 'MEAN')\n"
        "refuses(popdist.broadcast, 1.0, odd)\n"
        "refuses(popdist.allreduce if odd else popdist.allgather, 1.0)\n"
    ),
    "different layouts under one name are an error too": (
        "refuses(popdist.allreduce, np.zeros(1 + index % 2), tensor_name='x')\n"
        "equal(popdist.allreduce(1.0, tensor_name='x'), count)\n"
    ),
}


@functools.cache
def alone():
    return Checks(1, HEAD, ALONE)


@functools.cache
def together(count):
    return Checks(count, HEAD, TOGETHER)


@pytest.mark.parametrize("name", ALONE)
def test_statements_hold_for_one_instance(name):
    alone().holds(name)


@pytest.mark.job
@pytest.mark.cores(2)
@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize("count", [3, pytest.param(2, marks=pytest.mark.complete)])
def test_statements_hold_for_several_instances(name, count):
    together(count).holds(name)


@pytest.mark.job
@pytest.mark.cores(2)
def test_jobs_end_well():
    alone().end_well()
    together(3).end_well()
