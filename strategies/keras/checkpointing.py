"""Checkpoints under `fit`: the strategy's own after any step, and complete backups for Keras's `BackupAndRestore`.

The strategy's checkpoints can be restored on any number of instances. A backup has weights, epoch and random states of
one moment:

| name in `backup_dir` | content |
|---|---|
| backup_00000003/ | a complete backup, the third one |
| backup_00000003/latest.weights.h5 | the weights and the state of the optimizer, written by Keras |
| backup_00000003/training.json | the epoch, and the states of seed generators |
| backup_00000003/SHA256SUMS | the digests of both files |
| backup_00000004.incomplete/ | a backup that is being written, or whose writer died |
| backup_00000003.damaged/ | a backup whose files have changed since they were written |
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import keras
from keras import tree

import strategies.checkpoints.checkpoints as saved
from strategies.checkpoints.sealed_folders import (
    DAMAGED,
    INCOMPLETE,
    REMOVED,
    TRAINING,
    clear,
    fault_of,
    put,
    seal,
    sibling,
)
from strategies.errors import StrategyError
from strategies.keras.data import KerasFeed
from strategies.keras.patches import begin_with_epoch, give_methods
from strategies.keras.state import Callbacks, random_states, set_random_states
from strategies.values import TrainState

KEPT = 2
"""The number of backups to keep. If the newest is damaged, the one before is used."""
_WEIGHTS = "latest.weights.h5"
_COMPLETE = re.compile(r"backup_(\d{8,})")

logger = logging.getLogger("strategies.keras")


class FitCheckpoints(keras.callbacks.Callback):
    """A callback that saves the training of `fit` with `strategies.Checkpoints`, and resumes it from the newest one.

    Its public name is `strategies.keras.Checkpoints`.

    It saves all variables (of the model, the optimizer, metrics and seed generators), and the position in the data. A
    resumed epoch does not repeat earlier steps, but callbacks still see them. The last step is saved too. After a
    signal to leave (SIGTERM, SIGUSR1, Ctrl-C) all instances save after the same step, and leave.

    Example::

        model.fit(x, y, epochs=10, callbacks=[strategies.keras.Checkpoints("digits.checkpoints", every=100)])

    Args:
        directory: Folder on instance 0, one for each training.
        every: Number of steps between checkpoints.
        keep: Number of newest checkpoints to keep.
        grace_s: Seconds that poprun waits for the last checkpoint after SIGTERM or SIGINT.
        seed: Seed of the shuffle in `fit`. Without this callback NumPy draws the seed, which a resumed job would not
            know.

    Attributes:
        open: Function of a trainer and a data set that opens the checkpoints of a training.
    """

    def __init__(
        self, directory: str | Path, *, every: int = 1, keep: int = 3, grace_s: float = 30.0, seed: int = 0
    ) -> None:
        super().__init__()
        self.seed = seed
        self.open = partial(saved.Checkpoints, directory, every=every, keep=keep, grace_s=grace_s)


def given_to(callbacks: Callbacks) -> list[keras.callbacks.Callback]:
    """Return the user's callbacks as a flat list, from one callback, a nested list, or Keras's `CallbackList`."""
    return list(tree.flatten(getattr(callbacks, "callbacks", callbacks)))


def given_in(callbacks: Callbacks) -> FitCheckpoints | None:
    """Return the `FitCheckpoints` among the user's callbacks; None without one.

    Raises:
        ValueError: If there are several.
    """
    found = [one for one in given_to(callbacks) if isinstance(one, FitCheckpoints)]
    if len(found) > 1:
        raise ValueError(f"there are {len(found)} callbacks strategies.keras.Checkpoints; give fit one of them")
    return found[0] if found else None


class SavedFit:
    """The checkpoints of a running `fit`, with the position of its data set.

    Args:
        opened: Checkpoints.
        feed: Feed of the data set.

    Attributes:
        first_epoch: Epoch with which `fit` begins.
        skipped: Number of steps of this epoch that were made earlier.
    """

    def __init__(self, opened: saved.Checkpoints, feed: KerasFeed) -> None:
        self.skipped = 0
        self.first_epoch = 0
        self._opened = opened
        self._feed = feed
        self._last: TrainState | None = None

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Enter the `strategies.Checkpoints` for the block, and save its last step, but not after an error."""
        with self._opened:
            yield
            if self._last is not None:
                self._opened.save(self._last)

    def restored(self, state: TrainState) -> TrainState:
        """Return the state of the newest checkpoint; `state` itself without one. Collective."""
        found = self._opened.restore(state)
        position = self._feed.dataset.position()
        self.first_epoch, self.skipped = position.epoch, position.step
        return found

    def skip(self, steps: int) -> int:
        """Return the number of the next `steps` that were made earlier.

        The last execution of an epoch may have fewer steps. If it was made earlier, the result is `steps` all the same.
        """
        skipped = min(self.skipped, steps)
        self.skipped -= skipped
        is_at_end = not self.skipped and self._feed.dataset.position().step == self._feed.num_batches
        return steps if skipped and is_at_end else skipped

    def after_step(self, state: TrainState) -> None:
        """Save if a checkpoint is due; raise `SystemExit` if a signal has asked the job to end."""
        self._last = state
        self._opened.after_step(state)


def with_whole_backups(callback: keras.callbacks.BackupAndRestore) -> keras.callbacks.BackupAndRestore:
    """Return a callback of Keras that saves complete backups, whenever Keras decides to save.

    Args:
        callback: Callback of Keras, which is changed.

    Raises:
        StrategyError: If its folder is not a local folder.
    """
    if "://" in str(callback.backup_dir):
        raise StrategyError(
            f"BackupAndRestore is to write to {callback.backup_dir}, but backups are folders that are renamed when "
            "they are complete; use a local folder, or one of a file system that all hosts share"
        )
    backups = _WholeBackups(callback)
    give_methods(callback, {"_save_model": backups.save, "_load_model": backups.load})
    if callback.save_freq != "epoch" and callback.save_freq:
        logger.warning(
            "BackupAndRestore has save_freq=%d: a resumed training repeats the epoch with weights from the middle of "
            "it, as Keras does; strategies.keras.Checkpoints(every=%d) resumes after the step",
            callback.save_freq,
            callback.save_freq,
        )
    return callback


class _WholeBackups:
    """The backups of a callback.

    Args:
        callback: Callback that knows the model and the folder.
    """

    def __init__(self, callback: keras.callbacks.BackupAndRestore) -> None:
        self._callback = callback
        self._folder = Path(callback.backup_dir)

    @property
    def _numbers(self) -> list[int]:
        """The numbers of the complete backups, ascending."""
        names = [entry.name for entry in self._folder.iterdir()] if self._folder.is_dir() else []
        return sorted(int(found[1]) for name in names if (found := _COMPLETE.fullmatch(name)))

    def _of(self, number: int) -> Path:
        return self._folder / f"backup_{number:08d}"

    def save(self) -> None:
        """Write a backup. If the process is killed meanwhile, earlier backups stay as they are."""
        model, number = self._callback.model, 1 + max(self._numbers, default=0)
        incomplete = sibling(self._of(number), INCOMPLETE)
        clear(incomplete)
        incomplete.mkdir(parents=True)
        model.save_weights(incomplete / _WEIGHTS)
        epoch = {"epoch": self._callback._current_epoch, "batch": self._callback._last_batch_seen}
        (incomplete / TRAINING).write_text(json.dumps(epoch | {"random_states": random_states(model)}))
        seal(incomplete)
        put(incomplete, self._of(number))
        for old in self._numbers[:-KEPT]:
            clear(self._of(old).rename(sibling(self._of(old), REMOVED)))

    def load(self) -> None:
        """Restore the newest intact backup; without one the training begins anew."""
        for suffix in (INCOMPLETE, REMOVED):
            for path in self._folder.glob(f"backup_*{suffix}"):
                clear(path)
        found = self._newest()
        if found is None and (self._folder / _WEIGHTS).exists():
            raise StrategyError(
                f"{self._folder} has a backup that Keras wrote outside of a strategy. Its files may be of two epochs, "
                "and lack the states of seed generators; end that training outside of a scope, or use another folder"
            )
        if found is None:
            return
        model, training = self._callback.model, json.loads((found / TRAINING).read_text())
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        model.load_weights(found / _WEIGHTS)
        if not set_random_states(model, training["random_states"]):
            raise StrategyError(
                f"{found} was written by a model with {len(training['random_states'])} seed generators, but model "
                f"{model.name!r} has another number of them; use another folder for another model"
            )
        begin_with_epoch(model, training["epoch"])

    def _newest(self) -> Path | None:
        """Return the newest intact backup; rename damaged newer ones, with a warning."""
        for number in reversed(self._numbers):
            path = self._of(number)
            fault = fault_of(path)
            if not fault:
                return path
            aside = sibling(path, DAMAGED)
            clear(aside)
            path.rename(aside)
            logger.warning("backup %s is damaged (%s) and was renamed to %s; using the one before", path, fault, aside)
        if list(self._folder.glob(f"backup_*{DAMAGED}")):
            logger.warning("no backup in %s is intact; the training begins anew", self._folder)
        return None
