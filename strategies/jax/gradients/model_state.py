"""The agreement on the model state, the accumulation of micro-batches, and the tail beside gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr
from jax.typing import ArrayLike

from strategies.core.options import GradientAccumulationReductionMethod, weighted_means
from strategies.exchange.flat import op_of
from strategies.jax.programs.xla_pitfalls import with_rounded_products
from strategies.jax.replicas.devices import is_key
from strategies.typing import AccumulationDtype, Leaf, MapGradient, Tree, Variables

MEAN, FIRST, PER_REPLICA, SUM, ALIKE, CONSTANT = WORDS = ("mean", "first", "per_replica", "sum", "alike", "constant")
"""The rules for the new value of a leaf of the model state.

`mean`: the mean over all replicas, in order. `first`: the value of replica 0. `per_replica`: each replica's own value.
`sum`: each replica begins with zero, and the sum of their values, in the order of replicas, is added to the old value.
`alike`: the value that every replica has made, equal on all. `constant`: the old value.
"""
KEPT = (FIRST, ALIKE, PER_REPLICA)
"""The words of the leaves that a replica keeps, in the order of its kept values. `alike` leaves do not travel."""

_NEEDED = {MEAN: (jnp.floating, "floating-point leaves have a mean"), SUM: (jnp.number, "numbers have a sum")}
_WAY_OUT = f"use None, {', '.join(map(repr, WORDS))}, or a pytree of these that is a prefix of the model state"


def check_aggregation(aggregation: Tree) -> None:
    """Check a `model_state_aggregation` before there is a model state.

    Raises:
        ValueError: A word is not one of `WORDS`.
    """
    for reduction in jax.tree.leaves(aggregation):
        if not isinstance(reduction, str) or reduction not in WORDS:
            raise ValueError(f"model_state_aggregation has {reduction!r}; {_WAY_OUT}")


def has_own(aggregation: Tree) -> bool:
    """Return whether some leaves are `per_replica`."""
    return any(reduction == PER_REPLICA for reduction in jax.tree.leaves(aggregation))


@dataclass(frozen=True)
class ModelStateRule:
    """The rules by which replicas agree on the leaves of a model state.

    In a state, `per_replica` leaves have the local replicas along a first axis of their own.

    Attributes:
        structure: Structure of the model state.
        reductions: One of `WORDS` for each leaf.
        names: Names of the leaves for messages.
    """

    structure: jax.tree_util.PyTreeDef
    reductions: tuple[str, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, model_state: Tree, aggregation: Tree) -> ModelStateRule:
        """Return the rule of a model state, or of its shapes and dtypes.

        Args:
            model_state: Pytree; None has no leaves.
            aggregation: Word, or pytree of words, each for all leaves below it. None is the mean of floating-point
                leaves, and replica 0's value of others.

        Raises:
            ValueError: The words are of another structure, or a word does not fit its leaf.
        """
        leaves, structure = jax.tree.flatten(model_state)
        reductions, of_words = jax.tree.flatten(aggregation)
        return _rule_of(structure, tuple([leaf.dtype for leaf in leaves]), of_words, tuple(reductions))

    def pick(self, model_state: Tree, reduction: str) -> list[Tree]:
        """Return the leaves that are aggregated by `reduction`."""
        return [
            leaf for leaf, own in zip(jax.tree.leaves(model_state), self.reductions, strict=True) if own == reduction
        ]

    def put(self, model_state: Tree, leaves: Mapping[str, Sequence[Leaf]]) -> Tree:
        """Return the model state with new leaves, given by their reduction."""
        others = {reduction: iter(leaves_of_one) for reduction, leaves_of_one in leaves.items()}
        pairs = zip(jax.tree.leaves(model_state), self.reductions, strict=True)
        return jax.tree.unflatten(
            self.structure, [next(others[reduction]) if reduction in others else leaf for leaf, reduction in pairs]
        )

    def travelling(self, model_state: Tree) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes and dtypes of `sent`: of the leaves with "mean", then of those with "sum"."""
        sent: list[jax.ShapeDtypeStruct] = jax.eval_shape(lambda given: self.sent(given, 1), model_state)
        return sent

    def sent(self, model_state: Tree, replicas: int) -> list[Tree]:
        """Return the values that a replica sends for its averaged and added leaves; traceable.

        Integers are added. A sum of floating-point numbers travels as the mean of values multiplied by the number of
        replicas, at least in float32. That is exact for all numbers if the number of replicas is a power of two.

        Args:
            model_state: Model state that the replica has made.
            replicas: Number of all replicas.
        """
        sums = self.pick(model_state, SUM)
        sums = [leaf if op_of(leaf.dtype) == "sum" else widened(leaf) * replicas for leaf in sums]
        return [*self.pick(model_state, MEAN), *sums]

    def put_means(self, model_state: Tree, means: Sequence[Leaf], library: ModuleType) -> Mapping[str, Sequence[Leaf]]:
        """Return the new leaves with "mean" and "sum", given the results for all replicas.

        Args:
            model_state: Model state before the step.
            means: Means or sums of the values that replicas have sent. Leaves with "mean" are these arrays themselves.
            library: NumPy, or JAX for arrays on a device or while it traces.
        """
        averaged = self.reductions.count(MEAN)
        pairs = zip(self.pick(model_state, SUM), means[averaged:], strict=True)
        sums = [(library.asarray(old, mean.dtype) + mean).astype(old.dtype) for old, mean in pairs]
        return {MEAN: means[:averaged], SUM: sums}

    def begun(self, model_state: Tree) -> Tree:
        """Return the model state at the start of a step: with zeros for the leaves that are added."""
        if SUM not in self.reductions:
            return model_state
        zeros = [np.zeros(leaf.shape, leaf.dtype) for leaf in self.pick(model_state, SUM)]
        return self.put(model_state, {SUM: zeros})

    def map_own(self, function: Callable[[Leaf], Leaf], model_state: Tree) -> Tree:
        """Return the model state with `function` applied to each `per_replica` leaf."""
        if PER_REPLICA not in self.reductions:
            return model_state
        return self.put(model_state, {PER_REPLICA: [function(leaf) for leaf in self.pick(model_state, PER_REPLICA)]})

    def with_own(self, shared: Tree, own: Sequence[Tree]) -> Tree:
        """Return the model state, from its `per_replica` leaves and a tree with all other leaves."""
        leaves, parts = iter(jax.tree.leaves(shared)), iter(own)
        every = [next(parts) if reduction == PER_REPLICA else next(leaves) for reduction in self.reductions]
        return jax.tree.unflatten(self.structure, every)

    def check_returned(self, given: Tree, returned: Tree) -> None:
        """Check the model state that a loss function returns against the one it was given, both as shapes and dtypes.

        Raises:
            TypeError: The structure, or the shape or dtype of a leaf, is different.
        """
        if not self.names and returned is not None:
            raise TypeError(
                "the loss function returns a model state, but gets none; give it to init: "
                "trainer.init(variables, model_state=...), or leave it out of the Outcome"
            )
        if jax.tree.structure(returned) != self.structure:
            raise TypeError(
                f"the loss function returns a model state of {jax.tree.structure(returned)}, but gets "
                f"{self.structure}; return strategies.Outcome(loss, model_state=...) with one of the same structure"
            )
        pairs = zip(self.names, jax.tree.leaves(given), jax.tree.leaves(returned), strict=True)
        for name, old, new in pairs:
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                raise TypeError(
                    f"the loss function returns {new.dtype}{list(new.shape)} as leaf {name} of the model state, but "
                    f"gets {old.dtype}{list(old.shape)}; return the same shape and dtype: cast it with astype"
                )


@lru_cache(256)
def _rule_of(
    structure: jax.tree_util.PyTreeDef,
    dtypes: tuple[np.dtype, ...],
    of_words: jax.tree_util.PyTreeDef,
    given: tuple[str, ...],
) -> ModelStateRule:
    """Return the rule of a model state of this structure and these dtypes; every step asks for it."""
    model_state = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct((), dtype) for dtype in dtypes])
    aggregation = jax.tree.unflatten(of_words, given)
    try:
        below = jax.tree.map(
            lambda reduction, tree: jax.tree.map(lambda leaf: _reduction(reduction, leaf), tree),
            aggregation,
            model_state,
            is_leaf=lambda reduction: reduction is None,
        )
    except ValueError as error:
        raise ValueError(
            f"model_state_aggregation is {aggregation!r}, but the model state is a "
            f"{jax.tree.structure(model_state)}; {_WAY_OUT}"
        ) from error
    named = jax.tree_util.tree_leaves_with_path(model_state)
    names, reductions = tuple(keystr(path) for path, _ in named), tuple(jax.tree.leaves(below))
    for name, reduction, (_, leaf) in zip(names, reductions, named, strict=True):
        needed = _NEEDED.get(reduction)
        if needed is not None and not jnp.issubdtype(leaf.dtype, needed[0]):
            raise ValueError(
                f"model_state_aggregation has {reduction!r} for leaf {name}, which is {leaf.dtype}; only {needed[1]}: "
                "use 'first' or 'per_replica'"
            )
        if reduction == PER_REPLICA and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ValueError(
                f"model_state_aggregation has 'per_replica' for leaf {name}, which is a random key; use 'first', "
                "because the key that the loss function gets differs for each replica already, or keep "
                "jax.random.key_data of it"
            )
    return ModelStateRule(structure, reductions, names)


def check_model_state(model_state: Tree) -> None:
    """Check the first model state.

    Raises:
        TypeError: A leaf is not an array.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(model_state):
        if not is_key(leaf) and not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float):
            raise TypeError(
                f"leaf {keystr(path)} of the model state is of type {type(leaf).__name__}; give init a pytree of arrays"
            )


def as_arrays(model_state: Tree) -> Tree:
    """Return the model state with its Python numbers as arrays."""
    return jax.tree.map(lambda leaf: leaf if is_key(leaf) else jnp.asarray(leaf), model_state)


def _reduction(reduction: Any, leaf: Leaf) -> str:
    if reduction is not None:
        return str(reduction)
    return MEAN if jnp.issubdtype(leaf.dtype, jnp.floating) else FIRST


# ---- accumulation


def accumulator_dtypes(variables: Variables, dtype: AccumulationDtype) -> list[np.dtype]:
    """Return the dtype in which the gradient of each leaf is accumulated.

    Raises:
        ValueError: The dtype is not a floating-point dtype.
    """
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(variables):
        chosen = dtype(leaf) if asks_for_each(dtype) else dtype
        try:
            found.append(np.dtype(leaf.dtype if chosen is None else chosen))
        except TypeError as error:
            raise ValueError(
                f"gradient_accumulation_dtype is {chosen!r} for variable {jax.tree_util.keystr(path)}; use None, a "
                "dtype, or a function of the variable that returns one"
            ) from error
        if not is_float(found[-1]):
            raise ValueError(
                f"gradient_accumulation_dtype is {found[-1]} for variable {jax.tree_util.keystr(path)}; gradients need "
                "a floating-point dtype of JAX"
            )
    return found


def is_float(dtype: np.dtype) -> bool:
    """Return whether a dtype is floating-point and kept by JAX, which does not keep float64."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jax.dtypes.canonicalize_dtype(dtype) == dtype


def asks_for_each(dtype: Any) -> bool:
    """Return whether a dtype is a function of the variable; scalar types of NumPy and JAX, also callable, are not."""
    return callable(dtype) and not isinstance(dtype, type) and not hasattr(dtype, "dtype")


def mapped(
    function: MapGradient | None, gradients: Sequence[jax.Array], variables: Sequence[jax.Array], keeps_bad: bool
) -> list[jax.Array]:
    """Apply a user's function to the gradients of one micro-batch; traceable.

    Args:
        function: Function `(gradient, variable) -> gradient`, or None.
        gradients: Gradients of a replica.
        variables: Variables of these gradients.
        keeps_bad: Whether elements that are not finite stay so, for a later check.

    Raises:
        ValueError: The function returns another shape.
    """
    if function is None:
        return list(gradients)
    found = []
    for gradient, variable in zip(gradients, variables, strict=True):
        new = jnp.asarray(function(gradient, variable))
        if new.shape != gradient.shape:
            raise ValueError(
                f"map_gradient returns shape {list(new.shape)} for a gradient of {list(gradient.shape)}; it must "
                "return an array of the gradient's shape"
            )
        new = new.astype(gradient.dtype)
        found.append(jnp.where(jnp.isfinite(gradient), new, gradient) if keeps_bad else new)
    return found


def accumulated(
    method: GradientAccumulationReductionMethod,
    accumulator: jax.Array,
    gradient: jax.Array,
    number: jax.Array,
    count: int,
) -> jax.Array:
    """Add the gradient of one more micro-batch to an accumulator; traceable.

    Products are rounded, see `with_rounded_products`: otherwise the program of another exchange could have other bits.

    Args:
        method: Reduction method, see `GradientAccumulationReductionMethod`.
        accumulator: Accumulator, zeros for the first micro-batch.
        gradient: Gradient of the micro-batch.
        number: Number of the micro-batch, n.
        count: Number of micro-batches, N.
    """
    gradient = gradient.astype(accumulator.dtype)
    if method is GradientAccumulationReductionMethod.SUM:
        return accumulator + gradient
    wide = jnp.promote_types(accumulator.dtype, jnp.float32)
    before, gradient = accumulator.astype(wide), gradient.astype(wide)
    if method is GradientAccumulationReductionMethod.MEAN:
        # Behind a barrier, because XLA takes constant powers of two out of a sum, which then overflows.
        part: jax.Array = jax.lax.optimization_barrier(jnp.asarray(1 / count, wide))
        mean = with_rounded_products(lambda gradient, before: before + gradient * part)(gradient, before)
        return _narrowed(mean, accumulator.dtype)
    done, new = (number / (number + 1)).astype(wide), (number + 1).astype(wide)
    mean = with_rounded_products(lambda gradient, before: before * done + gradient / new)(gradient, before)
    return _narrowed(mean, accumulator.dtype)


def _narrowed(mean: jax.Array, dtype: np.dtype) -> jax.Array:
    """Round a mean to the accumulator's dtype. A mean of finite numbers stays finite, even if it is rounded up."""
    if mean.dtype == dtype:
        return mean
    largest = float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]
    return jnp.where(jnp.isfinite(mean), jnp.clip(mean, -largest, largest), mean).astype(dtype)


# ---- the tail

STEP, NOTICE, LOSS_SCALE, LOSS, WEIGHT = range(5)
"""Positions in the control words of a step."""
_LEAST_NORMAL = 0x00800000  # the bits of 2**-126
LEAST_WEIGHT, _TOO_SMALL = 2.0**-96, 2.0**-116
"""The least mean weight, and the number that travels for a subnormal one, so that means of it are refused.

XLA flushes numbers below 2**-126 to 0, so mean gradients with the least mean weight lose less than 2**-30.
"""


def control_words(step: int, notice: bool, loss_scale: float) -> np.ndarray:
    """Return the inputs of a step besides state and batch: int32 [4]; the last two are bits of float32 numbers.

    The mean loss is 0 until it is known; `TailLayout.with_means` puts it in, and the mean weight behind it.
    """
    return np.array([step, notice, np.float32(loss_scale).view(np.int32), 0], np.int32)


def loss_of(control: jax.Array) -> jax.Array:
    """Return the mean loss in the control words, a float32 scalar; traceable."""
    return jax.lax.bitcast_convert_type(control[LOSS], jnp.float32)


def weight_of(control: jax.Array) -> jax.Array | None:
    """Return the mean weight in the control words, a float32 scalar; None if losses have no weights; traceable."""
    return jax.lax.bitcast_convert_type(control[WEIGHT], jnp.float32) if control.shape[0] > WEIGHT else None


@dataclass(frozen=True)
class TailLayout:
    """The places of the values in a tail, float32: the loss, the metrics, the weight, the notice, and flags.

    Attributes:
        names: Names of the metrics; the first is "loss".
        is_weighted: Whether there is a weight; then the loss and the metrics are multiplied by it.
        has_finite: Whether a flag says that a gradient is not finite, for loss scaling.
        flags: Number of values at the end that say which gradients are not finite.
    """

    names: tuple[str, ...]
    is_weighted: bool
    has_finite: bool
    flags: int

    @property
    def num_values(self) -> int:
        """The number of values of a micro-batch: the loss, the metrics, and the weight if there is one."""
        return len(self.names) + self.is_weighted

    @property
    def weight(self) -> int:
        """The place of the weight, if there is one."""
        return len(self.names)

    @property
    def notice(self) -> int:
        """The place of the notice."""
        return self.num_values

    @property
    def finite(self) -> int:
        """The place of the flag for gradients that are not finite, with loss scaling."""
        return self.num_values + 1

    @property
    def size(self) -> int:
        """The number of values."""
        return self.finite + self.has_finite + self.flags

    def weighted(self, tail: Leaf) -> Leaf:
        """Return the mean tail with weighted means of the loss and the metrics.

        Args:
            tail: Mean tail of all replicas, on the host or traced.
        """
        if not self.is_weighted:
            return tail
        weight = tail[self.weight]
        if isinstance(tail, np.ndarray):
            return np.concatenate([weighted_means(tail[: self.weight], float(weight)), tail[self.weight :]])
        return tail.at[: self.weight].divide(weight)

    def with_means(self, control: Leaf, tail: Leaf) -> Leaf:
        """Return the control words with the mean loss of all replicas, and the mean weight if any, for the update.

        Args:
            control: Control words of `control_words`, on the host or traced.
            tail: Mean tail that `weighted` has returned, on the host or traced.
        """
        means = [tail[:1]]
        if self.is_weighted:
            means.append(tail[self.weight : self.weight + 1])
        if isinstance(control, np.ndarray):
            return np.concatenate([control[:LOSS], *(mean.view(np.int32) for mean in means)])
        return jnp.concatenate([control[:LOSS], *(jax.lax.bitcast_convert_type(mean, jnp.int32) for mean in means)])


def travelling(weight: ArrayLike | None) -> jax.Array:
    """Return a weight as it travels, see `strategies.core.options.travelling`; traceable."""
    number = jax.lax.stop_gradient(jnp.asarray(weight, jnp.float32))
    bits = jax.lax.bitcast_convert_type(number, jnp.int32)  # XLA takes a subnormal number for 0 in comparisons
    size = bits & 0x7FFFFFFF
    number = jnp.where((size > 0) & (size < _LEAST_NORMAL), _TOO_SMALL, number)
    return jnp.where(((bits >= 0) | (size == 0)) & jnp.isfinite(number), number, jnp.nan)


def times_weight(values: jax.Array, weight: jax.Array) -> jax.Array:
    """Return values times a weight; zeros if the weight is 0, even of values that are not finite; traceable.

    Args:
        values: Values of any floating-point dtype; the result is float32 if it is narrower.
        weight: Weight of `travelling`.
    """
    return jnp.where(weight > 0, widened(values) * weight, 0)


def weighted_terms(values: jax.Array, weight: jax.Array) -> jax.Array:
    """Return values times a weight, to be added: rounded as `with_rounded_products` does; traceable.

    The arguments are those of `times_weight`. Its result is differentiated, and this one is not.
    """
    terms: jax.Array = with_rounded_products(times_weight)(jax.lax.stop_gradient(values), weight)
    return terms


def widened(values: jax.Array) -> jax.Array:
    """Return floating-point values as float32 if they are narrower; traceable."""
    return values.astype(jnp.promote_types(values.dtype, jnp.float32))
