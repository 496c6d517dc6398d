"""Variables without a `Trainer`, and parts of arrays that are cut into shards."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

import strategies.trees as trees
from strategies.data.layout import is_in_program
from strategies.exchange.flat import Shards
from strategies.exchange.shard_fetcher import ShardFetcher
from strategies.jax.replicas.devices import borrow
from strategies.jax.replicas.replicas import Replicas
from strategies.jax.replicas.sharding import mirrored
from strategies.late_jax import jax, jnp
from strategies.stored_shards import Find, StoredReplicas, bytes_of
from strategies.typing import Leaf, Tree
from strategies.values import PerReplica


def shards_of(replicas: Replicas, min_elements: int, keeps_copies: bool = False) -> Shards:
    """Return the division of arrays among replicas.

    Args:
        replicas: Replicas of all instances.
        min_elements: Least number of elements of an array that is cut.
        keeps_copies: Whether instances also have copies of each other's parts, if the job goes on after a loss.
    """
    number, stored = replicas.num_replicas_in_sync, replicas.stored
    blocks = len(stored.starts) if keeps_copies else 1
    return Shards(number, stored.slots, min_elements, blocks, number % replicas.num_instances == 0)


def take(shards: Shards, leaf: jax.Array, first: jax.Array) -> jax.Array:
    """Return an instance's part of an array; traceable.

    Args:
        shards: Division of the array.
        leaf: Array, whole.
        first: First replica of each block of the instance, int32.
    """
    if not shards.divides(leaf):
        return leaf
    flat, part = leaf.reshape(-1), shards.part(leaf)
    missing = (shards.replicas + (not shards.is_even)) * part - flat.size
    if missing:
        flat = jnp.pad(flat, (0, missing))
    starts = jnp.reshape(first, (shards.blocks,))
    blocks = [jax.lax.dynamic_slice(flat, (start * part,), (shards.local * part,)) for start in starts]
    return (jnp.concatenate(blocks) if len(blocks) > 1 else blocks[0]).reshape(shards.shape(leaf))


def replica_rows(array: Leaf, stored: StoredReplicas) -> Find:
    """Return a function that finds replicas' rows in an array, as bytes; see `StoredReplicas.place`.

    Args:
        array: Parts for `stored`, in `slots` places for each of its blocks.
        stored: Replicas whose parts they are.
    """

    def find(replicas: range) -> np.ndarray:
        rows = bytes_of(borrow(array), len(stored.starts) * stored.slots)
        first = stored.place(replicas.start)
        return rows[first : first + len(replicas)]

    return find


@dataclass(frozen=True)
class PartOfArray:
    """The part of a sharded array that this instance holds.

    Attributes:
        local: The part.
        whole: Shape and dtype of the array.
        shards: Division of the array.
        replicas: Replicas of the job, which connect the instances.
    """

    local: jax.Array | np.ndarray
    whole: jax.ShapeDtypeStruct | trees.ShapeOfArray
    shards: Shards
    replicas: Replicas

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.whole.shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the array."""
        return np.dtype(self.whole.dtype)

    def gather(self, name: str) -> np.ndarray:
        """Return the whole array. Collective.

        Args:
            name: Name of the array for messages.
        """
        own: np.ndarray = borrow(self.local).reshape(-1)
        size = self.shards.local * self.shards.part(self.whole)
        own = own[:size] if own.size >= size else np.pad(own, (0, size - own.size))
        parts = self.replicas.communicator.all_gather(np.ascontiguousarray(own), name=f"parts of {name}")
        whole: np.ndarray = self.shards.join(parts, self.whole, np)
        return whole

    def of(self, array: Leaf) -> Tree:
        """Return this instance's part of another array of the same shape, placed like this one."""
        starts, flat = self.replicas.stored.starts[: self.shards.blocks], np.asarray(array).reshape(-1)
        blocks = [self.shards.padded(flat[self.shards.bounds(array, start)], array) for start in starts]
        part = np.concatenate(blocks)[: self.local.size].reshape(self.local.shape)
        if isinstance(self.local, np.ndarray):
            return part
        return jax.device_put(part, getattr(self.local, "sharding", None))


@dataclass(frozen=True)
class ShardedTree:
    """The division of a tree of arrays, some of which are cut into shards.

    Attributes:
        replicas: Replicas of the job, which connect the instances.
        shards: Division of arrays.
        shapes: Shapes and dtypes of all arrays, whole.
        is_cut: Whether each array is cut, as a tree of the same structure.
    """

    replicas: Replicas
    shards: Shards
    shapes: Tree
    is_cut: Tree

    def take(self, tree: Tree, first: jax.Array) -> Tree:
        """Return an instance's parts of whole arrays, as `take` does; traceable."""
        return trees.map(lambda leaf, is_cut: take(self.shards, leaf, first) if is_cut else leaf, tree, self.is_cut)

    def cut_anew(self, tree: Tree, rows: ShardFetcher, had: StoredReplicas) -> Tree:
        """Return this instance's parts, and copies, of arrays that are cut for an earlier spread. Collective.

        Args:
            tree: Parts for that spread.
            rows: Source of parts.
            had: Stored replicas of this instance in that spread.
        """
        numbers = itertools.count()

        def cut(leaf: Leaf, shape: Leaf, is_cut: bool) -> Leaf:
            number = next(numbers)
            return self._cut_anew(leaf, shape, rows, had, f"optimizer state/{number}") if is_cut else leaf

        return trees.map(cut, tree, self.shapes, self.is_cut)

    def _cut_anew(self, leaf: Leaf, whole: Leaf, rows: ShardFetcher, had: StoredReplicas, name: str) -> jax.Array:
        shards, stored, dtype = self.shards, self.replicas.stored, np.dtype(whole.dtype)
        width = shards.part(whole) * dtype.itemsize
        placed = np.zeros((shards.blocks, shards.local, width), np.uint8)
        blocks = [stored.own, stored.kept][: shards.blocks]
        for block, found in zip(placed, rows.fetch(blocks, replica_rows(leaf, had), width, name), strict=True):
            block[: len(found)] = found
        return jnp.array(placed.reshape(-1).view(dtype).reshape(shards.shape(whole)))

    def whole(self, tree: Tree) -> Tree:
        """Return the tree with a `PartOfArray` for each array that this instance holds only in part."""
        return trees.map(
            lambda leaf, shape, is_cut: PartOfArray(leaf, shape, self.shards, self.replicas) if is_cut else leaf,
            tree,
            self.shapes,
            self.is_cut,
        )


def rows_of_replicas(replicas: Replicas) -> Callable[[Leaf], PartOfArray]:
    """Return a function that makes a `PartOfArray` of an array with the same number of rows for each local replica."""
    shards = shards_of(replicas, 1)

    def of_all(leaf: Leaf) -> PartOfArray:
        rows = leaf.shape[0] // len(replicas.local_replicas) * shards.replicas
        return PartOfArray(leaf, jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype), shards, replicas)

    return of_all


# ---- variables

Synchronization = Literal["on_write", "on_read"]
AGGREGATIONS = ("sum", "mean", "only_first_replica")


class MirroredVariable:
    """A pytree that is equal on all replicas; values that replicas assign are reduced.

    Semantics: the original's `IPUMirroredVariable` (synchronization ON_WRITE).
    """

    def __init__(self, replicas: Replicas, initial: Tree, aggregation: str) -> None:
        self._replicas = replicas
        self._aggregation = _checked(aggregation)
        self._value = self._placed(replicas.broadcast(initial))

    @property
    def value(self) -> Tree:
        """The current value: NumPy arrays in host memory with `variables_on_host`, else JAX arrays.

        If a function that `strategy.run` runs, or the body of a loop, reads the value here, a change of the value
        compiles the function anew. If the value is an argument of the function, a change compiles nothing. In a loss
        function the value is a constant, and must not change.
        """
        value, variable = self._value, weakref.ref(self)
        from strategies.jax.programs.feed_program import note_constant  # imports JAX

        note_constant(lambda: getattr(variable(), "_value", value) is value)
        return value

    def read_value(self) -> Tree:
        """Return the current value. Not collective."""
        return self.value

    def assign(self, value: Tree) -> None:
        """Set the value. Collective if `value` is a `PerReplica`.

        Args:
            value: `PerReplica`, reduced over all replicas of all instances, or one tree that is the same on all
                instances; converted to the variable's dtypes.

        Raises:
            RuntimeError: A program is being compiled.
            ValueError: Its structure or shapes are not the variable's, or an integer variable cannot hold it.
        """
        _check_outside_program("assign")
        self._value = self._placed(_like(self._value, _reduced(self._replicas, self._aggregation, value)))

    def _placed(self, value: Tree) -> Tree:
        if self._replicas.variables_on_host:
            return mirrored(jax.tree.map(_host_copy, value))
        return mirrored(jax.device_put(value, self._replicas.variables_device, may_alias=False))


class SyncOnReadVariable:
    """A pytree with a value of its own on each replica, such as batch statistics; it is reduced when it is read.

    Semantics: the original's `IPUSyncOnReadVariable` (synchronization ON_READ). It lives with the replicas, even with
    `variables_on_host`. **All instances read at the same time**, so they also write checkpoints at the same time.

    Attributes:
        values: Values of the local replicas; give them to `strategy.run` as an argument.
    """

    def __init__(self, replicas: Replicas, initial: Tree, aggregation: str) -> None:
        self._replicas = replicas
        self._aggregation = _checked(aggregation)
        first = replicas.broadcast(initial)
        self._layout = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), first)
        self.values = replicas.per_replica(lambda _: first)

    def read_value(self) -> Tree:
        """Return the values of all replicas of all instances, reduced. Collective.

        Raises:
            RuntimeError: A program is being compiled.
        """
        _check_outside_program("read_value")
        return _reduced(self._replicas, self._aggregation, self.values)

    def assign(self, value: Tree) -> None:
        """Set the replicas' values. Not collective.

        Args:
            value: `PerReplica` with one tree for each local replica, or the tree that `read_value` is to return. With
                "sum" each replica then gets the value divided by the number of all replicas. Converted to the
                variable's dtypes.

        Raises:
            RuntimeError: A program is being compiled.
            ValueError: Its structure or shapes are not the variable's, there is not one tree for each replica, or an
                integer variable cannot hold it or its part of a sum.
        """
        _check_outside_program("assign")
        value = self._replicas.sharding.shard(value)
        if isinstance(value, PerReplica):
            self.values = PerReplica(tuple(_like(self._layout, one) for one in value), value.replicas)
            return
        parts = self._replicas.num_replicas_in_sync if self._aggregation == "sum" else 1
        share = jax.tree.map(lambda leaf: _part(leaf, parts), _like(self._layout, value))
        self.values = self._replicas.per_replica(lambda _: share)


def make_variable(
    replicas: Replicas, initial: Tree, synchronization: Synchronization, aggregation: str
) -> MirroredVariable | SyncOnReadVariable:
    """Return the variable that `strategy.variable` describes."""
    kinds: dict[str, Callable[..., MirroredVariable | SyncOnReadVariable]] = {
        "on_write": MirroredVariable,
        "on_read": SyncOnReadVariable,
    }
    if synchronization not in kinds:
        raise ValueError(f"synchronization is {synchronization!r}; use one of {', '.join(kinds)}")
    return kinds[synchronization](replicas, initial() if callable(initial) else initial, aggregation)


def values_of(tree: Tree) -> Tree:
    """Return a tree with each variable replaced by its value."""
    return trees.map(_value_of, tree)


def _value_of(leaf: Leaf) -> Tree:
    if isinstance(leaf, SyncOnReadVariable):
        return leaf.values
    return leaf.value if isinstance(leaf, MirroredVariable) else leaf


def _check_outside_program(call: str) -> None:
    if is_in_program():
        raise RuntimeError(
            f"{call} of a variable was called while a program is compiled, and would happen once, not in each run; "
            "call it outside: give the program the variable's value as an argument, and let it return the new value"
        )


def _checked(aggregation: str) -> str:
    lower = str(aggregation).lower()
    if lower not in AGGREGATIONS:
        raise ValueError(f"aggregation is {aggregation!r}; use one of {', '.join(AGGREGATIONS)}")
    return lower


def _reduced(replicas: Replicas, aggregation: str, value: Tree) -> Tree:
    value = replicas.sharding.shard(value)
    if not isinstance(value, PerReplica):
        return value
    if aggregation == "only_first_replica":
        return replicas.broadcast(value.values[0])
    return replicas.reduce(aggregation, value)


def _like(variable: Any, value: Tree) -> Tree:
    """Return `value` with the dtypes of `variable`, if it has the same structure and shapes."""
    given, wanted = (str(jax.tree.structure(tree)) for tree in (value, variable))
    if given != wanted:
        raise ValueError(f"a value of structure {given} for a variable of structure {wanted}; assign one like it")
    return jax.tree.map(_leaf_like, variable, value)


def _leaf_like(variable: Any, value: Tree) -> Tree:
    if np.shape(value) != variable.shape:
        raise ValueError(f"a value of shape {list(np.shape(value))} for a variable of {list(variable.shape)}")
    if getattr(value, "dtype", None) == variable.dtype:
        return value
    _check_integers(variable.dtype, np.asarray(value))
    return jnp.asarray(value, variable.dtype)


def _check_integers(dtype: np.dtype, value: np.ndarray) -> None:
    """Refuse numbers that an integer dtype would change: fractions and too large numbers."""
    if dtype.kind not in "iu" or value.dtype.kind == "b":
        return
    with np.errstate(invalid="ignore"):  # NaN is not an integer either
        is_other = np.asarray(value.astype(dtype) != value)
    if is_other.any():
        raise ValueError(
            f"{value[is_other].flat[0]} was assigned to a variable of {dtype}, which cannot hold it; round it, or use "
            "a floating-point variable"
        )


def _part(leaf: Leaf, parts: int) -> jax.Array:
    """Return the share of a sum for each of `parts` replicas."""
    array = jnp.asarray(leaf)
    if parts == 1:
        return array
    if array.dtype.kind not in "iu":
        return (array / parts).astype(array.dtype)
    values = np.asarray(array).astype(object)  # Python's integers
    left = np.asarray(values % parts, bool)
    if left.any():
        number = np.extract(left, values)[0]
        raise ValueError(
            f"{number} was assigned to a sum of {array.dtype} over {parts} replicas, which cannot share it evenly; "
            f"assign a multiple of {parts}, or PerReplica with a part for each replica"
        )
    return jnp.asarray(np.asarray(values // parts, array.dtype))


def _host_copy(leaf: Leaf) -> np.ndarray:
    array = np.array(leaf)
    array.flags.writeable = False
    return array
