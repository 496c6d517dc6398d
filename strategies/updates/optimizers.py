"""What makes new variables of mean gradients: a gradient transformation of optax, or an optimizer of its own kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import jax
import optax

from strategies.programs.products import with_rounded_products


@dataclass(frozen=True)
class Arithmetic:
    """How the numbers of an update are rounded.

    Attributes:
        add: `(variables, changes) -> variables`.
        rounded: makes a function whose products are rounded by themselves; see `with_rounded_products`.
    """

    add: Callable[[Any, Any], Any] = optax.apply_updates
    rounded: Callable[[Callable[..., Any]], Callable[..., Any]] = with_rounded_products


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


AS_WRITTEN = Arithmetic(rounded=_as_it_is)
"""For looking at what is computed."""


class Optimizer(ABC):
    """Makes new variables of mean gradients; traceable, and without a state of its own."""

    @property
    def needs_whole(self) -> bool:
        """Whether it has to get whole arrays, also where the state is sharded."""
        return False

    @abstractmethod
    def init(self, variables: Any) -> Any:
        """The optimizer state before the first step, a pytree of arrays."""

    @abstractmethod
    def apply(
        self, gradients: Any, optimizer_state: Any, variables: Any, gradient_norm: jax.Array, arithmetic: Arithmetic
    ) -> tuple[Any, Any]:
        """New variables and optimizer state.

        Args:
            gradients: like the variables, and so are the parts of them where the state is sharded.
            optimizer_state: what `init` or `apply` returned last.
            variables: see above.
            gradient_norm: the norm of all mean gradients together, float32.
            arithmetic: how it computes.
        """


@final
class OptaxOptimizer(Optimizer):
    """A gradient transformation of optax. One that takes extra arguments gets `gradient_norm`."""

    def __init__(self, transformation: optax.GradientTransformation, needs_whole: bool = False) -> None:
        self._transformation = optax.with_extra_args_support(transformation)
        self._needs_whole = needs_whole

    @property
    def needs_whole(self) -> bool:
        """See `Optimizer`."""
        return self._needs_whole

    def init(self, variables: Any) -> Any:
        """See `Optimizer`."""
        return self._transformation.init(variables)

    def apply(
        self, gradients: Any, optimizer_state: Any, variables: Any, gradient_norm: jax.Array, arithmetic: Arithmetic
    ) -> tuple[Any, Any]:
        """See `Optimizer`."""
        update = arithmetic.rounded(self._transformation.update)
        changes, optimizer_state = update(gradients, optimizer_state, variables, gradient_norm=gradient_norm)
        return arithmetic.add(variables, changes), optimizer_state


AnyOptimizer: TypeAlias = Optimizer | optax.GradientTransformation


def as_optimizer(optimizer: AnyOptimizer) -> Optimizer:
    """An optimizer of either kind."""
    return optimizer if isinstance(optimizer, Optimizer) else OptaxOptimizer(optimizer)
