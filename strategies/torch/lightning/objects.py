"""Collective calls with objects that pickle can write, such as checkpoints and predictions."""

from __future__ import annotations

import pickle
from typing import TypeVar

import numpy as np

from collectives import Communicator

Value = TypeVar("Value")


def broadcast_object(communicator: Communicator, value: Value, root: int, name: str) -> Value:
    """Return the object of the instance `root` on every instance. Collective.

    Args:
        communicator: The communicator of all instances.
        value: The object; only that of `root` is used, and returned there as it is.
        root: The rank of the instance.
        name: The name of the call in messages.
    """
    if communicator.size == 1:
        return value
    is_root = communicator.rank == root
    own = _bytes_of(value) if is_root else np.zeros(0, np.uint8)
    size = communicator.broadcast(np.array([own.size]), root, name=f"size of {name}")
    received = communicator.broadcast(own if is_root else np.empty(int(size[0]), np.uint8), root, name=name)
    if is_root:
        return value
    found: Value = pickle.loads(received.tobytes())  # noqa: S301 - the job's own connections carry it
    return found


def gather_objects(communicator: Communicator, value: Value, name: str) -> list[Value]:
    """Return the objects of all instances on every instance, in the order of the ranks. Collective.

    Args:
        communicator: The communicator of all instances.
        value: The object of this instance.
        name: The name of the call in messages.
    """
    if communicator.size == 1:
        return [value]
    own = _bytes_of(value)
    sizes = communicator.all_gather(np.array([own.size]), name=f"sizes of {name}").reshape(-1)
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: own.size] = own
    gathered = communicator.all_gather(padded, name=name)
    return [pickle.loads(one[:size].tobytes()) for one, size in zip(gathered, sizes, strict=True)]  # noqa: S301


def _bytes_of(value: object) -> np.ndarray:
    return np.frombuffer(bytearray(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)), np.uint8)
