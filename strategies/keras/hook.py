"""Where models of Keras that are made in the scope of a strategy become its own, and others stay what they are."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import keras
from keras.src.trainers import trainer as keras_trainer

from strategies.errors import StrategyError
from strategies.keras.model import replicate

TRIED = ("3.15",)
"""The versions of Keras with which all of this was run."""

logger = logging.getLogger("strategies.keras")


class InScope(Protocol):
    """What is asked for the current strategy."""

    def __call__(self) -> Any:
        """The strategy in whose scope this is, or None."""


def hook(get_strategy: InScope) -> None:
    """Have models know the scope in which they are made; called once in a process.

    The constructor of Keras's base class asks for it. A model in a scope gets a class of its own, and nothing else of
    Keras is changed but that a model from outside of any scope is refused inside of one.

    Args:
        get_strategy: tells the current strategy.
    """
    create = keras_trainer.Trainer.__init__

    def create_in_scope(self: Any) -> None:
        create(self)
        strategy = get_strategy()
        if strategy is not None:
            refuse_other_keras()
            replicate(self, strategy)

    keras_trainer.Trainer.__init__ = create_in_scope
    if keras.backend.backend() == "jax":
        from keras.src.backend.jax.trainer import JAXTrainer

        for name in ("make_train_function", "make_test_function", "make_predict_function"):
            setattr(JAXTrainer, name, _refused_in_scope(getattr(JAXTrainer, name), get_strategy))


def _refused_in_scope(make: Callable[..., Any], get_strategy: InScope) -> Callable[..., Any]:
    """The same function of a model that is no strategy's; those that are have one of their own."""

    def make_outside(self: Any, *arguments: Any, **named: Any) -> Any:
        if get_strategy() is not None:
            raise StrategyError(
                f"model {self.name!r} was made outside of strategy.scope() and is used inside of it; make it inside, "
                "or use it outside"
            )
        return make(self, *arguments, **named)

    make_outside.__doc__, make_outside.__name__ = make.__doc__, make.__name__
    return make_outside


def refuse_other_keras() -> None:
    """Refuse another backend than JAX, and versions of Keras that were not tried.

    Raises:
        StrategyError: naming what there is and what to do.
    """
    backend = keras.backend.backend()
    if backend != "jax":
        _refuse(
            f"Keras runs on {backend}, and the replicas of a strategy on JAX; set KERAS_BACKEND=jax before keras is "
            "imported"
        )
    found = re.match(r"\d+\.\d+", keras.__version__)
    if found is None or found.group() not in TRIED:
        _refuse(
            f"this is Keras {keras.__version__}, and models of a strategy were tried with {', '.join(TRIED)}; "
            f"pip install 'keras=={TRIED[-1]}.*'"
        )


def _refuse(message: str) -> NoReturn:
    raise StrategyError(message)
