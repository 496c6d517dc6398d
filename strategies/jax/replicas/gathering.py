"""The gathering of all replicas' trees and arrays on every instance."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

import strategies.trees as trees
from strategies.argument_checks import checked_axis
from strategies.core.gathering import gather_arrays
from strategies.core.rows import ToldRows
from strategies.jax.replicas.reduction_ops import check_dtype
from strategies.jax.replicas.replicas import Replicas
from strategies.typing import Tree


def told_rows(tree: Tree, mask: np.ndarray) -> ToldRows:
    """Return the results of one replica for the rows of a mask, from a tree of host arrays."""
    leaves, structure = trees.flatten(tree)
    return ToldRows(leaves, partial(trees.unflatten, structure), mask)


def concatenated(replicas: Replicas, value: Tree, axis: int) -> Tree:
    """Return the values of all replicas one after another along an axis, as `Strategy.gather` describes. Collective."""
    leaves, structure = replicas.local_leaves(value)

    def gathered() -> list[np.ndarray]:
        return [_concatenated(replicas, arrays, axis, f"gather/{number}") for number, arrays in enumerate(leaves)]

    return trees.unflatten(structure, replicas.recorded("gather", gathered))


def _concatenated(replicas: Replicas, arrays: Sequence[np.ndarray], axis: int, name: str) -> np.ndarray:
    """Return the arrays of all replicas one after another; each is padded to the longest one to travel."""
    check_dtype(arrays[0].dtype, reduces=False)
    place = checked_axis(axis, arrays[0].shape)
    rows = [np.moveaxis(array, place, 0) for array in arrays]
    rest, dtype = _alike(rows)
    lengths = np.concatenate(gather_arrays(replicas, [[np.array(len(one))] for one in rows], name)).tolist()
    padded = [np.zeros((max(lengths), *rest), dtype) for _ in rows]
    for own, into in zip(rows, padded, strict=True):
        into[: len(own)] = own
    found = gather_arrays(replicas, [[one] for one in padded], f"{name} of {dtype}{list(rest)} along {place}")
    whole = np.concatenate([each[:length] for [each], length in zip(found, lengths, strict=True)])
    return np.ascontiguousarray(np.moveaxis(whole, 0, place))


def _alike(rows: Sequence[np.ndarray]) -> tuple[tuple[int, ...], np.dtype]:
    """Return the shape of a row and the dtype, which are the same on all replicas."""
    kinds = {(one.shape[1:], one.dtype) for one in rows}
    if len(kinds) > 1:
        shown = " and ".join(sorted(f"{dtype}{list(rest)}" for rest, dtype in kinds))
        raise ValueError(
            f"replicas have {shown} along the gathered axis, but only their lengths along it may differ; make them "
            "alike otherwise"
        )
    return next(iter(kinds))
