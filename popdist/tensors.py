"""Collectives on values, one per instance: the host collectives of PopDist.

Where the original has bugs the documented behaviour is built: names are kept, and `root_rank` is honoured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from popdist.groups import communicator_of, defaultCommunicatorId

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import ArrayLike

    from collectives.named import Handle


def allgather(
    value: ArrayLike, tensor_name: str | None = None, communicator_id: str = defaultCommunicatorId()
) -> np.ndarray:
    """Stack the values of all instances: shape (instances, *value.shape).

    Args:
        value: the same shape and dtype on all instances.
        tensor_name: matches the calls of the instances, whose threads may then make them in different orders; one
            thread makes them in the same order everywhere. Default: calls are matched by their order.
        communicator_id: the group.

    Raises:
        LayoutMismatchError: on every instance if shapes or dtypes differ, or names wait for each other.
    """
    communicator = communicator_of(communicator_id)
    return _run(communicator.all_gather, communicator.start_all_gather, tensor_name, value)


def allreduce(
    value: ArrayLike,
    reduce_op: str = "SUM",
    tensor_name: str | None = None,
    communicator_id: str = defaultCommunicatorId(),
) -> np.ndarray:
    """Reduce the values of all instances.

    Args:
        value: the same shape and dtype on all instances.
        reduce_op: "SUM" (of integers: wraps around where it does not fit), "MEAN" (of integers: truncated), "MIN" or
            "MAX".
        tensor_name: as in `allgather`.
        communicator_id: the group.

    Raises:
        LayoutMismatchError: on every instance if shapes, dtypes or operations differ, or names wait for each other.
    """
    communicator = communicator_of(communicator_id)
    return _run(communicator.all_reduce, communicator.start_all_reduce, tensor_name, value, reduce_op)


def broadcast(
    value: ArrayLike,
    root_rank: int = 0,
    tensor_name: str | None = None,
    communicator_id: str = defaultCommunicatorId(),
) -> np.ndarray:
    """Return the value of instance `root_rank` of the group, on all instances.

    Args:
        value: the same shape and dtype on all instances; bool is allowed.
        root_rank: whose value it is.
        tensor_name: as in `allgather`.
        communicator_id: the group.

    Raises:
        LayoutMismatchError: on every instance if shapes, dtypes or roots differ, or names wait for each other.
    """
    communicator = communicator_of(communicator_id)
    return _run(communicator.broadcast, communicator.start_broadcast, tensor_name, value, root_rank)


def _run(
    collective: Callable[..., np.ndarray],
    start: Callable[..., Handle],
    tensor_name: str | None,
    value: ArrayLike,
    *arguments: str | int,
) -> np.ndarray:
    """Return the result of a collective; if the tensor has a name, of the collective that `start` begins."""
    array = copied(value)
    if tensor_name is None:
        return collective(array, *arguments)
    result: np.ndarray = start(array, *arguments, name=tensor_name).wait()
    return result


def copied(value: ArrayLike) -> np.ndarray:
    """Return the value as an array that may be written to.

    Raises:
        UnsupportedBufferError: it is a masked array.
    """
    import numpy as np

    from collectives.buffers import refuse_masked

    refuse_masked(value)
    return np.array(value, order="C")
