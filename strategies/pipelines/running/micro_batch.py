"""The questions that a stage may ask: the number of its micro-batch, its random key, and the model state."""

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
        number: an int32 scalar, from 0 on for each update.
        key: a random key; None where nothing is learned.
        model_state: as the stages that were traced have left it.
    """

    number: jax.Array
    key: jax.Array | None = None
    model_state: Tree = None


_current: ContextVar[MicroBatch | None] = ContextVar("micro_batch", default=None)


def get_current_iteration_counter() -> jax.Array:
    """Return the number of the micro-batch that a stage works on, from 0 on for each update; an int32 scalar.

    Semantics: the original's operation of that name. Without a pipeline, as in evaluation, it is 0.

    Raises:
        RuntimeError: outside of programs of replicas.
    """
    current = _current.get()
    if current is not None:
        return current.number
    if is_in_program():
        zero: jax.Array = jnp.int32(0)
        return zero
    raise RuntimeError(
        "get_current_iteration_counter counts the micro-batches of a pipeline, and there is none here; call it in a "
        "stage"
    )


def get_random_key() -> jax.Array:
    """Return the random key of the micro-batch that a stage of a pipeline of functions works on, for dropout.

    It differs for each replica, update and micro-batch, and not for stages: a stage that is not the only one to use it
    folds a number of its own in.

    Raises:
        RuntimeError: outside of stages of a pipeline of functions that learns.
    """
    key = None if (current := _current.get()) is None else current.key
    if key is None:
        raise RuntimeError(
            "get_random_key is for the stages of a pipeline of functions that learns, and there is none here; call it "
            "in a stage, and hand keys over in the infeed where nothing is learned"
        )
    return key


def get_model_state() -> Tree:
    """Return the model state (moving means, counters) of a pipeline of functions, in a stage; see `Pipeline.init`.

    A leaf is for the stage that updates it: another one would have to wait for it.

    Raises:
        RuntimeError: where there is none.
    """
    return _with_model_state("get_model_state").model_state


def update_model_state(**changes: Tree) -> None:
    """Give entries of the model state, a dictionary, new values, in a stage of a pipeline of functions.

    Where nothing is learned this does nothing: the state that was given stays.

    Args:
        changes: the new values by their names.

    Raises:
        RuntimeError: where there is no model state.
        ValueError: for a name that is not in it.
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
            f"{name} is for stages of a pipeline of functions with a model state, and there is none here; give one: "
            "net.init(variables, model_state)"
        )
    return current


@contextmanager
def tracing(micro_batch: MicroBatch) -> Iterator[MicroBatch]:
    """Have stages that are traced in the block ask this micro-batch; they leave their model state in it."""
    token = _current.set(micro_batch)
    try:
        yield micro_batch
    finally:
        _current.reset(token)
