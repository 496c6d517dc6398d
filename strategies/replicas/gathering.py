"""What all replicas have, on every instance or on the first."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from popdist.instance import replica_block
from strategies.replicas.replicas import Replicas
from strategies.roles import Tree


def gather_replicas(replicas: Replicas, local: Sequence[Tree], name: str) -> list[Tree]:
    """The host trees of all replicas, in their order; a collective call.

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


def _blocks(replicas: Replicas) -> list[range]:
    """The replicas of each instance."""
    count = replicas.communicator.size
    return [replica_block(rank, count, replicas.num_replicas_in_sync) for rank in range(count)]


def _message(replicas: Replicas, local: Sequence[Tree]) -> np.ndarray:
    """The bytes of the local replicas' trees, one row each; some instances may have one replica less than others."""
    packed = [_packed(tree) for tree in local]
    message = np.zeros((max(map(len, _blocks(replicas))), packed[0].size), np.uint8)
    message[: len(packed)] = packed
    return message


def _told_by(replicas: Replicas, whole: np.ndarray, like: Tree) -> list[Tree]:
    """The trees of all replicas, of the messages of all instances."""
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
