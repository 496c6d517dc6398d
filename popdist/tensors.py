"""Collectives on values, one per instance: the host collectives of PopDist.

Where the original has bugs the documented behaviour is built: names are kept, and `root_rank` is honoured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from popdist.groups import communicator_of, defaultCommunicatorId

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike


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
    array = copied(value)
    if tensor_name is None:
        return communicator.all_gather(array)
    gathered: np.ndarray = communicator.start_all_gather(array, name=tensor_name).wait()
    return gathered


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
    array = copied(value)
    if tensor_name is None:
        return communicator.all_reduce(array, reduce_op)
    reduced: np.ndarray = communicator.start_all_reduce(array, reduce_op, name=tensor_name).wait()
    return reduced


def broadcast(
    value: ArrayLike,
    root_rank: int = 0,
    tensor_name: str | None = None,
    communicator_id: str = defaultCommunicatorId(),
) -> np.ndarray:
    """The value of instance `root_rank` of the group, on all instances.

    Args:
        value: the same shape and dtype on all instances; bool is allowed.
        root_rank: whose value it is.
        tensor_name: as in `allgather`.
        communicator_id: the group.

    Raises:
        LayoutMismatchError: on every instance if shapes, dtypes or roots differ, or names wait for each other.
    """
    communicator = communicator_of(communicator_id)
    array = copied(value)
    if tensor_name is None:
        return communicator.broadcast(array, root_rank)
    sent: np.ndarray = communicator.start_broadcast(array, root_rank, name=tensor_name).wait()
    return sent


def copied(value: ArrayLike) -> np.ndarray:
    """The value as an array that may be written to.

    Raises:
        UnsupportedBufferError: it is a masked array.
    """
    import numpy as np

    from collectives.buffers import refuse_masked

    refuse_masked(value)
    return np.array(value, order="C")
