"""Placement of callbacks: writers run on the chief, others on every instance, and the instances then agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, partialmethod
from importlib.util import find_spec
from types import NoneType
from typing import Any, TypeAlias

import keras
from keras.callbacks import CallbackList
from typing_extensions import override

from strategies.core.metrics import EVALUATION
from strategies.errors import StrategyError
from strategies.keras.agreement import (
    VariableWatch,
    bits_of,
    broadcast,
    compared,
    insist,
    number_of_leader,
    terms_of_model,
)
from strategies.keras.checkpointing import given_to, with_whole_backups
from strategies.keras.patches import begin_with_epoch, call_in_one_thread, pass_over_batches
from strategies.keras.protocols import Callbacks, Logs, ModelLike
from strategies.keras.refusals import refuse_compiled
from strategies.strategy import Strategy, get_strategy

WRITERS: tuple[type, ...] = (
    keras.callbacks.ProgbarLogger,
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
"""The callbacks that only write; other instances need nothing from them."""

Callback: TypeAlias = Any
"""A callback of Keras, or None."""

EPOCH = "epoch/"
"""The prefix of Keras's logs at the end of an epoch, in sinks of metrics."""
_BATCH_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
_HOOKS = [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]
_ENDINGS = {f"on_{loop}_end": f"on_{loop}_begin" for loop in ("train", "test", "predict")}
_BEGINNINGS = ("set_model", *_ENDINGS.values())


class OnChief(keras.callbacks.Callback):
    """A callback that only the present chief calls.

    If another instance becomes the chief during a loop, its callback first gets the calls that began the loop, so that
    it can open files.

    Example::

        model.fit(x, y, callbacks=[strategies.keras.OnChief(MyReport("report.txt"))])

    Args:
        callback: Callback of Keras to call on the chief.
        strategy: Strategy that knows the chief; None for the strategy of the open scope.
    """

    def __init__(self, callback: Callback, strategy: Strategy | None = None) -> None:
        super().__init__()
        self.callback = callback
        self._strategy = strategy or get_strategy()
        self._missed: dict[str, Callable[[], object]] = {}  # calls that began a loop on another instance

    @override
    def set_params(self, params: Mapping[str, object]) -> None:
        self.callback.set_params(params)

    @override
    def set_model(self, model: ModelLike) -> None:
        self._call("set_model", model)  # a `TensorBoard` writes already here

    @property
    def is_called(self) -> bool:
        """Whether this instance is the chief."""
        return self._strategy is None or self._strategy.replicas.is_chief

    def _call(self, name: str, *arguments: object, **named: object) -> None:
        call = partial(getattr(self.callback, name), *arguments, **named)
        if self.is_called:
            self._catch_up()
            call()
        elif name in _BEGINNINGS:
            self._missed[name] = call
        else:
            self._missed.pop(_ENDINGS.get(name, ""), None)

    def _catch_up(self) -> None:
        missed, self._missed = self._missed, {}
        if "on_train_begin" in missed and isinstance(self.callback, keras.callbacks.CSVLogger):
            self.callback.append = True  # the lost chief wrote the earlier lines
        for call in missed.values():
            call()


for _name in _HOOKS:
    setattr(OnChief, _name, partialmethod(OnChief._call, _name))


@dataclass(frozen=True)
class Running:
    """A loop of Keras that runs on all instances.

    Attributes:
        model: Model of Keras.
        strategy: Strategy that connects the instances.
        begin_epoch: Function called with the number of each epoch that begins.
        unite: Function that gives Keras the whole state. Collective.
        resume: Function called when training begins.
        steps_made: Function that returns the number of steps so far.
        watch: Watcher of changes by callbacks; None without training.
    """

    model: ModelLike
    strategy: Strategy
    begin_epoch: Callable[[int], object] = lambda epoch: None
    unite: Callable[[], object] = lambda: None
    resume: Callable[[], object] = lambda: None
    steps_made: Callable[[], int] = lambda: 0
    watch: VariableWatch | None = None

    @property
    def is_alone(self) -> bool:
        """Whether no other instance exists."""
        return self.strategy.replicas.communicator.size == 1

    def agree(self, hook: str) -> None:
        """Stop all instances if a callback stops one, after a hook of all callbacks. Collective.

        Raises:
            DisagreementError: On all instances, if callbacks have made different changes on them.
        """
        refuse_compiled(self.model, hook)
        if self.is_alone or self.watch is None:
            return
        digest = self.watch.taken(with_flags="epoch" in hook)
        replicas, stops = self.strategy.replicas, bool(self.model.stop_training)
        self.model.stop_training, is_same = compared(replicas, stops, digest, f"changes by callbacks in {hook}")
        if not is_same:
            self.model.jax_state_sync()
            insist(replicas, terms_of_model(self.model, hook), "variables of the model")

    def agree_on_begin(self) -> None:
        """Begin on all instances with the epoch and the state of the chief. Collective."""
        replicas = self.strategy.replicas
        epoch = number_of_leader(replicas, self.model._initial_epoch or 0, "first epoch")
        begin_with_epoch(self.model, epoch)
        self.resume()
        if self.is_alone or self.watch is None:
            return
        arrays = self.watch.arrays()
        if not compared(replicas, False, bits_of(arrays), "variables of the model")[1]:
            self.watch.assign(broadcast(replicas, arrays))
        self.watch.begin()


class _OfStrategy(keras.callbacks.LambdaCallback):
    """A callback of the strategy, before or after those of the user."""


def _first(running: Running, unites_batches: bool) -> _OfStrategy:
    """Return the callback before all others. With `unites_batches` these get the whole state after each batch too."""

    def unite(number: int, logs: Logs | None = None) -> None:
        running.unite()

    return _OfStrategy(
        on_epoch_begin=lambda epoch, logs=None: running.begin_epoch(epoch),
        on_epoch_end=unite,
        on_train_batch_end=unite if unites_batches else None,
    )


def _teller(running: Running) -> _OfStrategy:
    """Return a callback that hands logs to sinks of metrics: of each epoch, and of an evaluation outside `fit`."""

    def tell(prefix: str, logs: Logs | None) -> None:
        values = {f"{prefix}{name}": value for name, value in (logs or {}).items()}
        for each in running.strategy.replicas.sinks:
            each.log_scalars(values, running.steps_made())

    if running.watch is None:
        return _OfStrategy(on_test_end=lambda logs=None: tell(EVALUATION, logs))
    return _OfStrategy(on_epoch_end=lambda epoch, logs=None: tell(EPOCH, logs))


def _last(running: Running, looks_at_batches: bool) -> _OfStrategy:
    """Return the callback after all others. With `looks_at_batches` instances agree after each batch too."""

    def agree(hook: str) -> Callable[..., None]:
        return lambda number, logs=None: running.agree(hook)

    hooks = ["on_epoch_begin", "on_epoch_end"] + ["on_train_batch_end"] * looks_at_batches
    return _OfStrategy(
        on_train_begin=lambda logs=None: running.agree_on_begin(), **{hook: agree(hook) for hook in hooks}
    )


def listed(callbacks: Callbacks, running: Running, **settings: object) -> CallbackList:
    """Return Keras's list of callbacks, each placed on the instances that must call it.

    Args:
        callbacks: Callbacks from the user, or a list of Keras.
        running: The loop.
        settings: Settings of a new list, as Keras takes them.

    Raises:
        StrategyError: If a callback needs a library that is not installed, or already writes on every instance.
    """
    is_new = not isinstance(callbacks, CallbackList)
    boards = [each for each in given_to(callbacks) if isinstance(each, keras.callbacks.TensorBoard)]
    _refuse_boards(boards, is_told_everywhere=not is_new and running.strategy.num_instances > 1)
    has_bar = settings.get("verbose") != 0
    prepared: CallbackList = CallbackList(callbacks, add_progbar=has_bar, **settings) if is_new else callbacks
    own = [each for each in prepared.callbacks if not isinstance(each, _OfStrategy)]
    looks = any(map(_has_batch_hooks, own))
    writes, _ = compared(running.strategy.replicas, any(map(_writes_in_epochs, own)), b"", "files within an epoch")
    if looks or writes:  # hooks make collective calls then, and Keras may call hooks in other threads
        call_in_one_thread(prepared)
    first, last = _first(running, looks or writes), _last(running, looks)
    told = [_teller(running)] if running.strategy.replicas.sinks else []
    prepared.callbacks = [first, *told, *(_placed(each, running.strategy) for each in own), last]
    if is_new:  # only after placing them: some write as soon as they get the model
        prepared.set_model(running.model)
        pass_over_batches(prepared)
    return prepared


def described(callbacks: Callbacks) -> list[str]:
    """Describe the callbacks that all instances must have: their classes, and the hooks of a `LambdaCallback`."""
    alone = (*WRITERS, OnChief, keras.callbacks.BackupAndRestore, keras.callbacks.ModelCheckpoint)
    given = [each for each in given_to(callbacks) if not isinstance(each, (*alone, keras.callbacks.History, NoneType))]
    hooks = [sorted(name for name in each.__dict__ if name in _HOOKS) for each in given]
    return [f"{type(each).__qualname__}({', '.join(names)})" for each, names in zip(given, hooks, strict=True)]


def _refuse_boards(boards: Sequence[Callback], is_told_everywhere: bool) -> None:
    """Refuse a `TensorBoard` that a `CallbackList` has started on every instance, or that lacks TensorFlow.

    Without TensorFlow all instances refuse at once, rather than the chief when it begins to write.
    """
    if is_told_everywhere and any(each.model is not None for each in boards):
        raise StrategyError(
            "the given CallbackList has a keras.callbacks.TensorBoard that already knows the model and writes on "
            "every instance; give fit a plain list of callbacks, so that only the chief writes"
        )

    if boards and find_spec("tensorflow") is None:
        raise StrategyError(
            "keras.callbacks.TensorBoard writes with TensorFlow, which is not installed; pip install tensorflow, or "
            "leave it out and use poprun --metrics tensorboard:FOLDER, which needs only tensorboard"
        )


def _placed(callback: Callback, strategy: Strategy) -> Callback:
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        return OnChief(with_whole_backups(callback), strategy)
    if isinstance(callback, WRITERS):
        return OnChief(callback, strategy)
    if isinstance(callback, keras.callbacks.ModelCheckpoint) and not strategy.replicas.is_chief:
        callback.verbose = 0  # called everywhere, so that all know the best value; only the chief writes
    return callback


def _has_batch_hooks(callback: Callback) -> bool:
    """Return whether a callback from the user has hooks for batches."""
    if isinstance(callback, keras.callbacks.LambdaCallback):
        return any(name in callback.__dict__ for name in _BATCH_HOOKS)
    stock = type(callback) in vars(keras.callbacks).values() or isinstance(callback, OnChief)
    return not stock and any(
        getattr(type(callback), name) is not getattr(keras.callbacks.Callback, name) for name in _BATCH_HOOKS
    )


def _writes_in_epochs(callback: Callback) -> bool:
    """Return whether a stock callback writes the model's state within an epoch."""
    stock = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)
    return isinstance(callback, stock) and callback.save_freq not in ("epoch", False)
