"""The hook by which models of Keras that are made in a scope become the strategy's; other models stay as they are."""

from __future__ import annotations

import functools
import logging
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import keras
from keras.src import api_export
from keras.src.models import model as keras_model
from keras.src.saving import object_registration
from keras.src.trainers import trainer as keras_trainer

from strategies.errors import StrategyError
from strategies.keras.extensions import METHODS, Extensions
from strategies.keras.model import FORWARDED, ReplicatedModel
from strategies.keras.protocols import ModelClass, ModelLike
from strategies.strategy import Strategy

TRIED = ("3.15",)
"""The versions of Keras with which all of this was run."""

_REPLICATED, _EXTENSIONS = "_replicated", "_extensions"
"""The attributes of a model for the methods in place of Keras's, and for those besides."""

GetStrategy = Callable[[], Strategy | None]
Method = Callable[..., Any]

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_is_hooked = False
_classes: WeakKeyDictionary[type, type] = WeakKeyDictionary()


def hook(get_strategy: GetStrategy, is_scope_open: Callable[[], bool]) -> None:
    """Have models know the scope in which they are made. All calls but the first one do nothing.

    The constructor of Keras's base class asks for the scope. A model in a scope gets a class of its own. Nothing else
    of Keras is changed, except that a model from outside of any scope is refused inside of one.

    Args:
        get_strategy: tells the strategy in whose scope this is, or None.
        is_scope_open: tells whether any thread is in a scope.

    Raises:
        StrategyError: if Keras was imported a second time; models of the second one would train in each instance alone.
    """
    global _is_hooked
    if sys.modules["keras"] is not keras:
        raise StrategyError("keras was imported a second time, and only the first one knows strategies; restart Python")
    with _lock:  # so that it is done when this returns, whichever thread does it
        if _is_hooked:
            return
        trainer: ModelClass = keras_trainer.Trainer
        trainer_of_backend: ModelClass = vars(keras_model)["Trainer"]
        create = trainer.__init__

        def create_in_scope(self: ModelLike) -> None:
            create(self)
            strategy = get_strategy()
            if strategy is not None:
                refuse_other_keras()
                _replicate(self, strategy)
            elif is_scope_open():
                logger.warning(
                    "a model is made by a thread that is in no scope while another one is; it trains in this instance "
                    "alone: enter the scope in this thread, or run it in contextvars.copy_context()"
                )

        trainer.__init__ = create_in_scope
        for name in ("make_train_function", "make_test_function", "make_predict_function"):
            setattr(trainer_of_backend, name, _refused_in_scope(getattr(trainer_of_backend, name), get_strategy))
        _is_hooked = True


def _replicate(model: ModelLike, strategy: Strategy) -> None:
    """Make a model, whose constructor is running, one of a strategy."""
    stock = type(model)
    extensions = Extensions(model)
    object.__setattr__(model, _EXTENSIONS, extensions)
    object.__setattr__(model, _REPLICATED, ReplicatedModel(model, stock, strategy, extensions))
    object.__setattr__(model, "__class__", _class_of(stock, {_REPLICATED: FORWARDED, _EXTENSIONS: METHODS}))


def _refused_in_scope(make: Method, get_strategy: GetStrategy) -> Method:
    """Return the same function, which refuses models of no strategy inside of a scope."""

    @functools.wraps(make)
    def make_outside(self: ModelLike, *arguments: object, **named: object) -> Any:
        if get_strategy() is not None:
            raise StrategyError(
                f"model {self.name!r} was made outside of strategy.scope() and is used inside of it; make it inside, "
                "or use it outside"
            )
        return make(self, *arguments, **named)

    return make_outside


def refuse_other_keras() -> None:
    """Refuse another backend than JAX, and versions of Keras that were not tried.

    Raises:
        StrategyError: naming what there is and what to do.
    """
    backend = keras.backend.backend()
    if backend != "jax":
        raise StrategyError(
            f"Keras runs on {backend}, and the replicas of a strategy on JAX; set KERAS_BACKEND=jax before keras is "
            "imported"
        )
    found = re.match(r"\d+\.\d+", keras.__version__)
    if found is None or found.group() not in TRIED:
        raise StrategyError(
            f"this is Keras {keras.__version__}, and models of a strategy were tried with {', '.join(TRIED)}; "
            f"pip install 'keras=={TRIED[-1]}.*'"
        )


def _class_of(stock: ModelClass, forwarded: Mapping[str, Sequence[str]]) -> type:
    """Return a class like a stock one, some of whose methods are those of attributes of its models.

    The class has the name and the module of the stock one and is serialized as that, so that files are those of stock
    models.

    Args:
        stock: a class of models of Keras or of the user's; it stays as it is.
        forwarded: the names of the methods, by the attribute whose methods they are.
    """
    if stock not in _classes:
        pairs = [(owner, name) for owner, names in forwarded.items() for name in names]
        namespace: dict[str, Any] = {name: _forwarding(stock, owner, name) for owner, name in pairs}
        namespace |= {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
        namespace["__reduce__"] = functools.partialmethod(_reduced, stock)
        made = type(stock)(stock.__name__, (stock,), namespace)
        _register(stock, made)
        _classes[stock] = made
    return _classes[stock]


def _reduced(model: ModelLike, stock: ModelClass) -> tuple[Method, object]:
    """Return what is pickled: as of a stock model, whose class can be found by its name."""
    return stock._unpickle_model, stock.__reduce__(model)[1]


def _register(stock: ModelClass, made: ModelClass) -> None:
    """Have Keras write the name of the stock class, under which it finds only that one."""
    public = api_export.get_name_from_symbol(stock)
    if public is not None:
        api_export.REGISTERED_OBJS_TO_NAMES[made] = public
    own = object_registration.GLOBAL_CUSTOM_NAMES.get(stock)
    if own is not None:
        object_registration.GLOBAL_CUSTOM_NAMES[made] = own


def _forwarding(stock: ModelClass, owner: str, name: str) -> Method:
    def method(self: object, *arguments: object, **named: object) -> Any:
        return getattr(self.__dict__[owner], name)(*arguments, **named)

    original = getattr(stock, name, None)
    return method if original is None else functools.wraps(original)(method)
