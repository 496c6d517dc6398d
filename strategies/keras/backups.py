"""Keras's `BackupAndRestore` with whole backups: weights, epoch and random states of one moment.

| name in `backup_dir` | content |
|---|---|
| backup_00000003/ | a complete backup, the third one |
| backup_00000003/latest.weights.h5 | the weights and the state of the optimizer, written by Keras |
| backup_00000003/training.json | the epoch, and the states of seed generators |
| backup_00000003/SHA256SUMS | of both |
| backup_00000004.incomplete/ | one that is being written, or whose writer was ended |
| backup_00000003.damaged/ | one whose files are not those that were written |
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any, TypeAlias

from strategies.checkpoints.sealed_folders import (
    DAMAGED,
    INCOMPLETE,
    REMOVED,
    TRAINING,
    beside,
    clear,
    fault_of,
    put,
    seal,
)
from strategies.errors import StrategyError
from strategies.keras.state import random_states, set_random_states

KEPT = 2
"""Number of backups that are kept. If the newest is damaged, the one before is used."""
_WEIGHTS = "latest.weights.h5"
_COMPLETE = re.compile(r"backup_(\d{8,})")

BackupAndRestore: TypeAlias = Any
"""The callback of Keras."""

logger = logging.getLogger("strategies.keras")


def with_whole_backups(callback: BackupAndRestore) -> BackupAndRestore:
    """Return a callback of Keras's, which decides when to save, and now saves whole backups.

    Args:
        callback: is changed.

    Raises:
        StrategyError: if its folder is no local one.
    """
    if "://" in str(callback.backup_dir):
        raise StrategyError(
            f"BackupAndRestore is to write to {callback.backup_dir}, and backups are folders that get their names "
            "when they are whole; use a local folder, or one of a file system that all hosts share"
        )
    backups = _WholeBackups(callback)
    callback._save_model, callback._load_model = backups.save, backups.load
    if callback.save_freq != "epoch" and callback.save_freq:
        logger.warning(
            "BackupAndRestore has save_freq=%d: a training that goes on repeats the epoch with weights from the "
            "midst of it, as Keras does; strategies.keras.Checkpoints(every=%d) goes on behind the step",
            callback.save_freq,
            callback.save_freq,
        )
    return callback


class _WholeBackups:
    """The backups of a callback.

    Args:
        callback: says which model is saved where.
    """

    def __init__(self, callback: BackupAndRestore) -> None:
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
        """Write a backup. A process that is killed meanwhile leaves the ones before as they are."""
        model, number = self._callback.model, 1 + max(self._numbers, default=0)
        incomplete = beside(self._of(number), INCOMPLETE)
        clear(incomplete)
        incomplete.mkdir(parents=True)
        model.save_weights(incomplete / _WEIGHTS)
        epoch = {"epoch": self._callback._current_epoch, "batch": self._callback._last_batch_seen}
        (incomplete / TRAINING).write_text(json.dumps(epoch | {"random_states": random_states(model)}))
        seal(incomplete)
        put(incomplete, self._of(number))
        for old in self._numbers[:-KEPT]:
            clear(self._of(old).rename(beside(self._of(old), REMOVED)))

    def load(self) -> None:
        """Restore the newest backup that is whole; without one the training begins anew."""
        for suffix in (INCOMPLETE, REMOVED):
            for path in self._folder.glob(f"backup_*{suffix}"):
                clear(path)
        found = self._newest()
        if found is None:
            self._refuse_files_of_keras()
            return
        model, training = self._callback.model, json.loads((found / TRAINING).read_text())
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        model.load_weights(found / _WEIGHTS)
        if not set_random_states(model, training["random_states"]):
            raise StrategyError(
                f"{found} was written by a model with {len(training['random_states'])} seed generators, and model "
                f"{model.name!r} has another number of them; use another folder for another model"
            )
        model._initial_epoch = training["epoch"]

    def _newest(self) -> Path | None:
        """Return the newest backup that is whole; set damaged newer ones aside, with a warning."""
        for number in reversed(self._numbers):
            path = self._of(number)
            fault = fault_of(path)
            if not fault:
                return path
            aside = beside(path, DAMAGED)
            clear(aside)
            path.rename(aside)
            logger.warning("backup %s is damaged (%s) and was renamed to %s; using the one before", path, fault, aside)
        if list(self._folder.glob(f"backup_*{DAMAGED}")):
            logger.warning("no backup in %s is whole; the training begins anew", self._folder)
        return None

    def _refuse_files_of_keras(self) -> None:
        if (self._folder / _WEIGHTS).exists():
            raise StrategyError(
                f"{self._folder} has a backup that Keras wrote outside of a strategy. Its files may be of two epochs, "
                "and lack the states of seed generators; end that training outside of a scope, or use another folder"
            )
