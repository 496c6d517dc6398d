"""Where callbacks run: those that write on the chief, and all others on every instance."""

from __future__ import annotations

from typing import Any

import keras
from keras.src.callbacks import CallbackList
from keras.src.callbacks.progbar_logger import ProgbarLogger

from strategies.strategy import Strategy

WRITERS: tuple[type, ...] = (
    ProgbarLogger,
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
"""Those that write, and decide nothing."""


def placed(callbacks: CallbackList, strategy: Strategy) -> CallbackList:
    """The same list, in which those that write do so on the chief only."""
    callbacks.callbacks = [
        OnChief(each, strategy) if isinstance(each, WRITERS) else each for each in callbacks.callbacks
    ]
    return callbacks


_HOOKS = [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]


class OnChief(keras.callbacks.Callback):
    """A callback that is called on the instance that is the chief at the time, and on no other.

    Args:
        callback: it is.
        strategy: knows the chief.
    """

    def __init__(self, callback: Any, strategy: Strategy) -> None:
        super().__init__()
        self.callback = callback
        self._strategy = strategy

    def set_params(self, params: Any) -> None:
        """See Keras."""
        self.callback.set_params(params)

    def set_model(self, model: Any) -> None:
        """See Keras."""
        self.callback.set_model(model)


def _on_chief(name: str) -> Any:
    def hook(self: OnChief, *arguments: Any, **named: Any) -> None:
        if self._strategy.replicas.is_chief:
            getattr(self.callback, name)(*arguments, **named)

    return hook


for _name in _HOOKS:
    setattr(OnChief, _name, _on_chief(_name))
