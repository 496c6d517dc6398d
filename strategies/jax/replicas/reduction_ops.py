"""The reductions of collectives inside compiled programs, and the replica whose program is being traced.

Semantics: the original's `CollectiveOperator`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar

import numpy as np

from collectives import UnsupportedBufferError
from collectives.arrays import MOVABLE, REDUCIBLE, accumulator_dtype
from collectives.tree import combined
from strategies.late_jax import jax, jnp

_PREFIX = "COLLECTIVE_OP_"
_BASES = {
    "ADD": "sum",
    "MEAN": "mean",
    "MUL": "prod",
    "MIN": "min",
    "MAX": "max",
    "LOGICAL_AND": "min",
    "LOGICAL_OR": "max",
    "SQUARE_ADD": "sum",
    "LOCAL": "local",
}
DIFFERENTIABLE = ("ADD", "MEAN", "SQUARE_ADD", "LOCAL")
"""The operations that have a gradient."""

_COMBINE = {"sum": "add", "mean": "add", "min": "minimum", "max": "maximum", "prod": "multiply"}
"""The functions of `jax.numpy` that combine two values."""


def parse_op(op: str) -> str:
    """Return the name of a collective operation in capitals, without the prefix `COLLECTIVE_OP_`.

    Raises:
        ValueError: The name is unknown.
    """
    name = str(op).upper().removeprefix(_PREFIX)
    if name not in _BASES:
        raise ValueError(f"{op!r} is not a collective operation; use one of {', '.join(_BASES)}")
    return name


def check_dtype(dtype: np.dtype, reduces: bool, members: str = "replicas") -> None:
    """Refuse a dtype that collectives between instances do not support, also if there is one instance.

    Args:
        dtype: Dtype of the values.
        reduces: Whether values are combined, or only moved.
        members: Name of the ranks in the message.

    Raises:
        UnsupportedBufferError: The dtype is not supported.
    """
    supported = REDUCIBLE if reduces else MOVABLE
    if dtype not in supported:
        raise UnsupportedBufferError(
            f"{members} cannot {'reduce' if reduces else 'exchange'} {dtype}; convert it to one of "
            f"{', '.join(sorted(map(str, supported)))}"
        )


def base_of(name: str) -> str:
    """Return the operation that combines the results of `operand`: "sum", "mean", "prod", "min", "max" or "local"."""
    return _BASES[name]


def operand(name: str, x: jax.Array) -> jax.Array:
    """Return the value that is combined for a contribution: its truth value, its square, or the contribution itself."""
    if name.startswith("LOGICAL"):
        return (x != 0).astype(jnp.uint8)
    if name == "SQUARE_ADD":
        wide = x.astype(accumulator_dtype(np.dtype(x.dtype), "sum"))
        return wide * wide
    return x


def reduce_in_order(op: str, values: Sequence[jax.Array]) -> jax.Array:
    """Reduce values with the arithmetic of `collectives.reduction`, inside a compiled program.

    Args:
        op: "sum", "mean", "min", "max" or "prod".
        values: Arrays of equal shape and dtype, which the result has too. 16-bit floats are combined in float32. Sums
            and products of integers wrap around; their means are truncated towards zero.
    """
    dtype = np.dtype(values[0].dtype)
    if op == "mean" and dtype.kind in "iu":
        return _mean_of_integers(values)
    wide = accumulator_dtype(dtype, "sum" if op == "prod" else op)
    total = combined([value.astype(wide) for value in values], getattr(jnp, _COMBINE[op]))
    if op == "mean":
        # Behind a barrier, because the compiler turns a constant divisor into a factor, which gives other bits than
        # NumPy's division.
        count = jnp.full(total.shape, len(values), total.dtype)
        total = jax.lax.div(total, jax.lax.optimization_barrier(count))
    return total.astype(dtype)


def _mean_of_integers(values: Sequence[jax.Array]) -> jax.Array:
    """Return the mean of integers, truncated towards zero, even if their sum does not fit into their dtype.

    JAX may have no wider integers, so quotients and remainders are added instead. Neither sum exceeds 32 bits with up
    to 46,340 values.
    """
    dtype = np.dtype(values[0].dtype)
    wide = dtype if dtype.itemsize >= 4 else accumulator_dtype(dtype, "mean")
    count = jnp.asarray(len(values), wide)
    shares = [value.astype(wide) for value in values]
    quotients = reduce_in_order("sum", [share // count for share in shares])
    remainders = reduce_in_order("sum", [share % count for share in shares])
    rounded_down = quotients + remainders // count
    is_cut = (rounded_down < 0) & (remainders % count != 0)
    return (rounded_down + is_cut.astype(wide)).astype(dtype)


current: ContextVar[object] = ContextVar("replica", default=None)


def check_outside_replica(call: str) -> None:
    """Refuse a call that concerns all replicas at once, while a replica's program is traced.

    Raises:
        RuntimeError: A replica's program is being traced; the message names the call.
    """
    if current.get() is not None:
        raise RuntimeError(
            f"{call} was called by a replica, inside strategy.run or a loss function; call it outside, or use "
            "strategies.get_replica_context() there"
        )
