"""The context of a stage: the number of its micro-batch, its random key, and the model state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from strategies.data.replication import is_in_program
from strategies.typing import Tree


@dataclass
class MicroBatch:
    """The micro-batch that is being traced.

    Attributes:
        number: The number of the micro-batch, an int32 scalar, from 0 in each update.
        key: A random key; None without training.
        model_state: The model state, as the stages traced so far have left it.
    """

    number: jax.Array
    key: jax.Array | None = None
    model_state: Tree = None


_current: ContextVar[MicroBatch | None] = ContextVar("micro_batch", default=None)


def get_current_iteration_counter() -> jax.Array:
    """Return the number of the micro-batch that a stage works on, from 0 in each update; an int32 scalar.

    Semantics: the original's operation of that name. Without a pipeline, as in evaluation, it is 0.

    Raises:
        RuntimeError: Outside of programs of replicas.
    """
    current = _current.get()
    if current is not None:
        return current.number
    if is_in_program():
        zero: jax.Array = jnp.int32(0)
        return zero
    raise RuntimeError(
        "get_current_iteration_counter counts the micro-batches of a pipeline, but no program of replicas is being "
        "traced here; call it in a stage"
    )


def get_random_key() -> jax.Array:
    """Return the random key of the micro-batch that a stage of a pipeline of functions works on, for dropout.

    The key differs for each replica, update and micro-batch, but not for stages. If several stages use it, each should
    fold in a number of its own:

        key = jax.random.fold_in(get_random_key(), 1)

    Raises:
        RuntimeError: Outside of stages of a pipeline of functions that trains.
    """
    key = None if (current := _current.get()) is None else current.key
    if key is None:
        raise RuntimeError(
            "get_random_key is for the stages of a pipeline of functions that trains, but there is none here; call it "
            "in a stage, and without training pass keys in through the infeed"
        )
    return key


def get_model_state() -> Tree:
    """Return the model state (moving means, counters) of a pipeline of functions, in a stage; see `Pipeline.init`.

    Only the stage that updates a leaf may use it: another stage would have to wait for it.

    Raises:
        RuntimeError: If there is no model state.
    """
    return _with_model_state("get_model_state").model_state


def update_model_state(**changes: Tree) -> None:
    """Set entries of the model state, a dictionary, in a stage of a pipeline of functions.

    Without training this does nothing: the given state stays.

        update_model_state(mean=0.9 * get_model_state()["mean"] + 0.1 * batch_mean)

    Args:
        changes: The new values, by name.

    Raises:
        RuntimeError: If there is no model state.
        ValueError: If a name is not in the model state.
    """
    current = _with_model_state("update_model_state")
    if unknown := changes.keys() - current.model_state.keys():
        known = ", ".join(map(repr, current.model_state))
        raise ValueError(
            f"{min(unknown)!r} is not in the model state, which has {known}; give init a first value of it"
        )
    current.model_state = {**current.model_state, **changes}


def _with_model_state(name: str) -> MicroBatch:
    current = _current.get()
    if current is None or current.model_state is None:
        raise RuntimeError(
            f"{name} is for stages of a pipeline of functions with a model state, but there is none here; give one: "
            "net.init(variables, model_state)"
        )
    return current


@contextmanager
def tracing(micro_batch: MicroBatch) -> Iterator[MicroBatch]:
    """Let stages that are traced in the block use this micro-batch, and leave their model state in it."""
    token = _current.set(micro_batch)
    try:
        yield micro_batch
    finally:
        _current.reset(token)
