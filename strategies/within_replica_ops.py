"""Collectives between the shards of one replica.

Each function takes a list with one array per shard, in their order, and returns a list with the result of each shard.
Gradients follow from the arithmetic. Semantics: the original's `within_replica_ops`.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from strategies.errors import DeviceError
from strategies.jax.replicas.reduction_ops import base_of, check_dtype, operand, parse_op, reduce_in_order


def all_gather(shards: Sequence[ArrayLike], axis: int = 0) -> list[jax.Array]:
    """Concatenate the arrays of all shards along `axis`, and return the result for each shard; scalars are stacked.

    Raises:
        ValueError: If dtypes, ranks or other dimensions differ, an array occurs twice, or there is no such axis.
        DeviceError: If the arrays lie on different devices, and not in the order of these devices.
    """
    arrays = _checked(shards)
    if not arrays[0].ndim:
        return [jnp.stack(arrays)] * len(arrays)
    if not 0 <= axis < arrays[0].ndim:
        raise ValueError(f"all_gather along axis {axis} of arrays of rank {arrays[0].ndim}; use an axis they have")
    others = {(*array.shape[:axis], *array.shape[axis + 1 :]) for array in arrays}
    if len(others) > 1:
        raise ValueError(
            f"all_gather along axis {axis} of shapes {[list(array.shape) for array in arrays]}; "
            "they must be equal along the other axes"
        )
    return [jnp.concatenate(arrays, axis)] * len(arrays)


def all_reduce(shards: Sequence[ArrayLike], op: str = "ADD") -> list[jax.Array]:
    """Reduce the vectors of all shards, and return the result, as long as the longest vector, for each shard.

    Args:
        shards: Vectors; shorter ones are padded with zeros. Scalars count as vectors of length 1.
        op: Operation, as in `cross_replica_ops.reduce_scatter`.

    Raises:
        UnsupportedBufferError: If the dtype cannot be reduced, such as bool with other operations than LOGICAL_AND and
            LOGICAL_OR.
        ValueError: If dtypes or ranks differ, an array occurs twice, or is neither a vector nor a scalar.
        DeviceError: If the arrays lie on different devices, and not in the order of these devices.
    """
    vectors = _vectors(shards)
    length = max(vector.size for vector in vectors)
    return _reduced(parse_op(op), [_padded(vector, length) for vector in vectors])


def reduce_scatter(shards: Sequence[ArrayLike], op: str = "ADD") -> list[jax.Array]:
    """Reduce the vectors of all k shards, and return each shard's part, of length ceil(longest / k).

    The last parts end with zeros if k does not divide the length.

    Args:
        shards: Vectors; shorter ones are padded with zeros. Scalars count as vectors of length 1.
        op: Operation, as in `cross_replica_ops.reduce_scatter`.

    Raises:
        UnsupportedBufferError: If the dtype cannot be reduced, as in `all_reduce`.
        ValueError: If dtypes or ranks differ, an array occurs twice, or is neither a vector nor a scalar.
        DeviceError: If the arrays lie on different devices, and not in the order of these devices.
    """
    vectors = _vectors(shards)
    part = -(-max(vector.size for vector in vectors) // len(vectors))
    reduced = _reduced(parse_op(op), [_padded(vector, part * len(vectors)) for vector in vectors])
    return [whole[rank * part : (rank + 1) * part] for rank, whole in enumerate(reduced)]


def _reduced(op: str, vectors: Sequence[jax.Array]) -> list[jax.Array]:
    if op == "LOCAL":
        return list(vectors)
    operands = [operand(op, vector) for vector in vectors]
    check_dtype(np.dtype(operands[0].dtype), reduces=True, members="shards")
    whole = reduce_in_order(base_of(op), operands)
    return [whole.astype(vectors[0].dtype)] * len(vectors)


def _padded(vector: jax.Array, length: int) -> jax.Array:
    return jnp.pad(vector, (0, length - vector.size))


def _vectors(shards: Sequence[ArrayLike]) -> list[jax.Array]:
    arrays = _checked(shards)
    if arrays[0].ndim > 1:
        raise ValueError(f"shards of rank {arrays[0].ndim} cannot be reduced; reshape them to vectors")
    return [array.reshape(-1) for array in arrays]


def _checked(shards: Sequence[ArrayLike]) -> list[jax.Array]:
    if not len(shards):
        raise ValueError("the list of shards is empty; give one array per shard")
    held = [id(shard) for shard in shards if hasattr(shard, "dtype")]  # equal Python numbers may be one object
    if len(set(held)) < len(held):
        raise ValueError("an array occurs twice in the list of shards; give each shard its own array")
    arrays = [jnp.asarray(shard) for shard in shards]
    for what, found in (("dtypes", {array.dtype for array in arrays}), ("ranks", {array.ndim for array in arrays})):
        if len(found) > 1:
            raise ValueError(f"the shards have {what} {', '.join(sorted(map(str, found)))}; they must be the same")
    _check_order(arrays)
    return arrays


def _check_order(arrays: Sequence[jax.Array]) -> None:
    places = [_device_of(array) for array in arrays]
    numbers = [place for place in places if place is not None]
    if len(set(numbers)) == len(arrays) and numbers != sorted(numbers):
        raise DeviceError(f"the shards lie on devices {numbers}; give them in the order of their devices")


def _device_of(array: jax.Array) -> int | None:
    if isinstance(array, jax.core.Tracer) or len(array.devices()) > 1:
        return None
    return int(next(iter(array.devices())).id)
