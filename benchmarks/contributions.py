"""The arrays that replicas contribute to an all-reduce in the benchmarks, and their correct sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Contributions = Sequence[np.ndarray]
Reduce = Callable[[], np.ndarray]


def contribution(replica: int, elements: int) -> np.ndarray:
    """Return a replica's array, equal on every rank; rounding makes sums depend on their order."""
    return np.random.default_rng(replica).random(elements, np.float32) - np.float32(0.5)


def tree_sum(replicas: int, elements: int, first: int = 0) -> np.ndarray:
    """Return the sum of the replicas' arrays in the order of the balanced tree, as the product adds them."""
    if replicas == 1:
        return contribution(first, elements)
    half = 1 << (replicas - 1).bit_length() - 1
    return tree_sum(half, elements, first) + tree_sum(replicas - half, elements, first + half)


def sum_checks(result: np.ndarray, expected: np.ndarray) -> dict[str, bool]:
    """Return whether a sum is right, to the last bit and up to rounding."""
    return {
        "has_same_bits": np.array_equal(result.view(np.uint32), expected.view(np.uint32)),
        "is_close": bool(np.allclose(result, expected, rtol=1e-5, atol=1e-5)),
    }


def add(contributions: Contributions, out: np.ndarray) -> np.ndarray:
    """Add the arrays of the local replicas in their order into `out`, and return it."""
    if len(contributions) == 1:
        np.copyto(out, contributions[0])
        return out
    np.add(contributions[0], contributions[1], out)
    for contribution in contributions[2:]:
        np.add(out, contribution, out)
    return out
