"""Gathering of all replicas' values, on every instance or on the first."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from popdist.instance import replica_block
from strategies.argument_checks import checked_axis
from strategies.replicas.reduction_ops import check_dtype
from strategies.replicas.replicas import Replicas
from strategies.typing import Tree


def gather_replicas(replicas: Replicas, local: Sequence[Tree], name: str) -> list[Tree]:
    """Return the host trees of all replicas, in their order; a collective call.

    Args:
        replicas: connects the instances.
        local: those of the local replicas, alike in structure, shapes and dtypes.
        name: of the call.
    """
    whole = replicas.communicator.all_gather(_message(replicas, local), name=name)
    return _told_by(replicas, whole, local[0])


def gather_replicas_on_first(replicas: Replicas, local: Sequence[Tree], name: str) -> list[Tree] | None:
    """See `gather_replicas`, for instance 0 alone; None on the others."""
    whole = replicas.communicator.gather(_message(replicas, local), name=name)
    return None if whole is None else _told_by(replicas, whole, local[0])


def concatenated(replicas: Replicas, value: Tree, axis: int) -> Tree:
    """See `Strategy.gather`."""
    leaves, structure = replicas.local_leaves(value)
    return jax.tree.unflatten(
        structure, [_concatenated(replicas, arrays, axis, f"gather/{number}") for number, arrays in enumerate(leaves)]
    )


def _concatenated(replicas: Replicas, arrays: Sequence[np.ndarray], axis: int, name: str) -> np.ndarray:
    """Return the arrays of all replicas one after another; each travels as long as the longest one."""
    check_dtype(arrays[0].dtype, reduces=False)
    place = checked_axis(axis, arrays[0].shape)
    rows = [np.moveaxis(array, place, 0) for array in arrays]
    rest, dtype = _alike(rows)
    lengths = [int(length) for length in gather_replicas(replicas, [np.int64(len(one)) for one in rows], name)]
    padded = [np.zeros((max(lengths), *rest), dtype) for _ in rows]
    for own, into in zip(rows, padded, strict=True):
        into[: len(own)] = own
    found = gather_replicas(replicas, padded, f"{name} of {dtype}{list(rest)} along {place}")
    whole = np.concatenate([each[:length] for each, length in zip(found, lengths, strict=True)])
    return np.ascontiguousarray(np.moveaxis(whole, 0, place))


def _alike(rows: Sequence[np.ndarray]) -> tuple[tuple[int, ...], np.dtype]:
    """Return the shape of a row and the dtype, which all replicas have."""
    kinds = {(one.shape[1:], one.dtype) for one in rows}
    if len(kinds) > 1:
        shown = " and ".join(sorted(f"{dtype}{list(rest)}" for rest, dtype in kinds))
        raise ValueError(
            f"replicas have {shown} along the axis that is gathered; only their lengths along it may differ: make them "
            "alike"
        )
    return next(iter(kinds))


def _blocks(replicas: Replicas) -> list[range]:
    """Return the replicas of each instance."""
    count = replicas.communicator.size
    return [replica_block(rank, count, replicas.num_replicas_in_sync) for rank in range(count)]


def _message(replicas: Replicas, local: Sequence[Tree]) -> np.ndarray:
    """Return the bytes of the local replicas' trees, one row each; some instances may have one replica less."""
    packed = [_packed(tree) for tree in local]
    message = np.zeros((max(map(len, _blocks(replicas))), packed[0].size), np.uint8)
    message[: len(packed)] = packed
    return message


def _told_by(replicas: Replicas, whole: np.ndarray, like: Tree) -> list[Tree]:
    """Return the trees of all replicas, of the messages of all instances."""
    rows = [whole[rank, row] for rank, block in enumerate(_blocks(replicas)) for row in range(len(block))]
    return [_unpacked(row, like) for row in rows]


def _packed(tree: Tree) -> np.ndarray:
    leaves = [np.ascontiguousarray(leaf).reshape(-1).view(np.uint8) for leaf in jax.tree.leaves(tree)]
    return np.concatenate(leaves)


def _unpacked(data: np.ndarray, like: Tree) -> Tree:
    leaves, structure = jax.tree.flatten(like)
    found = []
    begin = 0
    for leaf in leaves:
        array = np.empty(leaf.shape, leaf.dtype)
        array.reshape(-1).view(np.uint8)[:] = data[begin : begin + array.nbytes]
        begin += array.nbytes
        found.append(array)
    return jax.tree.unflatten(structure, found)
