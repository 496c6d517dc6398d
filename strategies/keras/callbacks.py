"""Placement of callbacks, and the agreement of instances on the changes that they make between steps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, partialmethod
from importlib.util import find_spec
from types import NoneType
from typing import Any, TypeAlias, TypeVar

import jax
import keras
import numpy as np
from keras import tree
from keras.callbacks import CallbackList, CSVLogger, ProgbarLogger, RemoteMonitor, TensorBoard
from typing_extensions import override

from strategies.core.agreement import Terms, insist_on_agreement
from strategies.core.journal import Recorded
from strategies.core.metrics import EVALUATION
from strategies.core.survival import collectively
from strategies.errors import DisagreementError, StrategyError
from strategies.jax.comparing.agreement import digest_of, fingerprint
from strategies.jax.replicas.replicas import Replicas
from strategies.keras.checkpointing import given_to, with_whole_backups
from strategies.keras.checks import check_not_recompiled
from strategies.keras.patches import begin_with_epoch, call_in_one_thread, pass_over_batches
from strategies.keras.state import Array, Callbacks, Logs, State, Values
from strategies.placeholders import packed, unpacked
from strategies.strategy import Strategy, get_strategy
from strategies.typing import Batch, Tree

_WAY_OUT = (
    "; give all instances the same program, arguments and callbacks, or wrap a callback that only writes in "
    "strategies.keras.OnChief"
)
_FEW = 4  # variables of at most so many elements are shown in messages
_OWN = ("name", "learning_rate")  # names differ between processes; the rate is broadcast from instance 0

T = TypeVar("T")


def broadcast(replicas: Replicas, tree: T) -> T:
    """Return instance 0's tree on every instance, placed as a step needs it. Collective."""
    recorded = Recorded[T]("broadcast", packed, lambda received: unpacked(received, replicas.wait_for_values))
    return collectively(replicas, lambda: replicas.broadcast(tree), replicas.broadcast, lambda: tree, recorded)


def number_of_leader(replicas: Replicas, number: int, name: str) -> int:
    """Return instance 0's number on every instance. Collective; `name` names the call in messages."""
    return _agreed(replicas, lambda: _broadcast_number(replicas, number, 0, name), name)


def compared(replicas: Replicas, flag: bool, digest: bytes, name: str) -> tuple[bool, bool]:
    """Return whether a flag is set on any instance, and whether all instances have the same digest. Collective.

    Args:
        replicas: The replicas of all instances.
        flag: Flag of this instance.
        digest: Digest of this instance, of the same length on all instances.
        name: Name of the call, for messages.
    """

    def asked() -> int:
        mine = np.frombuffer(bytes([flag]) + digest, np.uint8)
        of_all = replicas.communicator.all_gather(mine, name=name)
        return int(of_all[:, 0].any()) + 2 * int((of_all[:, 1:] == of_all[0, 1:]).all())

    answer = _agreed(replicas, asked, name)
    return bool(answer & 1), bool(answer & 2)


def insist(replicas: Replicas, terms: Terms, name: str) -> None:
    """Refuse terms that differ between instances. Collective.

    Args:
        replicas: The replicas of all instances.
        terms: Terms of this instance.
        name: Name of the call, for messages.

    Raises:
        DisagreementError: On all instances, if the terms differ.
    """

    def asked() -> int:
        insist_on_agreement(replicas, terms, name, _WAY_OUT)
        return 1

    _agreed(replicas, asked, name)


def bits_of(tree: Tree) -> bytes:
    """Return a digest of arrays."""
    return np.array(digest_of(list(map(np.asarray, jax.tree.leaves(tree)))), np.uint64).tobytes()


def check_same_rows(replicas: Replicas, rows: Batch) -> None:
    """Refuse data whose rows differ between instances. Collective.

    Raises:
        DisagreementError: On all instances, if the rows differ.
    """
    if not compared(replicas, False, bytes.fromhex(fingerprint(rows)), "rows of the data")[1]:
        raise DisagreementError(
            "the instances were given different rows or weights of rows. Each instance reads all data, or the batches "
            "of its replicas, so give all of them the same data; if something shuffles, call "
            "keras.utils.set_random_seed first"
        )


def _agreed(replicas: Replicas, ask: Callable[[], int], name: str) -> int:
    """Return the number that a collective call returns on all instances; repeat the call if instances are lost."""
    recorded = Recorded[int](name, lambda number: partial(int, number), int)
    return collectively(
        replicas, ask, lambda number, root: _broadcast_number(replicas, number, root, name), lambda: 0, recorded
    )


def _broadcast_number(replicas: Replicas, number: int, root: int, name: str) -> int:
    """Return the number of instance `root` on all instances. Collective."""
    array = np.array(number, np.int64)
    replicas.communicator.broadcast(array, root, name=name)
    return int(array)


class VariableWatch:
    """A watcher of changes of a model's variables between steps.

    Arrays of JAX never change, so the same object has the same value.

    Args:
        model: Model of Keras.

    Attributes:
        is_changed: Whether the present step began with other arrays than those that the last step left, or that all
            instances agreed on.
    """

    def __init__(self, model: keras.Model) -> None:
        self.is_changed = True
        self._model = model
        self._left: list[Array] = []
        self._changes = hashlib.blake2b(digest_size=16)  # digest of changes since the last call of `taken`

    def before_step(self, state: State) -> None:
        """Note the changes in the state with which a step begins."""
        self.is_changed = self._note(_arrays(state))

    def after_step(self, state: State) -> None:
        """Remember the state that a step has left."""
        self._left = _arrays(state)

    def begin(self) -> None:
        """Take the present variables of the model as unchanged."""
        self._left = self.arrays()
        self._changes = hashlib.blake2b(digest_size=16)

    def taken(self, with_flags: bool) -> bytes:
        """Return a digest of the variables that were changed since the last call.

        Args:
            with_flags: Whether to include the flags `trainable`, which takes longer.
        """
        if self._model._jax_state_synced:  # else Keras's loop holds the state, and no code can change it
            self._note(self.arrays())
        if with_flags:
            self._changes.update(bytes(variable.trainable for variable in self._model.variables))
        changes, self._changes = self._changes, hashlib.blake2b(digest_size=16)
        return changes.digest()

    def arrays(self) -> list[Array]:
        """Return the values of all variables but those of metrics, as Keras knows them."""
        return [variable.value for variable in _variables(self._model)]

    def assign(self, values: Values) -> None:
        """Assign values to the variables, in the order of `arrays`."""
        for variable, value in zip(_variables(self._model), values, strict=True):
            variable.assign(value)

    def _note(self, arrays: list[Array]) -> bool:
        """Note the arrays that differ from those of the last step; return whether any does."""
        pairs = enumerate(zip(arrays, self._left, strict=False))
        changed = [place for place, (new, old) in pairs if not _is_same(new, old)]
        for place in changed:
            self._changes.update(str((place, digest_of(arrays[place]))).encode())
        is_changed = bool(changed) or len(arrays) != len(self._left)
        self._left = arrays
        return is_changed


def _variables(model: keras.Model) -> list[keras.Variable]:
    return [*model.trainable_variables, *model.non_trainable_variables, *model.optimizer.variables]


def _is_same(one: Array, other: Array) -> bool:
    if one is other:
        return True
    is_scalar = np.ndim(one) == 0 == np.ndim(other)  # Keras copies scalars
    return is_scalar and np.asarray(one).tobytes() == np.asarray(other).tobytes()


def _arrays(state: State) -> list[Array]:
    return [array for part in state[:-1] for array in part]  # without metrics: these begin anew in each epoch


def terms_of_call(model: keras.Model, called: str, callbacks: Sequence[str], arguments: Mapping[str, object]) -> Terms:
    """Return the terms on which all instances must call a function of Keras.

    Args:
        model: Model of Keras.
        called: Name of the function.
        callbacks: Descriptions of the given callbacks.
        arguments: Other arguments by name.
    """
    given = {name: _text(value) for name, value in arguments.items()}
    listed = {"the list of callbacks": f"[{', '.join(callbacks)}]"}
    functions = (model.train_function, model.test_function, model.predict_function)
    anew = ", ".join(str(function is None) for function in functions)
    compiled = {"compile, or new options, since the last call (to train, evaluate, predict)": anew}
    return [{"a call of": called}, listed, given, _of_optimizer(model), _flags(model), compiled]


def terms_of_model(model: keras.Model, hook: str) -> Terms:
    """Return the terms that must be equal on all instances after a hook of callbacks: flags and all variables."""
    rates = {f"{each.name} after {hook},": _value(each.value) for each in model.optimizer.variables if not each.shape}
    pairs = enumerate(_variables(model))
    values = {f"{variable.name} ({number}) after {hook},": _value(variable.value) for number, variable in pairs}
    # A difference in rates causes differences in other variables, so rates come earlier.
    return [_flags(model), rates, values]


def _flags(model: keras.Model) -> dict[str, str]:
    pairs = enumerate(model.variables)
    return {f"trainable of variable {number} ({each.name})": str(each.trainable) for number, each in pairs}


def _of_optimizer(model: keras.Model) -> dict[str, str]:
    if getattr(model, "optimizer", None) is None:  # a model that is not compiled has none
        return {"optimizer": "None"}
    values = tree.flatten_with_path(model.optimizer.get_config())
    settings = {" ".join(map(str, ("optimizer", *path))): _text(one) for path, one in values if path[-1] not in _OWN}
    return {"optimizer": type(model.optimizer).__name__} | settings


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, default=lambda other: type(other).__name__, skipkeys=True)


def _value(array: Array) -> str:
    values = np.asarray(array)
    return str(values.tolist()) if values.size <= _FEW else f"{values.shape} {digest_of(values)[0]:016x}"


# ---- callbacks

WRITERS: tuple[type, ...] = (ProgbarLogger, CSVLogger, RemoteMonitor, TensorBoard)
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
    def set_model(self, model: keras.Model) -> None:
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
        if "on_train_begin" in missed and isinstance(self.callback, CSVLogger):
            self.callback.append = True  # the lost chief wrote the earlier lines
        for call in missed.values():
            call()


for _name in _HOOKS:
    setattr(OnChief, _name, partialmethod(OnChief._call, _name))


@dataclass(frozen=True)
class RunningLoop:
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

    model: keras.Model
    strategy: Strategy
    begin_epoch: Callable[[int], object] = lambda epoch: None
    unite: Callable[[], object] = lambda: None
    resume: Callable[[], object] = lambda: None
    steps_made: Callable[[], int] = lambda: 0
    watch: VariableWatch | None = None

    def agree(self, hook: str) -> None:
        """Stop all instances if a callback stops one, after a hook of all callbacks. Collective.

        Raises:
            DisagreementError: On all instances, if callbacks have made different changes on them.
        """
        if self.strategy.replicas.communicator.size > 1 and self.watch is not None:
            digest = self.watch.taken(with_flags="epoch" in hook)
            replicas, stops = self.strategy.replicas, bool(self.model.stop_training)
            self.model.stop_training, is_same = compared(replicas, stops, digest, f"changes by callbacks in {hook}")
            if not is_same:
                self.model.jax_state_sync()
                insist(replicas, terms_of_model(self.model, hook), "variables of the model")
        check_not_recompiled(self.model, hook)

    def agree_on_begin(self) -> None:
        """Begin on all instances with the epoch and the state of the chief. Collective."""
        replicas, begun = self.strategy.replicas, self.model._initial_epoch or 0
        begin_with_epoch(self.model, number_of_leader(replicas, begun, "first epoch"))
        self.resume()
        if self.strategy.replicas.communicator.size == 1 or self.watch is None:
            return
        arrays = self.watch.arrays()
        if not compared(replicas, False, bits_of(arrays), "variables of the model")[1]:
            self.watch.assign(broadcast(replicas, arrays))
        self.watch.begin()


class _OfStrategy(keras.callbacks.LambdaCallback):
    """A callback of the strategy, before or after those of the user."""


def _first(running: RunningLoop, unites_batches: bool) -> _OfStrategy:
    """Return the callback before all others. With `unites_batches` these get the whole state after each batch too."""

    def unite(*arguments: object, **named: object) -> None:
        running.unite()

    return _OfStrategy(
        on_epoch_begin=lambda epoch, logs=None: running.begin_epoch(epoch),
        on_epoch_end=unite,
        on_test_begin=unite,
        on_train_batch_end=unite if unites_batches else None,
    )


def _reporter(running: RunningLoop) -> _OfStrategy:
    """Return a callback that hands logs to sinks of metrics: of each epoch, and of an evaluation outside `fit`."""

    def report(prefix: str, logs: Logs | None) -> None:
        values = {f"{prefix}{name}": value for name, value in (logs or {}).items()}
        for each in running.strategy.replicas.sinks:
            each.log_scalars(values, running.steps_made())

    if running.watch is None:
        return _OfStrategy(on_test_end=lambda logs=None: report(EVALUATION, logs))
    return _OfStrategy(on_epoch_end=lambda epoch, logs=None: report(EPOCH, logs))


def _last(running: RunningLoop, looks_at_batches: bool) -> _OfStrategy:
    """Return the callback after all others. With `looks_at_batches` instances agree after each batch too."""

    def agree(hook: str) -> Callable[..., None]:
        return lambda number, logs=None: running.agree(hook)

    hooks = ["on_epoch_begin", "on_epoch_end"] + ["on_train_batch_end"] * looks_at_batches
    return _OfStrategy(
        on_train_begin=lambda logs=None: running.agree_on_begin(), **{hook: agree(hook) for hook in hooks}
    )


def listed(callbacks: Callbacks, running: RunningLoop, **settings: object) -> CallbackList:
    """Return Keras's list of callbacks, each placed on the instances that must call it.

    Args:
        callbacks: Callbacks from the user, or a list of Keras.
        running: The loop.
        settings: Settings of a new list, as Keras takes them.

    Raises:
        StrategyError: If a callback needs a library that is not installed, or already writes on every instance.
    """
    is_new = not isinstance(callbacks, CallbackList)
    boards = [each for each in given_to(callbacks) if isinstance(each, TensorBoard)]
    _check_tensorboards(boards, is_set_everywhere=not is_new and running.strategy.num_instances > 1)
    has_bar = settings.get("verbose") != 0
    prepared: CallbackList = CallbackList(callbacks, add_progbar=has_bar, **settings) if is_new else callbacks
    own = [each for each in prepared.callbacks if not isinstance(each, _OfStrategy)]
    looks = any(map(_has_batch_hooks, own))
    writes, _ = compared(running.strategy.replicas, any(map(_writes_in_epochs, own)), b"", "files within an epoch")
    if looks or writes:  # hooks make collective calls then, and Keras may call hooks in other threads
        call_in_one_thread(prepared)
    first, last = _first(running, looks or writes), _last(running, looks)
    reporters = [_reporter(running)] if running.strategy.replicas.sinks else []
    prepared.callbacks = [first, *reporters, *(_placed(each, running.strategy) for each in own), last]
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


def _check_tensorboards(boards: Sequence[Callback], is_set_everywhere: bool) -> None:
    """Refuse a `TensorBoard` that a `CallbackList` has started on every instance, or that lacks TensorFlow.

    Without TensorFlow all instances refuse at once, rather than the chief when it begins to write.
    """
    if is_set_everywhere and any(each.model is not None for each in boards):
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
