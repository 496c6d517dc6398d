"""The optimizers that make new variables of mean gradients: optax's gradient transformations, or others."""

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
import optax
from typing_extensions import override

from strategies.jax.programs.xla_pitfalls import with_rounded_products
from strategies.typing import Function, Gradients, Leaf, MapGradient, OptimizerState, Variables


@dataclass(frozen=True)
class Arithmetic:
    """The functions that decide how the numbers of an update are rounded.

    Attributes:
        add: `(variables, changes) -> variables`.
        rounded: makes a function whose products are rounded by themselves; see `with_rounded_products`.
    """

    add: Callable[[Variables, Gradients], Variables] = optax.apply_updates
    rounded: Callable[[Function], Function] = with_rounded_products


AS_WRITTEN = Arithmetic(rounded=lambda function: function)
"""The arithmetic for traces that are only looked at."""


@dataclass(frozen=True)
class Known:
    """The results of a step besides its mean gradients; the same bits on every instance.

    Attributes:
        gradient_norm: the norm of all mean gradients together, float32.
        loss: the mean loss of all replicas and micro-batches, float32.
    """

    gradient_norm: jax.Array
    loss: jax.Array


class StepOptimizer(ABC):
    """Makes new variables of mean gradients; traceable, and without a state of its own.

    Attributes:
        needs_whole: whether it has to get whole arrays, also where the state is sharded.
    """

    needs_whole: bool = False

    @abstractmethod
    def init(self, variables: Variables) -> OptimizerState:
        """Return the optimizer state before the first step, a pytree of arrays."""

    def check(self, gradients: Gradients, variables: Variables) -> None:  # noqa: B027  # most optimizers ask for nothing more
        """Refuse variables that it cannot update, or a step that has not what it asks for.

        Args:
            gradients: shapes and dtypes of the mean gradients.
            variables: likewise.

        Raises:
            ValueError: saying what it asks for.
        """

    @abstractmethod
    def apply(
        self,
        gradients: Gradients,
        optimizer_state: OptimizerState,
        variables: Variables,
        known: Known,
        arithmetic: Arithmetic,
    ) -> tuple[Variables, OptimizerState]:
        """Return new variables and optimizer state.

        Args:
            gradients: like the variables, and so are the parts of them where the state is sharded.
            optimizer_state: what `init` or `apply` returned last.
            variables: see above.
            known: what else is known of the step.
            arithmetic: how it computes.
        """


@final
class OptaxOptimizer(StepOptimizer):
    """A gradient transformation of optax.

    One that takes extra arguments gets `value`, the mean loss, `grad`, the mean gradients, and `gradient_norm`. One
    for `optax.LookaheadParams` gets the gradients of the fast ones.
    """

    def __init__(self, transformation: optax.GradientTransformation, needs_whole: bool = False) -> None:
        self._transformation = transformation
        self.needs_whole = needs_whole
        self._names: Sequence[str] | None = None  # of the extra arguments that it gets

    @override
    def init(self, variables: Variables) -> OptimizerState:
        return self._transformation.init(variables)

    @override
    def check(self, gradients: Gradients, variables: Variables) -> None:
        state = jax.eval_shape(self._transformation.init, variables)
        number: Any = jax.ShapeDtypeStruct((), jnp.float32)
        self._extra(_of_fast(gradients), state, variables, Known(number, number))

    @override
    def apply(
        self,
        gradients: Gradients,
        optimizer_state: OptimizerState,
        variables: Variables,
        known: Known,
        arithmetic: Arithmetic,
    ) -> tuple[Variables, OptimizerState]:
        gradients = _of_fast(gradients)
        extra = self._extra(gradients, optimizer_state, variables, known)
        update = arithmetic.rounded(self._transformation.update)
        changes, optimizer_state = update(gradients, optimizer_state, variables, **extra)
        return arithmetic.add(variables, changes), optimizer_state

    def _extra(
        self, gradients: Gradients, optimizer_state: OptimizerState, variables: Variables, known: Known
    ) -> dict[str, Leaf]:
        """Return the extra arguments of an update. The first call traces the update, to see which it asks for."""
        given = {"value": known.loss, "grad": gradients, "gradient_norm": known.gradient_norm}
        if self._names is None:
            self._names = self._accepted((gradients, optimizer_state, variables), given)
        return {name: given[name] for name in self._names}

    def _accepted(
        self, arguments: tuple[Gradients, OptimizerState, Variables], given: Mapping[str, Leaf]
    ) -> Sequence[str]:
        """Return the names of the extra arguments that the update takes.

        Optimizers in a chain may take none, and then refuse those that the chain passes on.
        """
        failed: Exception | None = None
        for names in dict.fromkeys([_taken(self._transformation.update, (*given, *_NOT_KNOWN)), ()]):
            refused = {name: _refuse(name) for name in names if name in _NOT_KNOWN}
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
            f"beyond gradients, state and variables an update is given {', '.join(given)}: use an optimizer that asks "
            "for no more, and whose state is of such variables"
        ) from failed


_NOT_KNOWN = ("value_fn", "grad_fn", "obj_fn")
"""Arguments of optax that would compute the loss of all replicas once more, within the update."""


def _refuse(name: str) -> Function:
    # Line searches refuse extra arguments that `value_fn` has no name for, before they call it.
    def refuse(*_: object, gradient_norm: object = None, grad_fn: object = None, obj_fn: object = None) -> NoReturn:
        raise TypeError(f"it calls {name}, and a step cannot compute the loss of all replicas again within the update")

    return refuse


def _taken(function: Function, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names among these that a function takes as keywords."""
    parameters = inspect.signature(function).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    return tuple(name for name in names if takes_any or name in parameters)


def _optax_function(error: BaseException | None) -> str:
    """Return the name of the function of optax in which an error was raised."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__ if error else None)]
    inside = [frame.f_code.co_qualname for frame in frames if frame.f_globals.get("__name__", "").startswith("optax.")]
    return inside[-1].split(".")[0] if inside else "its update"


def _require_shapes(changes: Gradients, variables: Variables) -> None:
    """Refuse changes of other shapes than the variables, which adding would broadcast."""
    pairs = zip(jax.tree.leaves(changes, is_leaf=_is_none), jax.tree.leaves(variables, is_leaf=_is_none), strict=False)
    for change, variable in pairs:
        if change is not None and variable is not None and change.shape != variable.shape:
            raise ValueError(
                f"the optimizer makes a change of shape {list(change.shape)} for a variable of {list(variable.shape)}; "
                "use one that works on mean gradients: those of differential privacy want the gradient of each row"
            )


def _is_none(leaf: Leaf) -> bool:
    return leaf is None


def _of_fast(gradients: Gradients) -> Gradients:
    return gradients.fast if isinstance(gradients, optax.LookaheadParams) else gradients


@dataclass(frozen=True)
class MapGradientOptimizer:
    """An optimizer whose gradients go through a function first: those of each micro-batch, on each replica.

    Semantics: the original's class of that name. `Trainer` and pipelines take it in the place of an optimizer; it is
    the same as their option `map_gradient`.

    Attributes:
        wrapped_optimizer: an optax gradient transformation, or another one of these, whose function comes first.
        gradient_mapping_function: `(gradient, variable) -> gradient` of one variable, traceable.
        name: accepted for programs of the original.
    """

    wrapped_optimizer: AnyOptimizer
    gradient_mapping_function: MapGradient
    name: str = "MapGradientOptimizer"


def unwrapped(optimizer: AnyOptimizer, outer: MapGradient | None = None) -> tuple[AnyOptimizer, MapGradient | None]:
    """Return the optimizer inside, and the function through which gradients go first.

    Args:
        optimizer: of any kind.
        outer: a function that comes last.
    """
    if not isinstance(optimizer, MapGradientOptimizer):
        return optimizer, outer
    own = optimizer.gradient_mapping_function
    if not callable(own):
        raise TypeError(f"the gradient_mapping_function is {own!r}; use a function (gradient, variable) -> gradient")
    both = own if outer is None else _in_turn(own, outer)
    return unwrapped(optimizer.wrapped_optimizer, both)


def _in_turn(first: MapGradient, second: MapGradient) -> MapGradient:
    return lambda gradient, variable: second(first(gradient, variable), variable)


AnyOptimizer: TypeAlias = StepOptimizer | optax.GradientTransformation | MapGradientOptimizer
