"""Checks of a `Trainer`'s functions and variables, and the choice of the variables that are trained."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from strategies.argument_checks import check_metric_names
from strategies.typing import Batch, Function, Leaf, Tree, Variables
from strategies.values import are_used_up

MODEL_STATE = "model_state"
_NUMBERS = (bool, int, float, complex, np.generic)
_TREES = (
    "give init a pytree of arrays, and combine it with the rest of the model inside of the loss function: with Flax "
    "give variables['params'] of model.init, or a part of nnx.split; with Equinox give a part of "
    "eqx.partition(model, eqx.is_inexact_array)"
)


_LOSS_ARGUMENTS = ("variables", "batch", "key")

Filter: TypeAlias = Callable[[str, Any], bool] | Tree
"""A function of a variable's name, such as `['dense']['kernel']`, and of the variable; or a pytree of bools that is a
prefix of the variables; or None for all variables."""


def check_loss_function(loss_fn: object) -> None:
    """Check that an object can be called as `loss_fn(variables, batch, key)`, with or without a model state.

    Raises:
        TypeError: It is not a function, or takes other arguments.
    """
    if not (callable(loss_fn) and _takes(loss_fn, (*_LOSS_ARGUMENTS, MODEL_STATE))):
        way_out = "; let it take these three, even if it does not use the key"
        check_function("the loss function", loss_fn, _LOSS_ARGUMENTS, way_out)


def check_takes_state(function: Function, has_state: bool, what: str = "the loss function") -> None:
    """Check that a function takes a model state as its last argument if, and only if, there is a model state.

    Args:
        function: Function of three or four arguments.
        has_state: Whether there is a model state.
        what: Name of the function in messages.

    Raises:
        TypeError: The function takes a model state but there is none, or the other way round.
    """
    arguments = (*_LOSS_ARGUMENTS, MODEL_STATE) if has_state else _LOSS_ARGUMENTS
    if _takes(function, arguments):
        return
    called_with = f"{what} takes {inspect.signature(function)}, but is called with ({', '.join(arguments)})"
    if has_state:
        raise TypeError(f"{called_with}: training has a model state; let the function take it, and return it too")
    raise TypeError(f"{called_with}: there is no model state; give one to init: trainer.init(variables, model_state)")


def check_function(what: str, function: object, arguments: Sequence[str], way_out: str = "") -> None:
    """Check that an object can be called with these arguments.

    Args:
        what: Name of the function in messages.
        function: Object that the user gave.
        arguments: Names of the arguments, in order.
        way_out: End of the message about other arguments.

    Raises:
        TypeError: It is not a function, or takes other arguments.
    """
    called_with = f"({', '.join(arguments)})"
    if not callable(function):
        raise TypeError(f"{what} is a {type(function).__name__}; use a function of {called_with}")
    if not _takes(function, arguments):
        raise TypeError(f"{what} takes {inspect.signature(function)}, but is called with {called_with}{way_out}")


def _takes(function: Function, arguments: Sequence[str]) -> bool:
    """Return whether a function can be called with this number of arguments."""
    try:
        inspect.signature(function).bind(*arguments)
    except ValueError:  # functions written in C may have no signature
        return True
    except TypeError:
        return False
    return True


def check_optimizer(optimizer: Any) -> None:
    """Check that an object is an optax gradient transformation.

    Raises:
        TypeError: It is not one.
    """
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        what = f"the function {optimizer.__name__}" if inspect.isfunction(optimizer) else repr(optimizer)
        raise TypeError(f"the optimizer is {what}; use a gradient transformation of optax, such as optax.adam(1e-3)")


def check_variables(variables: Variables, trainable: Filter = None) -> None:
    """Check the variables, and that the trained ones can be trained.

    Raises:
        TypeError: A leaf is not an array, or a trained leaf is not of a floating-point dtype.
        ValueError: There is no variable, or a step has used one up.
    """
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    if not leaves:
        raise ValueError(f"{variables!r} has no variable; {_TREES}")
    for path, leaf in leaves:
        if not _is_array(leaf):  # before the user's filter sees the leaf
            name = f"variable {keystr(path)}" if path else "the pytree of variables"
            raise TypeError(f"{name} is of type {type(leaf).__name__}, which is not an array; {_TREES}")
    flags = Trainable.of(variables, trainable).flags
    for (path, leaf), is_trained in zip(leaves, flags, strict=True):
        if is_trained and not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(
                f"variable {keystr(path)} is of dtype {jnp.result_type(leaf)}, but only floating-point variables can "
                f"be trained; keep others outside, or leave them untrained with Trainer(trainable=...): {_TREES}"
            )
    if are_used_up(variables):
        raise ValueError("a step has used up these variables; give init a copy, or the variables after the step")


@contextmanager
def naming_missing_keys(variables: Variables, batch: Batch) -> Iterator[None]:
    """Turn a KeyError in the loss function into a ValueError that lists the available keys.

    Raises:
        ValueError: Instead of a KeyError for a key that is neither among the variables nor in the batch.
    """
    try:
        yield
    except KeyError as error:
        trees = {"the batch has": batch, "the variables have": variables}
        there = {has: list(tree) for has, tree in trees.items() if isinstance(tree, Mapping)}
        wanted = error.args[0] if error.args else None
        if not there or any(wanted in names for names in there.values()):
            raise
        known = "; ".join(f"{has} {', '.join(map(repr, names)) or 'nothing'}" for has, names in there.items())
        raise ValueError(f"the loss function asks for {wanted!r}, which does not exist: {known}") from error


def metric_names(metrics: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of metrics.

    Args:
        metrics: Metrics that the loss function returns, as shapes.

    Raises:
        TypeError: A metric is not a scalar, or is called "loss".
    """
    for name, metric in metrics.items():
        if not isinstance(metric, jax.ShapeDtypeStruct):
            raise TypeError(
                f"metric {name!r} is a {type(metric).__name__}, but metrics are scalars; give each of its values a "
                "name of its own in the dictionary that the loss function returns"
            )
        if metric.shape != ():
            raise TypeError(
                f"metric {name!r} is of shape {list(metric.shape)}, but metrics are scalars, averaged over all "
                "replicas; take jnp.mean of it, and send whole arrays through a strategies.OutfeedQueue"
            )
        check_metric_names([name])
    return tuple(metrics)


def check_weight(weight: Tree) -> None:
    """Check the weight of an `Outcome`, as a shape.

    Raises:
        TypeError: It is not a real scalar, or of 16 bits.
    """
    if not isinstance(weight, jax.ShapeDtypeStruct):
        raise TypeError(f"the weight of the loss is a {type(weight).__name__}; it must be a scalar, or None")
    if weight.shape != () or jnp.issubdtype(weight.dtype, jnp.complexfloating):
        raise TypeError(
            f"the weight of the loss is {weight.dtype}{list(weight.shape)}; it must be a real scalar: take jnp.sum of "
            "the weights of rows or tokens"
        )
    if jnp.issubdtype(weight.dtype, jnp.floating) and weight.dtype.itemsize < 4:
        raise TypeError(
            f"the weight of the loss is {weight.dtype}, which rounds counts of tokens; make it with "
            "jnp.sum(..., dtype=jnp.float32), or from integers, which compute_dtype does not cast"
        )


def _is_array(leaf: Leaf) -> bool:
    if isinstance(leaf, _NUMBERS):
        return True
    if isinstance(leaf, str | type) or not hasattr(leaf, "shape"):
        return False
    try:
        jnp.result_type(leaf)
    except TypeError:
        return False
    return True


@dataclass(frozen=True)
class Trainable:
    """The choice of the variables that are trained.

    Attributes:
        flags: Whether each variable, in order, is trained.
    """

    flags: tuple[bool, ...]

    @classmethod
    def of(cls, variables: Variables, trainable: Filter) -> Trainable:
        """Apply a filter to variables, or to their shapes and dtypes.

        Raises:
            TypeError: The filter returns a value other than True or False.
            ValueError: The filter is a pytree of another structure, or no variable is trained.
        """
        named = jax.tree_util.tree_leaves_with_path(variables)
        if trainable is None:
            return cls((True,) * len(named))
        if callable(trainable):
            flags = [trainable(keystr(path), leaf) for path, leaf in named]
        else:
            try:
                below = jax.tree.map(lambda flag, tree: jax.tree.map(lambda _: flag, tree), trainable, variables)
            except ValueError as error:
                raise ValueError(
                    f"trainable is {trainable!r}, but the variables are a {jax.tree.structure(variables)}; give a "
                    "pytree of bools that is a prefix of it, or a function (name, variable) -> bool"
                ) from error
            flags = jax.tree.leaves(below)
        for (path, _), flag in zip(named, flags, strict=True):
            if not isinstance(flag, bool):
                raise TypeError(f"trainable gives {flag!r} for variable {keystr(path)}; it must give True or False")
        if named and not any(flags):
            raise ValueError("trainable leaves no variable to train; make it True for at least one variable")
        return cls(tuple(flags))

    @cached_property
    def is_all(self) -> bool:
        """Whether all variables are trained."""
        return all(self.flags)

    def pick(self, variables: Variables) -> Variables:
        """Return the trained variables: the same tree, with None in the place of each other variable."""
        return variables if self.is_all else self._chosen(variables, True)

    def frozen(self, variables: Variables) -> Variables:
        """Return the variables that are not trained: the same tree, with None in the place of each trained one."""
        return self._chosen(variables, False)

    def put(self, variables: Variables, picked: Variables) -> Variables:
        """Replace the trained variables, or None in their places, by `picked`."""
        if self.is_all:
            return picked
        return jax.tree.map(
            lambda new, old: old if new is None else new, picked, variables, is_leaf=lambda leaf: leaf is None
        )

    def _chosen(self, variables: Variables, is_trained: bool) -> Variables:
        leaves, structure = jax.tree.flatten(variables)
        pairs = zip(leaves, self.flags, strict=True)
        return jax.tree.unflatten(structure, [leaf if flag is is_trained else None for leaf, flag in pairs])
