"""Collectives over replicas as equations of a program: their values, derivatives and batches, and their order."""

from __future__ import annotations

import itertools
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
from strategies.argument_checks import at_least
from strategies.jax.programs.feed_program import CALL, effects_of_calls, lower_call
from strategies.jax.programs.jaxpr import Equation, bind, bodies, body_of_call, evaluate, every_equation, with_bodies
from strategies.jax.programs.xla_pitfalls import behind, is_true
from strategies.typing import Function, Leaf, Tree


@dataclass(frozen=True)
class ReplicaGroups:
    """The division of replicas into groups: blocks of neighbours, or groups orthogonal to such blocks.

    With 8 replicas in groups of 4, the consecutive groups are {0, 1, 2, 3} and {4, 5, 6, 7}. The orthogonal groups are
    {0, 2, 4, 6} and {1, 3, 5, 7}.

    Attributes:
        size: Number of replicas per group; 0 for one group of all.
        is_orthogonal: Whether the distance between members of a group is the number of groups.

    Raises:
        TypeError: `size` is not an integer.
        ValueError: `size` is negative.
    """

    size: int = 0
    is_orthogonal: bool = False

    def __post_init__(self) -> None:
        at_least(0, "replica_group_size", self.size)

    @classmethod
    def of(cls, groups: Sequence[Sequence[int]]) -> ReplicaGroups:
        """Return the division that these lists of replicas form.

        Raises:
            ValueError: They do not form equal groups, consecutive or orthogonal.
        """
        wanted = tuple(tuple(group) for group in groups)
        size = len(wanted[0]) if wanted else 0
        for found in (cls(size), cls(size, is_orthogonal=True)):
            if size and found._divide(size * len(wanted)) == wanted:
                return found
        raise ValueError(
            f"replica groups {[list(group) for group in groups]} are irregular or empty; use groups of equal size that "
            "are consecutive, or orthogonal to such groups"
        )

    def members(self, total_replicas: int) -> tuple[tuple[int, ...], ...]:
        """Return the replicas of each group, in order.

        Raises:
            ValueError: The replicas cannot be divided evenly.
        """
        if self.size and total_replicas % self.size:
            sizes = [size for size in range(1, total_replicas + 1) if total_replicas % size == 0]
            raise ValueError(
                f"The replica group size (got {self.size}) does not evenly divide the total number of replicas (got "
                f"{total_replicas}); use one of {', '.join(map(str, sizes))}"
            )
        return self._divide(total_replicas)

    def rank(self, replica: Leaf, total_replicas: int) -> Leaf:
        """Return the place of a replica in its group; the replica may be a traced integer."""
        members = self.members(total_replicas)
        return replica // len(members) if self.is_orthogonal else replica % len(members[0])

    def _divide(self, total: int) -> tuple[tuple[int, ...], ...]:
        size = self.size or total
        count = total // size
        if self.is_orthogonal:
            return tuple(tuple(range(group, total, count)) for group in range(count))
        return tuple(tuple(range(group * size, (group + 1) * size)) for group in range(count))


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


def _lower(context: Any, index: Leaf, value: Leaf, *, collective: Collective) -> Sequence[Leaf]:
    def come(index: Leaf, value: Leaf) -> tuple[np.ndarray]:
        return (collective.carry_out(collective, int(index), np.asarray(value)),)

    return lower_call(context, come, [index, value])


_collective.def_effectful_abstract_eval(_shape)
ad.primitive_jvps[_collective] = _derive
ad.primitive_transposes[_collective] = _transpose
batching.primitive_batchers[_collective] = _batch
mlir.register_lowering(_collective, _lower)


_CALLBACKS = frozenset({"io_callback", CALL, EQUATION})


def in_order(function: Function) -> Function:
    """Return the same function with its callbacks in the order of the code; it must not be differentiated any more."""

    def ordered(*arguments: Tree) -> Tree:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        results = _evaluate(closed, jax.tree.leaves(arguments), [])
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return ordered


def _evaluate(closed: core.ClosedJaxpr, arguments: Sequence[Leaf], last: list[Leaf]) -> list[Leaf]:
    """Evaluate a program whose callbacks wait for the values in `last`; put the results of its last callback there."""
    jaxpr = closed.jaxpr
    if not any(map(_is_callback, every_equation(jaxpr))):
        return jax.core.eval_jaxpr(jaxpr, closed.consts, *arguments)

    def results_of(equation: Equation, given: list[Leaf]) -> list[Leaf]:
        if not _calls_back(equation):
            return bind(jaxpr, equation, given)
        body = body_of_call(equation, is_derived=True)
        if body is None:
            last[:] = bind(jaxpr, with_bodies(equation, _ordered_body), _behind(last, given))
            return list(last)
        # XLA looks inside of calls: before all operands of a call are computed, parts of it may begin.
        if equation.params.get("prevent_cse"):  # a barrier, as in JAX's own lowering of jax.checkpoint
            given = jax.lax.optimization_barrier(given)
        return _evaluate(body, given, last)

    return evaluate(closed, arguments, results_of)


def _behind(last: Sequence[Leaf], given: Sequence[Leaf]) -> list[Leaf]:
    """Return the operands; the smallest of them becomes available only after `last`."""
    changed = list(given)
    if last and given:
        smallest = min(range(len(given)), key=lambda number: jax.numpy.size(given[number]))
        changed[smallest] = behind(is_true(last), jax.numpy.asarray(given[smallest]))
    return changed


def _ordered_body(body: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Return the body of a loop or branch, with its callbacks in order."""
    if not any(map(_is_callback, every_equation(body.jaxpr))):
        return body
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in body.in_avals]
    return jax.make_jaxpr(lambda *arguments: _evaluate(body, arguments, []))(*shapes)


def _calls_back(equation: Equation) -> bool:
    inside = itertools.chain.from_iterable(map(every_equation, bodies(equation)))
    return any(map(_is_callback, itertools.chain([equation], inside)))


def _is_callback(equation: Equation) -> bool:
    return bool(equation.primitive.name in _CALLBACKS)
