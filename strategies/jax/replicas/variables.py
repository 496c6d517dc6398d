"""Variables of programs without a `Trainer`: equal on all replicas, or one per replica until they are read."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

import strategies.trees as trees
from strategies.data.replication import is_in_program
from strategies.jax.replicas.dealing import mirrored
from strategies.jax.replicas.replicas import Replicas
from strategies.late_jax import jax, jnp
from strategies.per_replica import PerReplica
from strategies.typing import Leaf, Tree

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
        _refuse_in_program("assign")
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
        _refuse_in_program("read_value")
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
        _refuse_in_program("assign")
        value = self._replicas.dealing.deal(value)
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


def _refuse_in_program(call: str) -> None:
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
    value = replicas.dealing.deal(value)
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
