"""What programs give to a `Trainer`, looked at before JAX does: mistakes of a beginner get one sentence each."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from strategies.train_state import TrainState

_NUMBERS = (bool, int, float, complex, np.generic)
_TREES = (
    "give init a pytree of arrays, and put it together with the rest of the model inside of the loss function: of Flax "
    "the variables['params'] of model.init, or a part of nnx.split; of Equinox a part of "
    "eqx.partition(model, eqx.is_inexact_array)"
)


def check_loss_function(loss_fn: object) -> None:
    """Look at what is to be called as `loss_fn(variables, batch, key)`; see `check_function`."""
    way_out = "; let it take these three, the key also where nothing is random"
    check_function("the loss function", loss_fn, ("variables", "batch", "key"), way_out)


def check_function(what: str, function: object, arguments: Sequence[str], way_out: str = "") -> None:
    """Look at what is to be called with these arguments.

    Args:
        what: it is, for messages.
        function: what the user gave.
        arguments: their names, in order.
        way_out: what a message about other arguments says last.

    Raises:
        TypeError: if it is no function, or of other arguments.
    """
    called_with = f"({', '.join(arguments)})"
    if not callable(function):
        raise TypeError(f"{what} is a {type(function).__name__}; use a function of {called_with}")
    try:
        signature = inspect.signature(function)
    except ValueError:  # one that is not written in Python does not tell
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise TypeError(f"{what} takes {signature}, and is called with {called_with}{way_out}") from error


def check_optimizer(optimizer: Any) -> None:
    """Look at what is to be an optax gradient transformation.

    Raises:
        TypeError: if it is none.
    """
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        what = f"the function {optimizer.__name__}" if inspect.isfunction(optimizer) else repr(optimizer)
        raise TypeError(f"the optimizer is {what}; use a gradient transformation of optax, such as optax.adam(1e-3)")


def check_variables(variables: Any) -> None:
    """Look at what is to be trained.

    Raises:
        TypeError: if a leaf is no array of a floating-point dtype.
        ValueError: if there is none, or one was used up.
    """
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    if not leaves:
        raise ValueError(f"there is no variable in {variables!r}; {_TREES}")
    for path, leaf in leaves:
        if not _is_array(leaf):
            name = f"variable {keystr(path)}" if path else "what is to be trained"
            raise TypeError(f"{name} is of type {type(leaf).__name__} and no array; {_TREES}")
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(
                f"variable {keystr(path)} is of dtype {jnp.result_type(leaf)}; only floating-point variables can be "
                f"trained, keep others outside: {_TREES}"
            )
    if are_used_up(variables):
        raise ValueError("these variables were used up by a step; give init a copy, or those of the state after it")


def check_state(state: Any) -> None:
    """Look at the state that a step is to be made with.

    Raises:
        TypeError: if it is none.
        ValueError: if a step has used it up.
    """
    if not isinstance(state, TrainState):
        raise TypeError(
            f"the state is of type {type(state).__name__}; give what trainer.init returned, and then what the step "
            "before returned: state, metrics = trainer.step(state, batch)"
        )
    if are_used_up(state.variables):
        raise ValueError(
            f"this state was used up by step {state.step}; rebind it: state, metrics = trainer.step(state, batch)"
        )


@contextmanager
def naming_missing_keys(variables: Any, batch: Any) -> Iterator[None]:
    """Say what there is where a loss function asks for what there is not.

    Raises:
        ValueError: instead of a KeyError for what is neither among the variables nor in the batch.
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
        raise ValueError(f"the loss function asks for {wanted!r}, which is not there: {known}") from error


def metric_names(metrics: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of metrics.

    Args:
        metrics: what the loss function returns besides the loss, as shapes.

    Raises:
        TypeError: if one is no scalar, or is called "loss".
    """
    for name, metric in metrics.items():
        if not isinstance(metric, jax.ShapeDtypeStruct):
            raise TypeError(
                f"metric {name!r} is a {type(metric).__name__}; metrics are scalars: give each of its values a name of "
                "its own in the dictionary that the loss function returns"
            )
        if metric.shape != ():
            raise TypeError(
                f"metric {name!r} is of shape {list(metric.shape)}; metrics are scalars, which are averaged over all "
                "replicas: take jnp.mean of it, and send whole arrays through a strategies.OutfeedQueue"
            )
        if name == "loss":
            raise TypeError("a metric is called 'loss', which is the name of the loss itself; give it another one")
    return tuple(metrics)


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, str | type):
        return False
    return isinstance(leaf, _NUMBERS) or _has_dtype(leaf)


def _has_dtype(leaf: Any) -> bool:
    if not hasattr(leaf, "shape"):
        return False
    try:
        jnp.result_type(leaf)
    except TypeError:
        return False
    return True


def are_used_up(variables: Any) -> bool:
    """Whether a step has written new variables where these were."""
    return any(leaf.is_deleted() for leaf in jax.tree.leaves(variables) if hasattr(leaf, "is_deleted"))
