"""Which micro-batch a stage works on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp

from strategies.programs.feed_program import is_in_program

_number: ContextVar[jax.Array | None] = ContextVar("micro_batch", default=None)


def get_current_iteration_counter() -> jax.Array:
    """The number of the micro-batch that a stage works on, from 0 on for each update; an int32 scalar.

    Semantics: the original's operation of that name. Without a pipeline, as in evaluation, it is 0.

    Raises:
        RuntimeError: outside of programs of replicas.
    """
    number = _number.get()
    if number is None and is_in_program():
        zero: jax.Array = jnp.int32(0)
        return zero
    if number is None:
        raise RuntimeError(
            "get_current_iteration_counter counts the micro-batches of a pipeline, and there is none here; call it in "
            "a stage"
        )
    return number


@contextmanager
def counting(number: jax.Array) -> Iterator[None]:
    """While what is computed of a micro-batch is traced."""
    token = _number.set(number)
    try:
        yield
    finally:
        _number.reset(token)
