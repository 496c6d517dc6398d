"""Collectives on values, one per instance: the host collectives of PopDist.

The original has bugs with tensor names and `root_rank`; here both work as its documentation says.
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
    """Stack the values of all instances into an array of shape (instances, *value.shape).

    Args:
        value: Value with the same shape and dtype on all instances.
        tensor_name: Name that matches the instances' calls. Threads may call different names in different orders; a
            single thread uses the same order on every instance. Default: calls are matched by their order.
        communicator_id: Id of the group of instances.

    Raises:
        LayoutMismatchError: Shapes or dtypes differ, or names wait for each other. Raised on every instance.

    Example:
        >>> import popdist
        >>> popdist.init()
        >>> popdist.allgather([1, 2])
        array([[1, 2]])
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
        value: Value with the same shape and dtype on all instances.
        reduce_op: "SUM" (sums of integers wrap around), "MEAN" (means of integers are truncated), "MIN" or "MAX".
        tensor_name: Name that matches the instances' calls, as in `allgather`.
        communicator_id: Id of the group of instances.

    Raises:
        LayoutMismatchError: Shapes, dtypes or operations differ, or names wait for each other. Raised on every
            instance.
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
        value: Value with the same shape and dtype on all instances; bool is allowed.
        root_rank: Number of the sending instance in the group.
        tensor_name: Name that matches the instances' calls, as in `allgather`.
        communicator_id: Id of the group of instances.

    Raises:
        LayoutMismatchError: Shapes, dtypes or roots differ, or names wait for each other. Raised on every instance.
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
    """Run `collective`; if the tensor has a name, run `start` and wait for its result."""
    array = copied(value)
    if tensor_name is None:
        return collective(array, *arguments)
    result: np.ndarray = start(array, *arguments, name=tensor_name).wait()
    return result


def copied(value: ArrayLike) -> np.ndarray:
    """Return a writable copy of the value as an array.

    Raises:
        UnsupportedBufferError: The value is a masked array.
    """
    import numpy as np

    from collectives.buffers import refuse_masked

    refuse_masked(value)
    return np.array(value, order="C")
