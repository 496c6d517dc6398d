"""The functions by which models made in a strategy's scope train on its replicas."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable

import keras

from strategies.data.randomness import are_kept
from strategies.errors import StrategyError
from strategies.keras.checks import check_keras_version
from strategies.keras.extensions import METHODS, Extensions
from strategies.keras.in_programs import KerasState
from strategies.keras.means import present_rule, sum_of_replicas
from strategies.keras.model import FORWARDED, ReplicatedModel
from strategies.keras.patches import ask_before_loops, ask_of_losses, draw_seeds, give_methods, tell_of_new
from strategies.strategy import get_strategy

__all__ = ["KerasState", "hook", "check_keras_version"]

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_is_hooked = False


def hook(is_scope_open: Callable[[], bool]) -> None:
    """Make new models belong to the strategy whose scope is open. Calls after the first one do nothing.

    A model made in a scope gets the methods of the strategy. A model made outside of any scope is refused inside one.

    Args:
        is_scope_open: Returns whether any thread is in a scope.

    Raises:
        StrategyError: If Keras was imported a second time; models of the second import would train in each instance
            alone.
    """
    global _is_hooked
    if sys.modules["keras"] is not keras:
        raise StrategyError("keras was imported a second time, but only the first one knows strategies; restart Python")

    def join_scope(model: keras.Model) -> None:
        strategy = get_strategy()
        if strategy is not None:
            check_keras_version()
            extensions = Extensions(model)
            replicated = ReplicatedModel(model, type(model), strategy, extensions)
            methods = {name: getattr(replicated, name) for name in FORWARDED}
            give_methods(model, methods | {name: getattr(extensions, name) for name in METHODS})
        elif is_scope_open():
            logger.warning(
                "a model is made in a thread without an open scope, while another thread has one open; it trains in "
                "this instance alone: enter the scope in this thread, or run it in contextvars.copy_context()"
            )

    def check_outside_scope(model: keras.Model) -> None:
        if get_strategy() is not None:
            raise StrategyError(
                f"model {model.name!r} was made outside of strategy.scope() and is used inside of it; make it inside, "
                "or use it outside"
            )

    with _lock:  # so that no call returns before some thread has finished hooking
        if not _is_hooked:
            tell_of_new(keras.Model, join_scope)
            ask_before_loops(check_outside_scope)
            ask_of_losses(present_rule, sum_of_replicas)
            draw_seeds(are_kept.get)
            _is_hooked = True
