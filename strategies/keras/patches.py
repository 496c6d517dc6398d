"""Changes made to Keras behind its public interface, and the names taken from inside it; no other file has any.

Keras offers no way to do what these functions do; each one says what is missing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import keras
import numpy as np
from keras.src.ops.node import Node
from keras.src.trainers.data_adapters import get_data_adapter
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter, can_convert_arrays
from keras.src.trainers.data_adapters.array_slicing import train_validation_split
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from strategies.keras.protocols import ModelLike, NodeLike

__all__ = [
    "ArrayDataAdapter",
    "DataAdapter",
    "PyDatasetAdapter",
    "can_convert_arrays",
    "get_data_adapter",
    "train_validation_split",
]

TRIED = ("3.15",)
"""The versions of Keras with which all of this was run."""

Method: TypeAlias = Callable[..., object]
PatchedClass: TypeAlias = Any
"""A class of Keras of which a method is replaced."""

T = TypeVar("T")


# ---- for the whole process


def tell_of_new_models(tell: Callable[[ModelLike], None]) -> None:
    """Call `tell` with every model when it is made: Keras tells nobody."""
    models: PatchedClass = keras.Model
    models.__init__ = _telling(models.__init__, tell)


def tell_of_new_calls(tell: Callable[[NodeLike], None]) -> None:
    """Call `tell` with the node of every symbolic call of a layer: Keras notes no scope of a program's own in it."""
    nodes: PatchedClass = Node
    nodes.__init__ = _telling(nodes.__init__, tell)


def ask_before_loops(ask: Callable[[ModelLike], None]) -> None:
    """Call `ask`, which may refuse, before a model gets a function for one of its loops: Keras asks nobody.

    Models that were made before `tell_of_new_models` was called can be reached in no other way.
    """
    for name in ("make_train_function", "make_test_function", "make_predict_function"):
        setattr(keras.Model, name, _asking(getattr(keras.Model, name), ask))


def _telling(create: Method, tell: Callable[[T], None]) -> Method:
    @functools.wraps(create)
    def create_and_tell(self: T, *args: object, **kwargs: object) -> None:  # Keras looks for arguments by these names
        create(self, *args, **kwargs)
        tell(self)

    return create_and_tell


def _asking(make: Method, ask: Callable[[ModelLike], None]) -> Method:
    @functools.wraps(make)
    def ask_and_make(self: ModelLike, *arguments: object, **named: object) -> object:
        ask(self)
        return make(self, *arguments, **named)

    return ask_and_make


# ---- for one object


def give_methods(model: ModelLike, methods: Mapping[str, Method]) -> None:
    """Have a model call other methods than those of its class, which stays as it is: loops of Keras have no hooks."""
    vars(model).update(methods)


@contextmanager
def method_replaced(owner: object, name: str, method: Method) -> Iterator[None]:
    """Have one object call another method for a while: neither optimizers nor functional models offer a hook."""
    vars(owner)[name] = method  # Keras would track what is set as an attribute
    try:
        yield
    finally:
        del vars(owner)[name]


def hold_place(variable: keras.Variable) -> None:
    """Give a variable zeros that take no memory: `assign` of Keras makes an array of the variable's size."""
    zeros: np.ndarray = np.broadcast_to(np.zeros((), variable.dtype), variable.shape)
    variable._value = zeros


def begin_with_epoch(model: ModelLike, epoch: int) -> None:
    """Have `fit` begin with an epoch that is known only when callbacks have begun: Keras takes it as an argument."""
    model._initial_epoch = epoch or None


def call_in_one_thread(callbacks: keras.callbacks.CallbackList) -> None:
    """Have no callback called in another thread: Keras decides that by the callbacks that it is given at first."""
    callbacks._async_train = False


def back_up_with(
    callback: keras.callbacks.BackupAndRestore, save: Callable[[], None], load: Callable[[], None]
) -> None:
    """Have a `BackupAndRestore` save and load otherwise: its files have no other owner."""
    vars(callback).update(_save_model=save, _load_model=load)
