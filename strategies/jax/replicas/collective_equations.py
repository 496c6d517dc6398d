"""Collectives between replicas as equations of JAX, with derivatives of any order.

Each is a linear map of the values of all replicas: what it does with tangents is the same again, and its transpose is
another such map. While a program is traced, differentiated and batched, a collective is one equation; only the compiled
program knows that it calls Python, where the replicas meet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from typing_extensions import override

from collectives.reduction import Reduction
from strategies.jax.programs.host_calls import effects_of_calls
from strategies.jax.replicas.replica_groups import ReplicaGroups
from strategies.typing import Leaf

EQUATION = "cross_replica_collective"
"""The name of the equations' primitive."""


class CollectiveKind(ABC):
    """The kind of a collective: the function of the values of a group of replicas. It is immutable.

    Attributes:
        reduces: whether it does arithmetic.
        is_linear: whether it has a derivative.
    """

    reduces = False
    is_linear = True

    @abstractmethod
    def shape(self, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
        """Return the shape of what each of a group of `size` replicas gets for values of this shape."""

    @abstractmethod
    def combine(self, values: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Return the result of each replica of a group; values and results are in the order of the group."""

    @abstractmethod
    def transpose(self, collective: Collective, index: jax.Array, cotangent: jax.Array) -> jax.Array:
        """Return the cotangent of this replica's value, from those of what all got."""

    @abstractmethod
    def batched(self) -> tuple[CollectiveKind, int]:
        """Return the same kind for values with one more axis in front, and the place of that axis in the results."""


@dataclass(frozen=True)
class Reduce(CollectiveKind):
    """The reduction on every replica; `op` is one of `collectives.reduction.OPERATIONS`."""

    op: str
    reduces = True

    @property
    def is_linear(self) -> bool:  # type: ignore[override]
        """Whether it is a sum or a mean."""
        return self.op in ("sum", "mean")

    @override
    def shape(self, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
        return shape

    @override
    def combine(self, values: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        out = np.empty_like(values[0])
        Reduction(self.op, out.dtype).reduce([value.reshape(-1) for value in values], out.reshape(-1), len(values))
        return [out] * len(values)

    def transpose(self, collective: Collective, index: jax.Array, cotangent: jax.Array) -> jax.Array:
        """Return the same reduction."""
        return collective(index, cotangent)

    @override
    def batched(self) -> tuple[CollectiveKind, int]:
        return self, 0


@dataclass(frozen=True)
class Gather(CollectiveKind):
    """The values of all, along a new first axis, on every replica."""

    @override
    def shape(self, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
        return (size, *shape)

    @override
    def combine(self, values: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        return [np.stack(values)] * len(values)

    def transpose(self, collective: Collective, index: jax.Array, cotangent: jax.Array) -> jax.Array:
        """Return the sum of what all replicas have for this one's value."""
        total = replace(collective, kind=Reduce("sum"))(index, cotangent)
        rank = collective.groups.rank(index, collective.total)
        own: jax.Array = jax.lax.dynamic_index_in_dim(total, rank, keepdims=False)
        return own

    @override
    def batched(self) -> tuple[CollectiveKind, int]:
        return self, 1


@dataclass(frozen=True)
class BlockExchange(CollectiveKind):
    """The blocks along `split` that all have for a replica, one behind the other along `concat`."""

    split: int
    concat: int

    @override
    def shape(self, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
        found = list(shape)
        found[self.split] //= size
        found[self.concat] *= size
        return tuple(found)

    @override
    def combine(self, values: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        blocks = zip(*(np.split(value, len(values), self.split) for value in values), strict=True)
        return [np.concatenate(mine, self.concat) for mine in blocks]

    def transpose(self, collective: Collective, index: jax.Array, cotangent: jax.Array) -> jax.Array:
        """Send the blocks back."""
        return replace(collective, kind=BlockExchange(self.concat, self.split))(index, cotangent)

    @override
    def batched(self) -> tuple[CollectiveKind, int]:
        return BlockExchange(self.split + 1, self.concat + 1), 0


CarryOut = Callable[["Collective", int, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Collective:
    """One collective of a program; the same on all replicas.

    Attributes:
        name: what instances call it. Replicas come to collectives of one name in one order.
        kind: what it does.
        groups: of replicas, which keep to themselves.
        total: the replicas of all groups.
        carry_out: called at run time with this, a replica's global index and its value, which it may keep until it
            returns what the replica gets.
    """

    name: str
    kind: CollectiveKind
    groups: ReplicaGroups
    total: int
    carry_out: CarryOut = field(repr=False)

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The replicas of each group."""
        return self.groups.members(self.total)

    def __call__(self, index: jax.Array, value: jax.Array) -> jax.Array:
        """Return the replica's result of the collective; called while its program is traced.

        Args:
            index: its global index, an int32 scalar.
            value: of this replica, of the same shape and dtype on all of them.
        """
        result: jax.Array = _collective.bind(index, value, collective=self)
        return result

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the result for values of this shape."""
        return self.kind.shape(shape, len(self.members[0]))


OfReplica = Callable[[jax.Array, jax.Array], jax.Array]
"""(A replica's global index, its value) -> what it gets."""


def without_gradient(function: OfReplica, refusal: str) -> OfReplica:
    """Return the same function, which may be computed within what is differentiated.

    Args:
        function: gives what has no derivative.
        refusal: what the TypeError says if its gradient is needed all the same.
    """

    @jax.custom_vjp
    def refusing(index: jax.Array, value: jax.Array) -> jax.Array:
        return function(index, value)

    def backward(_: None, gradient: jax.Array) -> NoReturn:
        raise TypeError(refusal)

    # By way of `refusing` itself, so that a derivative of the derivative finds it again.
    refusing.defvjp(lambda index, value: (refusing(index, value), None), backward)
    return refusing


_collective = core.Primitive(EQUATION)


def _shape(index: Leaf, value: Leaf, *, collective: Collective) -> tuple[Leaf, frozenset[object]]:
    return jax.core.ShapedArray(collective.shape(value.shape), value.dtype), effects_of_calls()


def _derive(primals: Sequence[Leaf], tangents: Sequence[Leaf], *, collective: Collective) -> tuple[Leaf, Leaf]:
    index, value = primals
    result = collective(index, value)
    if isinstance(tangents[1], ad.Zero):
        return result, ad.Zero(jax.typeof(result).to_tangent_aval())
    if not collective.kind.is_linear:
        raise TypeError(f"{collective.kind} of replicas has no derivative; use a sum or a mean")
    return result, replace(collective, name=f"{collective.name}/gradient")(index, tangents[1])


def _transpose(cotangent: Leaf, index: Leaf, value: Leaf, *, collective: Collective) -> tuple[None, Leaf]:
    if isinstance(cotangent, ad.Zero):
        return None, ad.Zero(value.aval)
    return None, collective.kind.transpose(collective, index, cotangent)


def _batch(arguments: Sequence[Leaf], axes: Sequence[int | None], *, collective: Collective) -> tuple[Leaf, int | None]:
    index, value = arguments
    of_index, of_value = axes
    if of_index is not None:  # as JAX hands it to both branches of a batched condition; it is the same all along
        index = jax.lax.index_in_dim(index, 0, of_index, keepdims=False)
    if of_value is None:
        return collective(index, value), None
    kind, axis = collective.kind.batched()
    return replace(collective, kind=kind)(index, jnp.moveaxis(value, of_value, 0)), axis


def _lower(context: Any, index: Leaf, value: Leaf, *, collective: Collective) -> Leaf:
    """Return the call of Python that the compiled program makes.

    Unlike an `io_callback` it gets views of XLA's memory, and no JAX arrays: those take longer, and beyond 100 KiB a
    thread of XLA's pool (see `host_calls`).
    """

    def come(index: Leaf, value: Leaf) -> tuple[np.ndarray]:
        return (collective.carry_out(collective, int(index), np.asarray(value)),)

    results, _, _ = mlir.emit_python_callback(
        context,
        come,
        None,
        [index, value],
        context.avals_in,
        context.avals_out,
        has_side_effect=True,
        returns_token=False,
    )
    return results


_collective.def_effectful_abstract_eval(_shape)
ad.primitive_jvps[_collective] = _derive
ad.primitive_transposes[_collective] = _transpose
batching.primitive_batchers[_collective] = _batch
mlir.register_lowering(_collective, _lower)
