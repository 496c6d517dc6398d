"""The places of callbacks: those that write run on the chief, others on every instance, which then agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, partialmethod
from importlib.util import find_spec
from types import NoneType
from typing import Any, TypeAlias

import keras
from keras.callbacks import CallbackList

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
from strategies.keras.patches import begin_with_epoch, call_in_one_thread
from strategies.keras.protocols import Callbacks, Logs, ModelLike
from strategies.keras.refusals import refuse_compiled
from strategies.strategy import Strategy, get_strategy

WRITERS: tuple[type, ...] = (
    keras.callbacks.ProgbarLogger,
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
"""The callbacks that write, and tell the other instances nothing but what the model becomes."""

Callback: TypeAlias = Any
"""A callback of Keras, or None."""

EPOCH = "epoch/"
"""In front of the names of Keras's logs at the end of an epoch, in sinks of metrics."""
_BATCH_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
_HOOKS = [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]
_ENDINGS = {f"on_{loop}_end": f"on_{loop}_begin" for loop in ("train", "test", "predict")}
_BEGINNINGS = ("set_model", *_ENDINGS.values())


class OnChief(keras.callbacks.Callback):
    """A callback that is called on the instance that is the chief at the time, and on no other.

    One that becomes the chief in the midst of a loop is told first how that began: there may be files to open.

    Args:
        callback: the callback of Keras to call on the chief only.
        strategy: knows the chief; None for the current one.
    """

    def __init__(self, callback: Callback, strategy: Strategy | None = None) -> None:
        super().__init__()
        self.callback = callback
        self._strategy = strategy or get_strategy()
        self._missed: dict[str, Callable[[], object]] = {}  # what has begun on another instance, and not ended

    def set_params(self, params: Mapping[str, object]) -> None:
        """See Keras."""
        self.callback.set_params(params)

    def set_model(self, model: ModelLike) -> None:
        """See Keras. A `TensorBoard` writes then already."""
        self._call("set_model", model)

    @property
    def is_called(self) -> bool:
        """Whether this is the chief."""
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
            self.callback.append = True  # the chief that is lost has written the lines before
        for call in missed.values():
            call()


for _name in _HOOKS:
    setattr(OnChief, _name, partialmethod(OnChief._call, _name))


@dataclass(frozen=True)
class Running:
    """A loop of Keras's, while it runs on all instances.

    Attributes:
        model: of Keras.
        strategy: connects the instances.
        begin_epoch: called with the number of each epoch that begins.
        unite: has Keras know the whole state; a collective call.
        resume: called when a training has begun.
        steps_made: says how many steps were made.
        watch: notices what callbacks change; None where nothing is trained.
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
        """Whether there is no other instance."""
        return self.strategy.replicas.communicator.size == 1

    def agree(self, hook: str) -> None:
        """Stop everywhere where a callback stops one instance, behind a hook of all callbacks; a collective call.

        Raises:
            DisagreementError: on all instances, if callbacks have changed something else on some of them.
        """
        refuse_compiled(self.model, hook)
        if self.is_alone or self.watch is None:
            return
        digest = self.watch.taken(with_flags="epoch" in hook)
        replicas, stops = self.strategy.replicas, bool(self.model.stop_training)
        self.model.stop_training, is_same = compared(replicas, stops, digest, f"what callbacks have done {hook}")
        if not is_same:
            self.model.jax_state_sync()
            insist(replicas, terms_of_model(self.model, hook), "variables of the model")

    def agree_on_begin(self) -> None:
        """Begin everywhere with the epoch and the state with which the chief begins; a collective call."""
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
    """A callback of a strategy, before or behind those of the user."""


def _first(running: Running, unites_batches: bool) -> _OfStrategy:
    """Return the callback before all others; `unites_batches` if these need the whole state within an epoch."""

    def unite(number: int, logs: Logs | None = None) -> None:
        running.unite()

    return _OfStrategy(
        on_epoch_begin=lambda epoch, logs=None: running.begin_epoch(epoch),
        on_epoch_end=unite,
        on_train_batch_end=unite if unites_batches else None,
    )


def _teller(running: Running) -> _OfStrategy:
    """Return a callback that tells sinks of metrics the logs of each epoch, and of an evaluation outside of `fit`."""

    def tell(prefix: str, logs: Logs | None) -> None:
        values = {f"{prefix}{name}": value for name, value in (logs or {}).items()}
        for each in running.strategy.replicas.sinks:
            each.log_scalars(values, running.steps_made())

    if running.watch is None:
        return _OfStrategy(on_test_end=lambda logs=None: tell(EVALUATION, logs))
    return _OfStrategy(on_epoch_end=lambda epoch, logs=None: tell(EPOCH, logs))


def _last(running: Running, looks_at_batches: bool) -> _OfStrategy:
    """Return the callback behind all others; `looks_at_batches` if these may change something within an epoch."""

    def agree(hook: str) -> Callable[..., None]:
        return lambda number, logs=None: running.agree(hook)

    hooks = ["on_epoch_begin", "on_epoch_end"] + ["on_train_batch_end"] * looks_at_batches
    return _OfStrategy(
        on_train_begin=lambda logs=None: running.agree_on_begin(), **{hook: agree(hook) for hook in hooks}
    )


def listed(callbacks: Callbacks, running: Running, **settings: object) -> CallbackList:
    """Return Keras's list of callbacks, each of which is called where it has to be.

    Args:
        callbacks: what the user gave, or a list of Keras's.
        running: the loop.
        settings: of a new list; see Keras.

    Raises:
        StrategyError: if one needs a library that is not there, or a list of Keras's has had it write everywhere.
    """
    is_new = not isinstance(callbacks, CallbackList)
    boards = [each for each in given_to(callbacks) if isinstance(each, keras.callbacks.TensorBoard)]
    _refuse_boards(boards, is_told_everywhere=not is_new and running.strategy.num_instances > 1)
    has_bar = settings.get("verbose") != 0
    prepared: CallbackList = CallbackList(callbacks, add_progbar=has_bar, **settings) if is_new else callbacks
    own = [each for each in prepared.callbacks if not isinstance(each, _OfStrategy)]
    looks = any(map(_has_batch_hooks, own))
    writes, _ = compared(running.strategy.replicas, any(map(_writes_in_epochs, own)), b"", "files within an epoch")
    if looks or writes:  # instances meet in hooks then, which Keras may call in other threads
        call_in_one_thread(prepared)
    first, last = _first(running, looks or writes), _last(running, looks)
    told = [_teller(running)] if running.strategy.replicas.sinks else []
    prepared.callbacks = [first, *told, *(_placed(each, running.strategy) for each in own), last]
    if is_new:  # only when they are placed: some write when they are told of the model
        prepared.set_model(running.model)
    return prepared


def described(callbacks: Callbacks) -> list[str]:
    """Describe the callbacks that all instances must have: their classes, and the hooks of a `LambdaCallback`."""
    alone = (*WRITERS, OnChief, keras.callbacks.BackupAndRestore, keras.callbacks.ModelCheckpoint)
    given = [each for each in given_to(callbacks) if not isinstance(each, (*alone, keras.callbacks.History, NoneType))]
    hooks = [sorted(name for name in each.__dict__ if name in _HOOKS) for each in given]
    return [f"{type(each).__qualname__}({', '.join(names)})" for each, names in zip(given, hooks, strict=True)]


def _refuse_boards(boards: Sequence[Callback], is_told_everywhere: bool) -> None:
    """Refuse a `TensorBoard` that a list of the user's had write on every instance, and one without TensorFlow.

    The latter is refused on all instances, not when the chief begins to write.
    """
    if is_told_everywhere and any(each.model is not None for each in boards):
        raise StrategyError(
            "a CallbackList was given whose keras.callbacks.TensorBoard knows the model, and so has begun to write on "
            "every instance; give fit a plain list of callbacks, of which the chief alone writes"
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
        callback.verbose = 0  # it is called everywhere, so that all know the best value, and the chief writes
    return callback


def _has_batch_hooks(callback: Callback) -> bool:
    """Return whether a callback of the user's is told of batches."""
    if isinstance(callback, keras.callbacks.LambdaCallback):
        return any(name in callback.__dict__ for name in _BATCH_HOOKS)
    stock = type(callback) in vars(keras.callbacks).values() or isinstance(callback, OnChief)
    return not stock and any(
        getattr(type(callback), name) is not getattr(keras.callbacks.Callback, name) for name in _BATCH_HOOKS
    )


def _writes_in_epochs(callback: Callback) -> bool:
    """Return whether a stock callback writes the model's state in the midst of an epoch."""
    stock = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)
    return isinstance(callback, stock) and callback.save_freq not in ("epoch", False)
