"""The variables of a `model_fn`, found while it is called, and read by their names afterwards."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from strategies.typing import Key, Leaf

_current: ContextVar[CallVariables | None] = ContextVar("variables of a model_fn", default=None)


class CallVariables:
    """The variables of one call of a `model_fn`, or of the function of a `host_call`.

    Args:
        given: Values by name; if there is none, variables begin with their initial values.
        key: Random key of the replica and the micro-batch; None on the host.
        global_step: Number of iterations before the loop, an int32 scalar; on the host, after the step.
        seed: Seed of initial values.

    Attributes:
        values: Values at the beginning of the call by name.
        trained: Objects by which the program names variables that an optimizer may train, by name.
        assigned: Values that layers of Keras assigned to other variables by name.
    """

    def __init__(self, given: Mapping[str, Leaf], key: Key, global_step: Leaf, seed: int) -> None:
        self.values: dict[str, Leaf] = {}
        self.trained: dict[str, Leaf] = {}
        self.assigned: dict[str, Leaf] = {}
        self.global_step, self.seed = global_step, seed
        self._given, self._key = given, key

    def read(self, name: str, initial: Callable[[], Leaf], is_trained: bool, handle: Leaf = None) -> Leaf:
        """Return the value of a variable that the call reads for the first time."""
        value = self._given.get(name)
        if self._key is None:  # on the host
            if not isinstance(value, np.ndarray):  # no value yet, or a list of a checkpoint
                first = np.array(initial())
                value = first if value is None else np.asarray(value, first.dtype)
            self.values[name] = value
            return value
        if self._given and value is None:
            known = ", ".join(self._given)
            raise ValueError(f"model_fn reads variable {name!r}, but the model has {known}; read the same in each call")
        if not isinstance(value, jax.Array):  # an array of the host, or no value yet
            with jax.ensure_compile_time_eval():
                value = jnp.asarray(initial() if value is None else value)
        self.values[name] = value
        if is_trained:
            self.trained[name] = value if handle is None else handle
        return value

    def next_key(self) -> Key:
        """Return a random key, different for each replica, step and call; raise RuntimeError on the host."""
        if self._key is None:
            raise RuntimeError("a host_call has no random key; draw in model_fn, and give the host_call the numbers")
        self._key, own = jax.random.split(self._key)
        return own

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make these the variables that `get_variable` reads inside the block."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


def unique_name(path: str, known: Mapping[str, object]) -> str:
    """Return the name of a Keras variable without Keras's running numbers, which differ from call to call."""
    name = re.sub(r"_\d+(?=/)", "", path)
    names = (f"{name}_{number}" if number else name for number in range(len(known) + 1))
    return next(found for found in names if found not in known)


def current_call(what: str) -> CallVariables:
    """Return the variables of the present call; raise RuntimeError outside of one."""
    found = _current.get()
    if found is None:
        raise RuntimeError(f"{what} is called outside of model_fn; call it while the estimator calls model_fn")
    return found


def get_variable(
    name: str,
    shape: Sequence[int] | None = None,
    dtype: DTypeLike = np.float32,
    initializer: Leaf = None,
    trainable: bool = True,
) -> Leaf:
    """Return the value of a variable of the model; its first value is that of worker 0.

    In the function of a `host_call`, return a NumPy array of this worker, which the function may change in place, as
    with `calls += 1`. Checkpoints keep worker 0's.

    Args:
        name: Name, which a call may use once.
        shape: Shape; None for that of the initial value.
        dtype: Dtype.
        initializer: Array, number, or function `(key, shape, dtype)` such as those of `jax.nn.initializers`; None for
            Glorot's uniform, or zeros for fewer than two dimensions.
        trainable: Whether an optimizer may change it.

    Raises:
        RuntimeError: Outside of a `model_fn` or `host_call`.
        ValueError: If the name is in use.
    """
    call = current_call("get_variable")
    if name in call.values:
        raise ValueError(f"Variable {name} already exists; give each variable a name of its own")
    shape = np.shape(0 if initializer is None or callable(initializer) else initializer) if shape is None else shape
    default = jax.nn.initializers.glorot_uniform() if len(shape) > 1 else jax.nn.initializers.zeros
    given = default if initializer is None else initializer

    def initial() -> Leaf:
        key = jax.random.fold_in(jax.random.key(call.seed), zlib.crc32(name.encode()))
        return given(key, shape, dtype) if callable(given) else jnp.full(shape, given, dtype)

    return call.read(name, initial, trainable)


def get_global_step() -> Leaf:
    """Return the global step before the present loop, an int32 scalar; in a `host_call`, that after its step."""
    return current_call("get_global_step").global_step


def get_random_key() -> Key:
    """Return a random key, different for each replica, step and call; raise RuntimeError outside of a `model_fn`."""
    return current_call("get_random_key").next_key()
