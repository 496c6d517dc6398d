"""Patches of Keras's private parts. No other file patches Keras or uses its private names.

Each function names the public interface that Keras lacks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras.src.losses import loss as loss_module
from keras.src.ops.node import Node
from keras.src.trainers.data_adapters import get_data_adapter
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter, can_convert_arrays
from keras.src.trainers.data_adapters.array_slicing import train_validation_split
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.utils.python_utils import is_default

from strategies.keras.state import Array, Logs, State

__all__ = [
    "ArrayDataAdapter",
    "DataAdapter",
    "Node",
    "can_convert_arrays",
    "get_data_adapter",
    "train_validation_split",
]

TRIED = ("3.15",)
"""The versions of Keras with which these changes were tested."""

Method: TypeAlias = Callable[..., object]
PatchedClass: TypeAlias = Any
"""A class of Keras whose method is replaced."""


# ---- for the whole process


def tell_of_new(kind: PatchedClass, tell: Callable[[Any], None]) -> None:
    """Call `tell` with every new object of a class: Keras has no hook for new models, nor for calls of layers.

    Args:
        kind: `keras.Model`, or `Node` for symbolic calls of layers.
        tell: Function to call.
    """

    def create_and_call(create: Method, self: object, *args: object, **kwargs: object) -> None:
        create(self, *args, **kwargs)
        tell(self)

    _wrap(kind, "__init__", create_and_call)


def ask_before_loops(ask: Callable[[keras.Model], None]) -> None:
    """Call `ask`, which may raise, before a model gets a function for one of its loops: Keras has no hook for this.

    There is no other way to reach models that were made before `tell_of_new` was called.
    """

    def ask_and_make(make: Method, self: keras.Model, *args: object, **kwargs: object) -> object:
        ask(self)
        return make(self, *args, **kwargs)

    for name in ("make_train_function", "make_test_function", "make_predict_function"):
        _wrap(keras.Model, name, ask_and_make)


def ask_of_losses(
    rule_of: Callable[[], Callable[[jax.Array, jax.Array], jax.Array] | None],
    of_sum: Callable[[jax.Array], jax.Array],
) -> None:
    """Let rules replace each loss that is divided by a mask or by sample weights, or is a sum.

    Keras has no hook for reductions of losses, which take the mask from the outputs.

    Args:
        rule_of: Returns the present rule, or None, which leaves all losses as they are. The rule gets the loss and the
            sum over rows by which Keras has divided it, and returns the loss to use.
        of_sum: Returns the loss to use for a sum over rows.
    """
    reduce_: Callable[..., jax.Array] = loss_module.reduce_weighted_values

    @functools.wraps(reduce_)
    def reduce_and_ask(
        values: Array,
        sample_weight: Array | None = None,
        mask: Array | None = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: str | None = None,
    ) -> Array:
        rule = rule_of()
        loss = reduce_(values, sample_weight, mask, reduction, dtype)
        if rule is None:
            return loss
        values = keras.ops.convert_to_tensor(values, dtype=dtype)
        if reduction == "sum" and values.ndim:
            return of_sum(loss)
        divisor = _divisor(values, sample_weight, mask, reduction)
        return loss if divisor is None else rule(loss, jax.lax.stop_gradient(divisor))

    loss_module.reduce_weighted_values = reduce_and_ask


def _divisor(values: Array, sample_weight: Array | None, mask: Array | None, reduction: str | None) -> jax.Array | None:
    """Return the divisor of a loss that depends on rows; None if Keras divides by a number of elements, or not."""
    if values.ndim == 0 or (mask is None and (sample_weight is None or reduction != "mean_with_sample_weight")):
        return None
    if reduction in ("mean", "sum_over_batch_size"):
        return jnp.sum(jnp.asarray(mask, jnp.float32))
    if reduction != "mean_with_sample_weight":
        return None
    weights = None if sample_weight is None else keras.ops.convert_to_tensor(sample_weight, dtype="float32")
    weights = loss_module.apply_mask(weights, mask, dtype="float32", reduction=reduction)
    return jnp.sum(loss_module.squeeze_or_expand_to_same_rank(values, weights)[1])


def draw_seeds(is_drawn: Callable[[], bool]) -> None:
    """Draw the next seeds of `SeedGenerator`s from NumPy's global generator: Keras cannot seed all of them anew.

    Generators with different seeds give different numbers, and all keep their states. In traced functions they do what
    they do in Keras.

    Args:
        is_drawn: Returns whether the seeds of the calling thread are drawn now.
    """

    def draw_or_advance(advance: Method, self: keras.random.SeedGenerator, ordered: bool = True) -> object:
        if not is_drawn() or isinstance(self.state.value * 1, jax.core.Tracer):
            return advance(self, ordered)
        drawn = np.frombuffer(np.random.bytes(8), "<u4")  # noqa: NPY002 - seeded for each batch
        return self.backend.convert_to_tensor(drawn ^ (self._initial_seed or 0) % 2**32, dtype=self.state.dtype)

    _wrap(keras.random.SeedGenerator, "next", draw_or_advance)


def _wrap(owner: PatchedClass, name: str, around: Method) -> None:
    """Replace a method of a class by one that calls `around` with the replaced method and all arguments."""
    replaced: Method = getattr(owner, name)

    @functools.wraps(replaced)
    def call(self: object, *args: object, **kwargs: object) -> object:  # Keras looks for these names
        return around(replaced, self, *args, **kwargs)

    setattr(owner, name, call)


# ---- for one object


def give_methods(owner: object, methods: Mapping[str, Method]) -> None:
    """Replace methods of a model or callback, and not of its class: Keras's loops and backups have no hooks."""
    vars(owner).update(methods)


@contextmanager
def method_replaced(owner: object, name: str, method: Method) -> Iterator[None]:
    """Replace a method of one object inside the block: neither optimizers nor functional models have hooks."""
    vars(owner)[name] = method  # setattr would make Keras track it
    try:
        yield
    finally:
        del vars(owner)[name]


def hold_place(variable: keras.Variable) -> None:
    """Give a variable zeros that take no memory: Keras's `assign` allocates the variable's size."""
    variable._value = np.broadcast_to(np.zeros((), variable.dtype), variable.shape)


def give_back(model: keras.Model, state: State) -> None:
    """Give variables their values that Keras's loop has taken away: it loses them if its first step fails."""
    of_optimizer = [model.optimizer.variables] if len(state) == 4 else []  # only `fit` takes these
    parts = (model.trainable_variables, model.non_trainable_variables, *of_optimizer, model.metrics_variables)
    for variable, value in (pair for pairs in map(zip, parts, state) for pair in pairs):
        variable._value = value if variable._value is None else variable._value


def finalized_if_whole(optimizer: keras.Optimizer) -> AbstractContextManager[None]:
    """Let an optimizer replace weights by its means inside the block only if no variable has zeros of `hold_place`.

    Keras does this also after an error in `fit`.
    """
    finalize: Method = optimizer.finalize_variable_values

    def finalize_whole(variables: object) -> None:
        if not any(isinstance(one._value, np.ndarray) and 0 in one._value.strides for one in optimizer.variables):
            finalize(variables)

    return method_replaced(optimizer, "finalize_variable_values", finalize_whole)


def begin_with_epoch(model: keras.Model, epoch: int) -> None:
    """Set the first epoch of `fit` after its callbacks have begun: Keras takes the epoch only as an argument."""
    model._initial_epoch = epoch or None


def call_in_one_thread(callbacks: keras.callbacks.CallbackList) -> None:
    """Call all callbacks in the calling thread: Keras decides this too early, by the first callbacks that it gets."""
    callbacks._async_train = False


def pass_over_batches(callbacks: keras.callbacks.CallbackList) -> None:
    """Wake no thread at the end of a batch of `fit` while no callback has a hook: Keras would read the logs there."""
    hooks, dispatch = ("on_batch_end", "on_train_batch_end"), callbacks.on_train_batch_end

    def on_train_batch_end(batch: int, logs: Logs | None = None) -> None:
        if not all(is_default(getattr(each, hook)) for each in callbacks.callbacks for hook in hooks):
            dispatch(batch, logs)

    give_methods(callbacks, {"on_train_batch_end": on_train_batch_end})
