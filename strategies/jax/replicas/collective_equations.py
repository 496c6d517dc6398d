"""Collectives between replicas as equations of JAX, with derivatives of any order.

Each collective is a linear map of the values of all replicas. So it acts on tangents as on values, and its transpose is
another such map. While a program is traced, differentiated and batched, a collective is one equation. Only the compiled
program calls Python, where the replicas meet.
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
"""The name of the primitive of these equations."""


class CollectiveKind(ABC):
    """A kind of collective, as a function of the values of a group of replicas. It is immutable.

    Attributes:
        reduces: Whether it does arithmetic.
        is_linear: Whether it has a derivative.
    """

    reduces = False
    is_linear = True

    @abstractmethod
    def shape(self, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
        """Return the shape of each replica's result, for values of this shape in a group of `size` replicas."""

    @abstractmethod
    def combine(self, values: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Return the result of each replica of a group, in the group's order. The values are not changed."""

    @abstractmethod
    def transpose(self, collective: Collective, index: jax.Array, cotangent: jax.Array) -> jax.Array:
        """Return the cotangent of this replica's value, given the cotangent of its result; traceable."""

    @abstractmethod
    def batched(self) -> tuple[CollectiveKind, int]:
        """Return the kind for values with one more axis in front, and the place of that axis in the results."""


@dataclass(frozen=True)
class Reduce(CollectiveKind):
    """The reduction of all values, on every replica; `op` is one of `collectives.reduction.OPERATIONS`."""

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

    @override
    def transpose(self, collective: Collective, index: jax.Array, cotangent: jax.Array) -> jax.Array:
        """Return the same reduction of the cotangents."""
        return collective(index, cotangent)

    @override
    def batched(self) -> tuple[CollectiveKind, int]:
        return self, 0


@dataclass(frozen=True)
class Gather(CollectiveKind):
    """The values of all replicas, along a new first axis, on every replica."""

    @override
    def shape(self, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
        return (size, *shape)

    @override
    def combine(self, values: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        return [np.stack(values)] * len(values)

    @override
    def transpose(self, collective: Collective, index: jax.Array, cotangent: jax.Array) -> jax.Array:
        """Return the sum, over all replicas, of the cotangents for this replica's value."""
        total = replace(collective, kind=Reduce("sum"))(index, cotangent)
        rank = collective.groups.rank(index, collective.total)
        own: jax.Array = jax.lax.dynamic_index_in_dim(total, rank, keepdims=False)
        return own

    @override
    def batched(self) -> tuple[CollectiveKind, int]:
        return self, 1


@dataclass(frozen=True)
class BlockExchange(CollectiveKind):
    """The all-to-all: each replica gets its block along `split` of every replica, joined along `concat`."""

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

    @override
    def transpose(self, collective: Collective, index: jax.Array, cotangent: jax.Array) -> jax.Array:
        """Send the blocks of the cotangents back to their replicas."""
        return replace(collective, kind=BlockExchange(self.concat, self.split))(index, cotangent)

    @override
    def batched(self) -> tuple[CollectiveKind, int]:
        return BlockExchange(self.split + 1, self.concat + 1), 0


CarryOut = Callable[["Collective", int, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Collective:
    """One collective of a program, the same on all replicas.

    Attributes:
        name: Name by which instances match it. Replicas reach the collectives of one name in the same order.
        kind: Kind of the collective.
        groups: Groups of replicas, each with a collective of its own.
        total: Number of replicas of all groups.
        carry_out: Function of this collective, a replica's global index and its value, called at run time. It may keep
            the value until it returns the replica's result.
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
        """Return the replica's result of the collective. Called while the replica's program is traced.

        Args:
            index: Global index of the replica, an int32 scalar.
            value: Value of this replica, of the same shape and dtype on all of them.
        """
        result: jax.Array = _collective.bind(index, value, collective=self)
        return result

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the result for values of this shape."""
        return self.kind.shape(shape, len(self.members[0]))


OfReplica = Callable[[jax.Array, jax.Array], jax.Array]
"""A function (a replica's global index, its value) -> its result."""


def without_gradient(function: OfReplica, refusal: str) -> OfReplica:
    """Return the same function, which may be part of a differentiated function but has no gradient.

    Args:
        function: Function that has no derivative.
        refusal: Message of the TypeError if its gradient is needed.
    """

    @jax.custom_vjp
    def refusing(index: jax.Array, value: jax.Array) -> jax.Array:
        return function(index, value)

    def backward(_: None, gradient: jax.Array) -> NoReturn:
        raise TypeError(refusal)

    # `refusing` calls itself, so that a derivative of the derivative also refuses.
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
    if of_index is not None:  # JAX batches the index for both branches of a condition; it is equal along the axis
        index = jax.lax.index_in_dim(index, 0, of_index, keepdims=False)
    if of_value is None:
        return collective(index, value), None
    kind, axis = collective.kind.batched()
    return replace(collective, kind=kind)(index, jnp.moveaxis(value, of_value, 0)), axis


def _lower(context: Any, index: Leaf, value: Leaf, *, collective: Collective) -> Leaf:
    """Return the call of Python in the compiled program.

    Unlike an `io_callback`, it gets views of XLA's memory instead of JAX arrays. JAX arrays take longer, and beyond 100
    KiB a thread of XLA's pool (see `host_calls`).
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
