"""The optimizers that update variables by mean gradients: optax's gradient transformations, and others."""

from __future__ import annotations

import inspect
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from typing_extensions import override

from popdist.records.distribution_settings import LEARNING_RATE
from strategies.jax.programs.compilation import jit
from strategies.jax.programs.xla_pitfalls import with_rounded_products
from strategies.typing import Function, Gradients, Leaf, MapGradient, OptimizerState, Variables


@dataclass(frozen=True)
class Arithmetic:
    """The functions that decide the rounding of an update.

    Attributes:
        add: Function `(variables, changes) -> variables`.
        rounded: Function decorator that keeps products from being contracted with sums; see `with_rounded_products`.
    """

    add: Callable[[Variables, Gradients], Variables] = optax.apply_updates
    rounded: Callable[[Function], Function] = with_rounded_products


AS_WRITTEN = Arithmetic(rounded=lambda function: function)
"""The arithmetic for traces that are inspected but not run."""


@dataclass(frozen=True)
class StepFacts:
    """The gradient norm and the loss of a step, with the same bits on every instance.

    Attributes:
        gradient_norm: Norm of all mean gradients together, float32.
        loss: Mean loss of all replicas and micro-batches, float32.
    """

    gradient_norm: jax.Array
    loss: jax.Array


@dataclass(frozen=True)
class Rate:
    """A learning rate that a leaf of the optimizer state tells after an update.

    Attributes:
        name: Name of the metric.
        leaf: Number of the leaf.
        schedule: Function of the number of updates before, traceable, if the leaf is the number of updates so far;
            None if the leaf is the rate itself.
    """

    name: str
    leaf: int
    schedule: Callable[[Leaf], Leaf] | None = None


class StepOptimizer(ABC):
    """An optimizer as the step uses it: traceable, and without a state of its own.

    `VariableUpdate.init` calls `check`, on shapes, and then `init`. Each step calls `apply` once.

    Attributes:
        needs_whole: Whether `apply` must get whole arrays, even if the state is sharded.
    """

    needs_whole: bool = False

    @abstractmethod
    def init(self, variables: Variables) -> OptimizerState:
        """Return the optimizer state before the first step, a pytree of arrays."""

    def check(self, gradients: Gradients, variables: Variables) -> None:  # noqa: B027  # most optimizers check nothing
        """Raise if the optimizer cannot update these variables, or if a step lacks values that it needs.

        Args:
            gradients: Shapes and dtypes of the mean gradients.
            variables: Shapes and dtypes of the variables.

        Raises:
            ValueError: The optimizer cannot be used; the message names its needs.
        """

    @property
    def rates(self) -> Sequence[Rate]:
        """The learning rates that the state tells."""
        return ()

    @abstractmethod
    def apply(
        self,
        gradients: Gradients,
        optimizer_state: OptimizerState,
        variables: Variables,
        known: StepFacts,
        arithmetic: Arithmetic,
    ) -> tuple[Variables, OptimizerState]:
        """Return new variables and optimizer state.

        Args:
            gradients: Mean gradients like the variables; parts of them if the state is sharded.
            optimizer_state: Last result of `init` or `apply`.
            variables: Variables; parts of them if the state is sharded.
            known: Other results of the step.
            arithmetic: Functions for the computation.
        """


@final
class OptaxOptimizer(StepOptimizer):
    """A gradient transformation of optax.

    A transformation with extra arguments gets `value`, the mean loss, `grad`, the mean gradients, and `gradient_norm`.
    A transformation for `optax.LookaheadParams` gets the gradients of the fast parameters.
    """

    def __init__(self, transformation: optax.GradientTransformation, needs_whole: bool = False) -> None:
        self._transformation = transformation
        self.needs_whole = needs_whole
        self._names: Sequence[str] | None = None  # of its extra arguments

    @override
    def init(self, variables: Variables) -> OptimizerState:
        return self._transformation.init(variables)

    @override
    def check(self, gradients: Gradients, variables: Variables) -> None:
        state = jax.eval_shape(self._transformation.init, variables)
        number: Any = jax.ShapeDtypeStruct((), jnp.float32)
        self._extra(_of_fast(gradients), state, variables, StepFacts(number, number))

    @override
    def apply(
        self,
        gradients: Gradients,
        optimizer_state: OptimizerState,
        variables: Variables,
        known: StepFacts,
        arithmetic: Arithmetic,
    ) -> tuple[Variables, OptimizerState]:
        gradients = _of_fast(gradients)
        extra = self._extra(gradients, optimizer_state, variables, known)
        update = arithmetic.rounded(self._transformation.update)
        changes, optimizer_state = update(gradients, optimizer_state, variables, **extra)
        return arithmetic.add(variables, changes), optimizer_state

    def _extra(
        self, gradients: Gradients, optimizer_state: OptimizerState, variables: Variables, known: StepFacts
    ) -> dict[str, Leaf]:
        """Return the extra arguments of an update. The first call traces the update, to find out their names."""
        given = {"value": known.loss, "grad": gradients, "gradient_norm": known.gradient_norm}
        if self._names is None:
            self._names = self._accepted((gradients, optimizer_state, variables), given)
        return {name: given[name] for name in self._names}

    def _accepted(
        self, arguments: tuple[Gradients, OptimizerState, Variables], given: Mapping[str, Leaf]
    ) -> Sequence[str]:
        """Return the names of the extra arguments that the update takes.

        Optimizers in a chain may take none, and then refuse extra arguments that the chain passes on.
        """
        failed: Exception | None = None
        for names in dict.fromkeys([_taken(self._transformation.update, (*given, *_NOT_KNOWN)), ()]):
            refused = {name: _unsupported(name) for name in names if name in _NOT_KNOWN}
            extra = {name: given[name] for name in names if name in given}
            try:
                changes, _ = jax.eval_shape(partial(self._transformation.update, **refused), *arguments, **extra)
            except (TypeError, ValueError) as error:
                failed = failed or error
                continue
            _require_shapes(changes, arguments[-1])
            return tuple(extra)
        raise ValueError(
            f"the optimizer cannot be used: {_optax_function(failed)} failed with {type(failed).__name__}: {failed}; "
            f"beyond gradients, state and variables an update gets only {', '.join(given)}: use an optimizer that "
            "needs no more, and whose state belongs to these variables"
        ) from failed


_NOT_KNOWN = ("value_fn", "grad_fn", "obj_fn")
"""The arguments of optax that would compute the loss of all replicas once more, within the update."""


def _unsupported(name: str) -> Function:
    # Line searches raise at extra arguments that `value_fn` has no name for, even before they call it.
    def raise_unsupported(
        *_: object, gradient_norm: object = None, grad_fn: object = None, obj_fn: object = None
    ) -> NoReturn:
        raise TypeError(f"it calls {name}, but a step cannot compute the loss of all replicas again within the update")

    return raise_unsupported


def _taken(function: Function, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names that a function takes as keywords, out of `names`."""
    parameters = inspect.signature(function).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    return tuple(name for name in names if takes_any or name in parameters)


def _optax_function(error: BaseException | None) -> str:
    """Return the name of the optax function that raised an error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__ if error else None)]
    inside = [frame.f_code.co_qualname for frame in frames if frame.f_globals.get("__name__", "").startswith("optax.")]
    return inside[-1].split(".")[0] if inside else "its update"


def _require_shapes(changes: Gradients, variables: Variables) -> None:
    """Raise if changes have other shapes than the variables, because adding would broadcast them."""
    leaves = (jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None) for tree in (changes, variables))
    for change, variable in zip(*leaves, strict=False):
        if change is not None and variable is not None and change.shape != variable.shape:
            raise ValueError(
                f"the optimizer makes a change of shape {list(change.shape)} for a variable of {list(variable.shape)}; "
                "use one that works on mean gradients: one with differential privacy needs the gradient of each row"
            )


def _of_fast(gradients: Gradients) -> Gradients:
    return gradients.fast if isinstance(gradients, optax.LookaheadParams) else gradients


@dataclass(frozen=True)
class MapGradientOptimizer:
    """An optimizer with a function that the gradients of each micro-batch, on each replica, pass through first.

    Semantics: the original's class of that name. `Trainer` and pipelines take it as an optimizer; it has the effect of
    their option `map_gradient`.

    Attributes:
        wrapped_optimizer: An optax gradient transformation, or another `MapGradientOptimizer`, whose function comes
            first.
        gradient_mapping_function: Function `(gradient, variable) -> gradient` of one variable, traceable.
        name: Accepted because the original has it.
    """

    wrapped_optimizer: AnyOptimizer
    gradient_mapping_function: MapGradient
    name: str = "MapGradientOptimizer"


def unwrapped(optimizer: AnyOptimizer, outer: MapGradient | None = None) -> tuple[AnyOptimizer, MapGradient | None]:
    """Return the inner optimizer, and the function that gradients pass through first.

    Args:
        optimizer: Optimizer of any kind.
        outer: Function that comes last, or None.
    """
    if not isinstance(optimizer, MapGradientOptimizer):
        return optimizer, outer
    own = optimizer.gradient_mapping_function
    if not callable(own):
        raise TypeError(f"the gradient_mapping_function is {own!r}; use a function (gradient, variable) -> gradient")

    def both(gradient: jax.Array, variable: jax.Array) -> jax.Array:
        mapped: jax.Array = own(gradient, variable)
        return mapped if outer is None else outer(mapped, variable)

    return unwrapped(optimizer.wrapped_optimizer, both)


AnyOptimizer: TypeAlias = StepOptimizer | optax.GradientTransformation | MapGradientOptimizer


# ---- the learning rates that an optimizer has used, as far as its state tells them

Path: TypeAlias = tuple[object, ...]
_INJECTED = tuple(
    kind
    for name in ("InjectStatefulHyperparamsState", "InjectHyperparamsState")
    if (kind := getattr(optax, name, None))
)


@final
class LearningRates:
    """The learning rates of an optimizer, read from its state after an update.

    Known are the rates of `optax.inject_hyperparams`, and those that a `StepOptimizer` tells. Other rates of optax are
    in no state.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: AnyOptimizer) -> None:
        self._optimizer = optimizer
        self._structure: jax.tree_util.PyTreeDef | None = None
        self._rates: Sequence[Rate] = ()
        self._program: Callable[[Sequence[Leaf], int], Sequence[jax.Array]] | None = None

    def of(self, state: OptimizerState, steps: int) -> Callable[[int], Mapping[str, float]] | None:
        """Return a function that reads the rates of the last `steps` updates; see `Engine.learning_rates`."""
        leaves, structure = jax.tree.flatten(state)
        if self._structure is None or structure != self._structure:
            self._structure = structure
            of_step = self._optimizer.rates if isinstance(self._optimizer, StepOptimizer) else None
            self._rates = rates_of(state) if of_step is None else of_step
            self._program = jit(partial(_computed, tuple(self._rates)), static_argnums=1)
        if not self._rates or self._program is None:
            return None
        # Copies, because the next update uses the state up.
        values = self._program([_in_reach(leaves[rate.leaf]) for rate in self._rates], steps)
        return partial(_read, [rate.name for rate in self._rates], values)


def rates_of(state: OptimizerState) -> Sequence[Rate]:
    """Return the scalar learning rates that `optax.inject_hyperparams` keeps in a state."""
    nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda node: isinstance(node, _INJECTED))
    inside = (jax.tree_util.GetAttrKey("hyperparams"), jax.tree_util.DictKey(LEARNING_RATE))
    of_path = {(*path, *inside): path for path, node in nodes if isinstance(node, _INJECTED)}
    leaves = jax.tree_util.tree_leaves_with_path(state)
    known = [
        (of_path[path], number)
        for number, (path, leaf) in enumerate(leaves)
        if path in of_path and np.shape(leaf) == ()  # an array may scale the elements of a variable
    ]
    names = _names([path for path, _ in known])
    return [Rate(name, number) for name, (_, number) in zip(names, known, strict=True)]


def _names(paths: Sequence[Path]) -> list[str]:
    """Return "learning_rate", or for several rates one name each, with the label of `optax.partition` if it has one."""
    if len(paths) == 1:
        return [LEARNING_RATE]
    labels = ["/".join(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)) for path in paths]
    are_different = len({*labels, ""}) == len(paths) + 1
    return [f"{LEARNING_RATE}/{label if are_different else number}" for number, label in enumerate(labels)]


def _in_reach(leaf: Leaf) -> Leaf:
    """Return an array that a program can read; the memory of an offloaded state is no device's."""
    kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
    return np.asarray(leaf) if kind == "pinned_host" else leaf


def _computed(rates: Sequence[Rate], picked: Sequence[Leaf], steps: int) -> list[jax.Array]:
    """Return for each rate its values in the last updates, or only that in the last one; traceable."""
    values = []
    for rate, leaf in zip(rates, picked, strict=True):
        if rate.schedule is None:
            values.append(jnp.reshape(leaf, (1,)).astype(jnp.float32))
            continue
        counts = jnp.maximum(leaf - jnp.arange(steps, 0, -1, dtype=leaf.dtype), 0)  # those of before each update
        values.append(jax.lax.map(partial(_scheduled, rate.schedule), counts))
    return values


def _scheduled(schedule: Callable[[Leaf], Leaf], count: jax.Array) -> jax.Array:
    return jnp.asarray(schedule(count), jnp.float32)


def _read(names: Sequence[str], values: Sequence[jax.Array], later: int) -> Mapping[str, float]:
    found = {name: np.asarray(value) for name, value in zip(names, values, strict=True)}
    return {name: float(value[-1 - later]) for name, value in found.items() if later < len(value)}
