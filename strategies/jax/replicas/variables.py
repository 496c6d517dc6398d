"""Variables of programs that do without `Trainer`: the same everywhere, or one per replica until they are read."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from strategies.data.replication import is_in_program
from strategies.jax.programs.feed_program import note_constant
from strategies.jax.replicas.dealing import mirrored
from strategies.jax.replicas.replicas import Replicas
from strategies.per_replica import PerReplica
from strategies.typing import Leaf, Tree

Synchronization = Literal["on_write", "on_read"]
AGGREGATIONS = ("sum", "mean", "only_first_replica")


class MirroredVariable:
    """A pytree that is the same on all replicas; what replicas write is reduced on writing.

    Semantics: the original's `IPUMirroredVariable` (synchronization ON_WRITE).
    """

    def __init__(self, replicas: Replicas, initial: Tree, aggregation: str) -> None:
        self._replicas = replicas
        self._aggregation = _checked(aggregation)
        self._value = self._placed(replicas.broadcast(initial))

    @property
    def value(self) -> Tree:
        """The current value; with `variables_on_host` NumPy arrays in host memory, else JAX arrays.

        A function that `strategy.run` runs, or the body of a loop, is compiled anew where it reads it here and it has
        changed; as an argument it may change without that. To a loss function it is a constant that may not change.
        """
        value, variable = self._value, weakref.ref(self)
        note_constant(lambda: getattr(variable(), "_value", value) is value)
        return value

    def read_value(self) -> Tree:
        """Return the current value; asks nobody."""
        return self.value

    def assign(self, value: Tree) -> None:
        """Set the value.

        Args:
            value: `PerReplica`, reduced over all replicas of all instances (a collective call), or one tree that
                is the same on all instances; converted to the variable's dtypes.

        Raises:
            RuntimeError: in a program that is being compiled.
            ValueError: if it differs from the variable in structure or shapes, or an integer variable cannot hold it.
        """
        _refuse_in_program("assign")
        self._value = self._placed(_like(self._value, _reduced(self._replicas, self._aggregation, value)))

    def _placed(self, value: Tree) -> Tree:
        if self._replicas.variables_on_host:
            return mirrored(jax.tree.map(_host_copy, value))
        return mirrored(jax.device_put(value, self._replicas.variables_device, may_alias=False))


class SyncOnReadVariable:
    """A pytree of each replica's own, such as batch statistics; reduced when it is read.

    Semantics: the original's `IPUSyncOnReadVariable` (synchronization ON_READ): it lives with the replicas, also with
    `variables_on_host`. **All instances read at the same time**, so they also write checkpoints at the same time.

    Attributes:
        values: the local replicas' values; hand them to `strategy.run` as an argument.
    """

    def __init__(self, replicas: Replicas, initial: Tree, aggregation: str) -> None:
        self._replicas = replicas
        self._aggregation = _checked(aggregation)
        first = replicas.broadcast(initial)
        self._layout = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), first)
        self.values = replicas.per_replica(lambda _: first)

    def read_value(self) -> Tree:
        """Return the values of all replicas of all instances, reduced; a collective call.

        Raises:
            RuntimeError: in a program that is being compiled.
        """
        _refuse_in_program("read_value")
        return _reduced(self._replicas, self._aggregation, self.values)

    def assign(self, value: Tree) -> None:
        """Set the replicas' values; asks nobody.

        Args:
            value: `PerReplica` with one tree for each local replica, or one tree to be read back: with "sum" each
                replica then gets its part, the value divided by the number of all replicas. Converted to the variable's
                dtypes.

        Raises:
            RuntimeError: in a program that is being compiled.
            ValueError: if it differs from the variable in structure or shapes, or has not one tree for each replica; if
                an integer variable cannot hold it, or its part of a sum.
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
    """Make the variable that `strategy.variable` describes."""
    kinds: dict[str, Callable[..., MirroredVariable | SyncOnReadVariable]] = {
        "on_write": MirroredVariable,
        "on_read": SyncOnReadVariable,
    }
    if synchronization not in kinds:
        raise ValueError(f"synchronization is {synchronization!r}; use one of {', '.join(kinds)}")
    return kinds[synchronization](replicas, initial() if callable(initial) else initial, aggregation)


def values_of(tree: Tree) -> Tree:
    """Return a tree with the value of each variable in its place."""
    return jax.tree.map(_value_of, tree)


def _value_of(leaf: Leaf) -> Tree:
    if isinstance(leaf, SyncOnReadVariable):
        return leaf.values
    return leaf.value if isinstance(leaf, MirroredVariable) else leaf


def _refuse_in_program(call: str) -> None:
    if is_in_program():
        raise RuntimeError(
            f"{call} of a variable was called while a program is compiled, and would happen once, not in each run; "
            "call it outside: hand what the variable holds over as an argument, and return what it is to hold"
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
    """`value` with the dtypes of `variable`, if it has its structure and shapes."""
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
    """Refuse what an integer dtype would make another number of: fractions, and what is too large."""
    if dtype.kind not in "iu" or value.dtype.kind == "b":
        return
    with np.errstate(invalid="ignore"):  # NaN is no integer either
        is_other = np.asarray(value.astype(dtype) != value)
    if is_other.any():
        raise ValueError(
            f"{value[is_other].flat[0]} was assigned to a variable of {dtype}, which cannot hold it; round it, or make "
            "the variable of floating point"
        )


def _part(leaf: Leaf, parts: int) -> jax.Array:
    """Return the share of a sum that each of so many replicas gets."""
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
            f"{number} was assigned to a sum of {array.dtype} over {parts} replicas, among which it cannot be divided; "
            f"assign a multiple of {parts}, or PerReplica with a part for each replica"
        )
    return jnp.asarray(np.asarray(values // parts, array.dtype))


def _host_copy(leaf: Leaf) -> np.ndarray:
    array = np.array(leaf)
    array.flags.writeable = False
    return array
