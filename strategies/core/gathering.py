"""Gathering of all replicas' arrays, on every instance or on the first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np

from popdist.instance import replica_blocks
from strategies.core.members import Members

OfReplicas: TypeAlias = Sequence[Sequence[np.ndarray]]
"""The arrays of each replica."""


def gather_arrays(members: Members, local: OfReplicas, name: str) -> list[list[np.ndarray]]:
    """Return the arrays of every replica of all instances, in the order of the replicas. Collective.

    Args:
        members: The instances.
        local: The arrays of each local replica; all replicas have the same number of arrays, shapes and dtypes.
        name: The name of the call, for messages.
    """
    whole = members.communicator.all_gather(_message(members, local), name=name)
    return _unpacked(members, whole, local[0])


def gather_arrays_on_first(members: Members, local: OfReplicas, name: str) -> list[list[np.ndarray]] | None:
    """Return what `gather_arrays` returns, on instance 0 alone; None on the others. Collective."""
    whole = members.communicator.gather(_message(members, local), name=name)
    return None if whole is None else _unpacked(members, whole, local[0])


def replicas_where(members: Members, is_so: Iterable[bool], name: str) -> list[int]:
    """Return the replicas of all instances that have a property. Collective.

    Args:
        members: The instances.
        is_so: Whether each local replica has the property, in their order.
        name: The name of the call, for messages.
    """
    gathered = gather_arrays(members, [[np.array(one)] for one in is_so], name)
    return [replica for replica, [one] in enumerate(gathered) if one]


def _message(members: Members, local: OfReplicas) -> np.ndarray:
    """Return the bytes of the local replicas' arrays, one row each; an instance with fewer replicas adds a row."""
    packed = [
        np.concatenate([np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]) for arrays in local
    ]
    blocks = replica_blocks(members.communicator.size, members.num_replicas_in_sync)
    message = np.zeros((max(map(len, blocks)), packed[0].size), np.uint8)
    message[: len(packed)] = packed
    return message


def _unpacked(members: Members, whole: np.ndarray, like: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
    """Return the arrays of all replicas, from the messages of all instances."""
    ends = np.cumsum([array.nbytes for array in like])[:-1]
    blocks = replica_blocks(len(whole), members.num_replicas_in_sync)
    rows = [whole[rank, row] for rank, block in enumerate(blocks) for row in range(len(block))]
    return [
        [part.copy().view(array.dtype).reshape(array.shape) for part, array in zip(parts, like, strict=True)]
        for parts in (np.split(row, ends) for row in rows)
    ]
