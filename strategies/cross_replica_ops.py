"""Differentiable collectives between replicas, for use inside `strategy.run` and loss functions.

All replicas make the same calls in the same order. Each passes a pytree of arrays (one array, a list, a dict) of the
same shapes and dtypes. Derivatives of any order are defined. Values are combined in replica order, and 16-bit floats in
float32, so results have the same bits for every number of instances. The local replicas meet in a callback. Values
leave the instance only if a group of replicas spans several instances.

`replica_group_size` divides the replicas into groups of neighbours; None or 0 makes one group of all. `orthogonal`
divides them across such groups (see `ReplicaGroups`): of 8 replicas in groups of 4, {0, 2, 4, 6} and {1, 3, 5, 7}.

All functions raise RuntimeError outside a replica's program, and ValueError if the group size does not divide the
number of replicas. They raise TypeError for dtypes that instances do not exchange: complex numbers, and bool in sums.

Semantics: the original's `cross_replica_ops`, `all_to_all_op`, `reduce_scatter_op` and `replication_ops`.

Example::

    def loss_fn(variables, batch, key):
        mean = cross_replica_ops.cross_replica_mean(batch.mean(axis=0))  # over the rows of all replicas
        ...
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from popdist.switches import require_switches
from strategies.argument_checks import at_least
from strategies.jax.replicas.collective_equations import (
    BlockExchange,
    CollectiveKind,
    Gather,
    Reduce,
    ReplicaGroups,
    without_gradient,
)
from strategies.jax.replicas.reduction_ops import (
    DIFFERENTIABLE,
    base_of,
    check_dtype,
    operand,
    parse_op,
    reduce_in_order,
)
from strategies.jax.replicas.replica_context import ReplicaContext, get_replica_context
from strategies.typing import Leaf, Tree


def replication_index() -> jax.Array:
    """Return the global index of this replica, from 0 to R - 1, as an int32 scalar."""
    return get_replica_context().replica_id_in_sync_group


def cross_replica_sum(x: Tree, replica_group_size: int | None = None, *, orthogonal: bool = False) -> Tree:
    """Return the sum over a group of replicas; a replica's gradient is the sum of the group's gradients."""
    return jax.tree.map(partial(_ReplicaGroup(replica_group_size, orthogonal).collect, Reduce("sum")), x)


def cross_replica_mean(x: Tree, replica_group_size: int | None = None, *, orthogonal: bool = False) -> Tree:
    """Return the mean over a group of replicas; a replica's gradient is the mean of the group's gradients.

    The intermediate sum of float16 values does not overflow. Means of integers are truncated towards zero.
    """
    return jax.tree.map(partial(_ReplicaGroup(replica_group_size, orthogonal).collect, Reduce("mean")), x)


def replication_normalise(x: Tree) -> Tree:
    """Divide by the number of all replicas.

    Raises:
        TypeError: If an array does not have a floating-point dtype.
    """
    total = get_replica_context().num_replicas_in_sync

    def normalise(leaf: Leaf) -> jax.Array:
        array = jnp.asarray(leaf)
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(
                f"replication_normalise was called with {array.dtype}; convert it to a floating-point dtype"
            )
        return array / jnp.asarray(total, array.dtype)

    return jax.tree.map(normalise, x)


def assume_equal_across_replicas(x: Tree, inplace: bool = False) -> Tree:
    """Return the same values, declared equal on all replicas, as the conditions of loops must be.

    Nothing is checked and nothing is sent. If a condition differs between replicas and a collective stands in one of
    its branches, the replicas wait for each other forever. `inplace` is the original's argument; nothing is copied
    in either case.
    """
    require_switches(inplace=inplace)
    return jax.tree.map(jnp.asarray, x)


def all_gather(x: Tree, replica_group_size: int | None = None, *, orthogonal: bool = False) -> Tree:
    """Return the values of a group's k replicas, of shape [k, *shape], on each of them.

    A replica's gradient is the sum, over the group, of the gradients with respect to its value.
    """
    return jax.tree.map(partial(_ReplicaGroup(replica_group_size, orthogonal).collect, Gather()), x)


def all_to_all(
    x: Tree,
    split_dimension: int,
    concat_dimension: int,
    replica_group_size: int | None = None,
    *,
    orthogonal: bool = False,
) -> Tree:
    """Split a value into one block per replica of a group, send each replica its block, and concatenate the blocks.

    The gradient is the same operation with the two dimensions swapped.

    Args:
        x: Arrays of shape [..., k * m, ...], for a group of k replicas.
        split_dimension: The dimension that is split into k blocks.
        concat_dimension: The dimension along which the received blocks are concatenated, in replica order.
        replica_group_size: The size k of a group.
        orthogonal: Whether groups lie across blocks of neighbours; see `ReplicaGroups`.

    Raises:
        ValueError: If an array lacks one of the dimensions, or k does not divide the length of `split_dimension`.
    """
    group = _ReplicaGroup(replica_group_size, orthogonal)
    return jax.tree.map(lambda leaf: group.exchange(leaf, split_dimension, concat_dimension), x)


def reduce_scatter(
    x: Tree, replica_group_size: int | None = None, op: str = "ADD", *, orthogonal: bool = False
) -> Tree:
    """Reduce vectors over a group of k replicas, and give each replica its part of the result.

    ADD, MEAN, SQUARE_ADD and LOCAL have a gradient.

    Args:
        x: Arrays of shape [n].
        replica_group_size: The size k of a group.
        op: ADD, MEAN, MUL, MIN, MAX, LOGICAL_AND, LOGICAL_OR, SQUARE_ADD (the sum of squares) or LOCAL (this
            replica's part of its own value). The original's prefix COLLECTIVE_OP_ is accepted.
        orthogonal: Whether groups lie across blocks of neighbours; see `ReplicaGroups`.

    Returns:
        Arrays of shape [ceil(n / k)] with the same dtypes. If k does not divide n, the last parts end with zeros.

    Raises:
        ValueError: If `op` is unknown, or an array is not a vector.
    """
    group = _ReplicaGroup(replica_group_size, orthogonal)
    name_of_op = parse_op(op)
    for leaf in jax.tree.leaves(x):
        if jnp.ndim(leaf) != 1:
            raise ValueError(f"reduce_scatter takes arrays of rank 1, not of shape {list(jnp.shape(leaf))}; reshape it")
    return jax.tree.map(lambda leaf: group.reduce_scatter(leaf, name_of_op), x)


class _ReplicaGroup:
    """The group to which the replica of the current trace belongs."""

    def __init__(self, size: int | None, is_orthogonal: bool) -> None:
        require_switches(orthogonal=is_orthogonal)
        self._context: ReplicaContext = get_replica_context()
        self._groups = ReplicaGroups(size or 0, is_orthogonal)
        self._total = self._context.num_replicas_in_sync
        self._size = len(self._groups.members(self._total)[0])

    def collect(self, kind: CollectiveKind, x: Tree) -> jax.Array:
        """Return this replica's result of a collective of its group."""
        context = self._context
        name, index = context.next_name(), context.replica_id_in_sync_group
        return context.reducer.collect(kind, self._groups, index, jnp.asarray(x), name)

    def exchange(self, x: Tree, split: int, concat: int) -> jax.Array:
        """Return the blocks that all replicas of the group send to this one, concatenated."""
        shape = jnp.shape(x)
        for dimension in (split, concat):
            if not 0 <= at_least(0, "a dimension of all_to_all", dimension) < len(shape):
                raise ValueError(f"all_to_all along dimension {dimension}, but the shape is {list(shape)}")
        if shape[split] % self._size:
            raise ValueError(
                f"all_to_all splits dimension {split} of shape {list(shape)} among {self._size} replicas; its length "
                "must be a multiple of their number"
            )
        return self.collect(BlockExchange(split, concat), x)

    def reduce_scatter(self, x: Tree, op: str) -> jax.Array:
        """Return this replica's part of the reduced vector."""
        value = jnp.asarray(x)
        name = self._context.next_name()

        def scatter(index: jax.Array, value: jax.Array) -> jax.Array:
            part = -(-value.size // self._size)
            padded = jnp.pad(operand(op, value), (0, part * self._size - value.size))
            whole = self._reduced(base_of(op), index, padded, name)
            rank = self._groups.rank(index, self._total)
            return jax.lax.dynamic_slice(whole, (rank * part,), (part,)).astype(value.dtype)

        if op not in DIFFERENTIABLE:
            allowed = f"{', '.join(DIFFERENTIABLE[:-1])} or {DIFFERENTIABLE[-1]}"
            refused = without_gradient(scatter, f"reduce_scatter with {op} has no gradient; use {allowed}")
            return refused(self._context.replica_id_in_sync_group, value)
        return scatter(self._context.replica_id_in_sync_group, value)

    def _reduced(self, op: str, index: jax.Array, value: jax.Array, name: str) -> jax.Array:
        collect = self._context.reducer.collect
        if op == "local":
            return value
        if op == "prod":
            check_dtype(value.dtype, reduces=True)
            gathered = collect(Gather(), self._groups, index, value, name)
            return reduce_in_order(op, [gathered[member] for member in range(self._size)])
        return collect(Reduce(op), self._groups, index, value, name)
