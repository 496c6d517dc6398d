"""Collectives between replicas, inside `strategy.run` and loss functions, with derivatives of any order.

Values are taken in the order of the replicas and 16-bit floats are combined in float32, so results have the same bits
for every number of instances. The local replicas meet in a callback; values leave the instance only where a group of
replicas crosses instances. Every function is called by all replicas, alike, and takes a pytree of
arrays (a single array, a list, a dict) of equal shapes and dtypes on all of them. `replica_group_size` divides the
replicas into groups of neighbours, None or 0 makes one group of all; `orthogonal` divides them across: see
`ReplicaGroups`. All raise RuntimeError where there is no replica, ValueError for a size that does not divide the
number of replicas, and TypeError for dtypes that instances do not exchange (complex numbers; sums of bool).

Semantics: the original's `cross_replica_ops`, `all_to_all_op`, `reduce_scatter_op` and `replication_ops`.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from popdist.switches import require_switches
from strategies.argument_checks import at_least
from strategies.jax.replicas.collective_equations import BlockExchange, CollectiveKind, Gather, Reduce, without_gradient
from strategies.jax.replicas.reduction_ops import (
    DIFFERENTIABLE,
    base_of,
    check_dtype,
    operand,
    parse_op,
    reduce_in_order,
)
from strategies.jax.replicas.replica_context import ReplicaContext, get_replica_context
from strategies.jax.replicas.replica_groups import ReplicaGroups
from strategies.typing import Leaf, Tree


def replication_index() -> jax.Array:
    """Return the global index of this replica, 0 to R - 1; an int32 scalar."""
    return get_replica_context().replica_id_in_sync_group


def cross_replica_sum(x: Tree, replica_group_size: int | None = None, *, orthogonal: bool = False) -> Tree:
    """Return the sum over the replicas of a group; its gradient is the sum of their gradients."""
    return jax.tree.map(partial(_ReplicaGroup(replica_group_size, orthogonal).collect, Reduce("sum")), x)


def cross_replica_mean(x: Tree, replica_group_size: int | None = None, *, orthogonal: bool = False) -> Tree:
    """Return the mean over the replicas of a group; its gradient is the mean of their gradients.

    Float16 does not overflow on the way. Integers are truncated towards zero.
    """
    return jax.tree.map(partial(_ReplicaGroup(replica_group_size, orthogonal).collect, Reduce("mean")), x)


def replication_normalise(x: Tree) -> Tree:
    """Divided by the number of all replicas.

    Raises:
        TypeError: if it is not of a floating-point dtype.
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
    """Return the same values; tell readers that replicas agree on them, as conditions of loops must.

    Nothing is checked and nothing is sent. A condition that does differ makes replicas wait for each other for ever
    when a collective stands in its branches. `inplace` is the original's: here nothing is copied either way.
    """
    require_switches(inplace=inplace)
    return jax.tree.map(jnp.asarray, x)


def all_gather(x: Tree, replica_group_size: int | None = None, *, orthogonal: bool = False) -> Tree:
    """Return the values of a group's k replicas, of shape [k, *shape], on each of them.

    A replica's gradient is the sum of the gradients of what all of them got of its value.
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
    """Split into one block for each of a group's k replicas; each concatenates the blocks meant for it, in order.

    Its gradient is the same with the dimensions swapped.

    Args:
        x: arrays of shape [..., k * m, ...].
        split_dimension: that of the k blocks.
        concat_dimension: along which those that arrive are put together.
        replica_group_size: k.
        orthogonal: see `ReplicaGroups`.

    Raises:
        ValueError: if there is no such dimension, or it cannot be divided by k.
    """
    group = _ReplicaGroup(replica_group_size, orthogonal)
    return jax.tree.map(lambda leaf: group.exchange(leaf, split_dimension, concat_dimension), x)


def reduce_scatter(
    x: Tree, replica_group_size: int | None = None, op: str = "ADD", *, orthogonal: bool = False
) -> Tree:
    """Reduce over a group of k replicas and give each its part of the result.

    ADD, MEAN, SQUARE_ADD and LOCAL have a gradient.

    Args:
        x: arrays of shape [n].
        replica_group_size: k.
        op: ADD, MEAN, MUL, MIN, MAX, LOGICAL_AND, LOGICAL_OR, SQUARE_ADD (the sum of the squares) or LOCAL (this
            replica's part of its own value), also with the original's prefix COLLECTIVE_OP_.
        orthogonal: see `ReplicaGroups`.

    Returns:
        Arrays of shape [ceil(n / k)] and the same dtypes; the last ones end with zeros where k does not divide n.

    Raises:
        ValueError: for another op, or for arrays of another rank.
    """
    group = _ReplicaGroup(replica_group_size, orthogonal)
    name_of_op = parse_op(op)
    for leaf in jax.tree.leaves(x):
        if jnp.ndim(leaf) != 1:
            raise ValueError(f"reduce_scatter takes arrays of rank 1, not of shape {list(jnp.shape(leaf))}; reshape it")
    return jax.tree.map(lambda leaf: group.reduce_scatter(leaf, name_of_op), x)


class _ReplicaGroup:
    """The group of the replica whose program is being traced."""

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
        """Return this replica's blocks of what all have, one behind the other."""
        shape = jnp.shape(x)
        for dimension in (split, concat):
            if not 0 <= at_least(0, "a dimension of all_to_all", dimension) < len(shape):
                raise ValueError(f"all_to_all along dimension {dimension} of shape {list(shape)}; there is none")
        if shape[split] % self._size:
            raise ValueError(
                f"all_to_all splits dimension {split} of shape {list(shape)} among {self._size} replicas; it must "
                "be a multiple of their number"
            )
        return self.collect(BlockExchange(split, concat), x)

    def reduce_scatter(self, x: Tree, op: str) -> jax.Array:
        """Return this replica's part of the reduction of vectors."""
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
