"""The arithmetic of sums over replicas on JAX's devices, with the bits of `collectives.reduction.Reduction`.

XLA's sums follow IEEE 754. Its divisions on GPUs do not, and XLA turns a division by a constant into a multiplication
by the reciprocal. So programs divide in float64, by a divisor that is an argument of the program. Rounding the result
gives the bits of a division in float32. On CPUs XLA flushes denormal numbers to zero; all other results have the same
bits there too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from collectives.arrays import accumulator_dtype
from collectives.tree import TreeNode, steps
from strategies.jax.programs.program import jit

Buffers = Sequence[jax.Array]
"""The flat buffers of one bucket."""


def added(nodes: tuple[TreeNode, ...], sums: Buffers) -> jax.Array:
    """Return the sum of neighbours in the tree, in the accumulators' dtype; traceable."""
    dtype = accumulator_dtype(np.dtype(sums[0].dtype), "sum")
    values = [one.astype(dtype) for one in sums]
    for left, right, _ in steps(nodes):
        values.append(values[left] + values[right])
    return values[-1]


def mean_of(total: jax.Array, dtype: np.dtype, replicas: int, divisor: jax.Array) -> jax.Array:
    """Return a sum divided once by R, and rounded once to a dtype; traceable.

    Args:
        total: Sum over all replicas.
        dtype: Dtype of the mean.
        replicas: R.
        divisor: R as a float32 scalar; an argument of the program, so that XLA does not know it.
    """
    if replicas & (replicas - 1) == 0:  # for powers of two, a multiplication has the bits of a division
        return (total * np.float32(1 / replicas)).astype(dtype)
    with jax.enable_x64(True):
        quotient = total.astype(jnp.float64) / divisor.astype(jnp.float64)
        return quotient.astype(total.dtype).astype(dtype)


class JaxArithmetic:
    """The `DeviceArithmetic` of JAX: sums of a bucket's buffers, by one compiled program for all buffers."""

    def mean(self, nodes: Sequence[TreeNode], sums: Buffers, dtype: np.dtype, replicas: int) -> jax.Array:
        """Return the mean of one buffer. The sums' memory is not taken over: it may belong to another process."""
        first, *others = [[one] for one in sums]
        found: list[jax.Array] = _means(tuple(nodes), (dtype,), replicas, False)(first, others, np.float32(replicas))
        return found[0]

    def totals(self, nodes: Sequence[TreeNode], sums: Sequence[Buffers]) -> list[jax.Array]:
        """Return the sum of each buffer.

        Args:
            nodes: Neighbours in the tree, in order.
            sums: Buffers of each node; the memory of the first node's buffers is taken over.
        """
        first, *others = map(list, sums)
        found: list[jax.Array] = _totals(tuple(nodes), _are_wide(first))(first, others)
        return found

    def means(
        self, nodes: Sequence[TreeNode], sums: Sequence[Buffers], dtypes: Sequence[np.dtype], replicas: int
    ) -> list[jax.Array]:
        """Return the mean of each buffer over all replicas.

        Args:
            nodes: Nodes that together are the whole tree.
            sums: Buffers of each node; the memory of the first node's buffers is taken over.
            dtypes: Dtypes of the means.
            replicas: R.
        """
        first, *others = map(list, sums)
        is_taken_over = _are_wide(first) and [one.dtype for one in first] == list(dtypes)
        program = _means(tuple(nodes), tuple(dtypes), replicas, is_taken_over)
        found: list[jax.Array] = program(first, others, np.float32(replicas))
        return found


def _are_wide(buffers: Buffers) -> bool:
    """Return whether buffers have the accumulators' dtype, so that a sum may take over their memory."""
    return all(accumulator_dtype(np.dtype(one.dtype), "sum") == one.dtype for one in buffers)


@cache
def _totals(nodes: tuple[TreeNode, ...], is_taken_over: bool) -> jax.stages.Wrapped:
    def totals(first: Buffers, others: Sequence[Buffers]) -> list[jax.Array]:
        return [added(nodes, of_nodes) for of_nodes in zip(first, *others, strict=True)]

    return jit(totals, donate_argnums=(0,) if is_taken_over else ())


@cache
def _means(
    nodes: tuple[TreeNode, ...], dtypes: tuple[np.dtype, ...], replicas: int, is_taken_over: bool
) -> jax.stages.Wrapped:
    def means(first: Buffers, others: Sequence[Buffers], divisor: jax.Array) -> list[jax.Array]:
        pairs = zip(zip(first, *others, strict=True), dtypes, strict=True)
        return [mean_of(added(nodes, of_nodes), dtype, replicas, divisor) for of_nodes, dtype in pairs]

    return jit(means, donate_argnums=(0,) if is_taken_over else ())
