"""Collectives between replicas, inside `strategy.run` and loss functions, with gradients.

Values are taken in the order of the replicas and 16-bit floats are combined in float32, so results have the same bits
for every number of instances. Where no group of replicas crosses instances they are compiled into the program; where
one does, the local replicas meet in a callback. Every function is called by all replicas, alike, and takes a pytree of
arrays (a single array, a list, a dict) of equal shapes and dtypes on all of them. `replica_group_size` divides the
replicas into groups of neighbours, None or 0 makes one group of all; `orthogonal` divides them across: see
`ReplicaGroups`. All raise RuntimeError where there is no replica, ValueError for a size that does not divide the
number of replicas, and TypeError for dtypes that instances do not exchange (complex numbers; sums of bool).

Semantics: the original's `cross_replica_ops`, `all_to_all_op`, `reduce_scatter_op` and `replication_ops`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from strategies.reduction_ops import base_of, check_dtype, operand, parse_op, reduce_in_order
from strategies.replica_context import ReplicaContext, get_replica_context
from strategies.replica_groups import ReplicaGroups
from strategies.sharding import at_least

Function = Callable[[jax.Array], jax.Array]


def replication_index() -> jax.Array:
    """The global index of this replica, 0 to R - 1; an int32 scalar."""
    return get_replica_context().replica_id_in_sync_group


def cross_replica_sum(x: Any, replica_group_size: int | None = None, *, orthogonal: bool = False) -> Any:
    """The sum over the replicas of a group; its gradient is the sum of their gradients."""
    group = _Group(replica_group_size, orthogonal)
    return _each(x, lambda name: (group.reduced("sum", name), group.reduced("sum", f"{name}/gradient")))


def cross_replica_mean(x: Any, replica_group_size: int | None = None, *, orthogonal: bool = False) -> Any:
    """The mean over the replicas of a group; its gradient is the mean of their gradients.

    Float16 does not overflow on the way. Integers are truncated towards zero.
    """
    group = _Group(replica_group_size, orthogonal)
    return _each(x, lambda name: (group.reduced("mean", name), group.reduced("mean", f"{name}/gradient")))


def replication_normalise(x: Any) -> Any:
    """Divided by the number of all replicas.

    Raises:
        TypeError: if it is not of a floating-point dtype.
    """
    total = get_replica_context().num_replicas_in_sync

    def normalise(leaf: Any) -> jax.Array:
        array = jnp.asarray(leaf)
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(
                f"replication_normalise was called with {array.dtype}; convert it to a floating-point dtype"
            )
        return array / jnp.asarray(total, array.dtype)

    return jax.tree.map(normalise, x)


def assume_equal_across_replicas(x: Any, inplace: bool = False) -> Any:
    """The same values; says to readers that they do not differ between replicas, as conditions of loops must not.

    Nothing is checked and nothing is sent. A condition that does differ makes replicas wait for each other for ever
    when a collective stands in its branches. `inplace` is the original's: here nothing is copied either way.
    """
    return jax.tree.map(jnp.asarray, x)


def all_gather(x: Any, replica_group_size: int | None = None, *, orthogonal: bool = False) -> Any:
    """The values of a group's k replicas, of shape [k, *shape], on each of them.

    A replica's gradient is the sum of the gradients of what all of them got of its value.
    """
    group = _Group(replica_group_size, orthogonal)

    def backward(name: str) -> Function:
        reduce = group.reduced("sum", f"{name}/gradient")
        return lambda gradient: reduce(gradient)[group.rank]

    return _each(x, lambda name: (group.gathered(name), backward(name)))


def all_to_all(
    x: Any,
    split_dimension: int,
    concat_dimension: int,
    replica_group_size: int | None = None,
    *,
    orthogonal: bool = False,
) -> Any:
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
    group = _Group(replica_group_size, orthogonal)
    return _each(
        x,
        lambda name: (
            group.exchanged(split_dimension, concat_dimension, name),
            group.exchanged(concat_dimension, split_dimension, f"{name}/gradient"),
        ),
    )


def reduce_scatter(x: Any, replica_group_size: int | None = None, op: str = "ADD", *, orthogonal: bool = False) -> Any:
    """Reduce over a group of k replicas and give each its part of the result.

    ADD, MEAN and LOCAL have a gradient.

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
    group = _Group(replica_group_size, orthogonal)
    name_of_op = parse_op(op)
    for leaf in jax.tree.leaves(x):
        if jnp.ndim(leaf) != 1:
            raise ValueError(f"reduce_scatter takes arrays of rank 1, not of shape {list(jnp.shape(leaf))}; reshape it")
    return jax.tree.map(lambda leaf: _reduce_scatter(group, name_of_op, jnp.asarray(leaf)), x)


def _reduce_scatter(group: _Group, op: str, x: jax.Array) -> jax.Array:
    def forward(name: str) -> Function:
        def scatter(value: jax.Array) -> jax.Array:
            part = -(-value.size // group.size)
            padded = jnp.pad(operand(op, value), (0, part * group.size - value.size))
            whole = padded if op == "LOCAL" else group.reduced(base_of(op), name)(padded)
            return jax.lax.dynamic_slice(whole, (group.rank * part,), (part,)).astype(value.dtype)

        return scatter

    def backward(name: str) -> Function:
        gather = group.gathered(f"{name}/gradient")

        def unscatter(gradient: jax.Array) -> jax.Array:
            if op == "LOCAL":
                whole = jnp.zeros((group.size, gradient.size), gradient.dtype).at[group.rank].set(gradient)
            elif op in ("ADD", "MEAN"):
                whole = gather(gradient) / (group.size if op == "MEAN" else 1)
            else:
                raise TypeError(f"reduce_scatter with {op} has no gradient; use ADD, MEAN or LOCAL")
            return whole.reshape(-1)[: x.size].astype(gradient.dtype)

        return unscatter

    result: jax.Array = _each(x, lambda name: (forward(name), backward(name)))
    return result


class _Group:
    """The group of the replica whose program is being traced."""

    def __init__(self, size: int | None, is_orthogonal: bool) -> None:
        context: ReplicaContext = get_replica_context()
        self._reducer = context.reducer
        self._groups = ReplicaGroups(size or 0, is_orthogonal)
        members = self._groups.members(context.num_replicas_in_sync)
        self.size = len(members[0])
        self._is_whole = len(members) == 1
        index = context.replica_id_in_sync_group
        self.rank = index // len(members) if is_orthogonal else index % self.size

    def gathered(self, name: str) -> Function:
        """Gives the values of the group, in order, along a new first axis."""
        return lambda x: self._reducer.gather(x, self._groups, name)

    def reduced(self, op: str, name: str) -> Function:
        """Gives the reduction over the group."""

        def reduce(x: jax.Array) -> jax.Array:
            check_dtype(x.dtype, reduces=True)
            if self._is_whole and op != "prod":
                return self._reducer.combine(op, x, name)
            gathered = self._reducer.gather(x, self._groups, name)
            return reduce_in_order(op, [gathered[member] for member in range(self.size)])

        return reduce

    def exchanged(self, split: int, concat: int, name: str) -> Function:
        """Gives this replica's blocks of what all have, one behind the other."""

        def exchange(x: jax.Array) -> jax.Array:
            for dimension in (split, concat):
                if not 0 <= at_least(0, "a dimension of all_to_all", dimension) < x.ndim:
                    raise ValueError(f"all_to_all along dimension {dimension} of shape {list(x.shape)}; there is none")
            if x.shape[split] % self.size:
                raise ValueError(
                    f"all_to_all splits dimension {split} of shape {list(x.shape)} among {self.size} replicas; it must "
                    "be a multiple of their number"
                )
            rows = x.shape[split] // self.size
            gathered = self.gathered(name)(x)
            mine = jax.lax.dynamic_slice_in_dim(gathered, self.rank * rows, rows, split + 1)
            return jnp.concatenate([mine[member] for member in range(self.size)], concat)

        return exchange


def _each(tree: Any, functions_of: Callable[[str], tuple[Function, Function]]) -> Any:
    """Apply a function that has a gradient to each leaf; both are made for a name of their own."""
    context = get_replica_context()

    def apply(leaf: Any) -> jax.Array:
        forward, backward = functions_of(context.next_name())
        x = jnp.asarray(leaf)
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return forward(x)
        function = jax.custom_vjp(forward)
        function.defvjp(lambda value: (forward(value), None), lambda _, gradient: (backward(gradient),))
        result: jax.Array = function(x)
        return result

    return jax.tree.map(apply, tree)
