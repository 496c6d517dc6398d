"""Folders of checkpoints, each written completely and checked before use, and the choice of the best checkpoints.

| name | content |
|---|---|
| step_00000040/ | a complete checkpoint |
| step_00000040/state/ | all arrays, one after another per dtype, cut into pieces, written by orbax-checkpoint |
| step_00000040/training.json | the place of each array, and the other facts needed to continue |
| step_00000040/SHA256SUMS | digests of all other files; `sha256sum --check` reads it |
| step_00000050.incomplete/ | a checkpoint that is being written, or whose writer died |
| step_00000030.damaged/ | a checkpoint whose files have changed since they were written |
| step_00000040.replaced/ | the older checkpoint of a step, while a new one of the same step replaces it |
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import math
import os
import re
import shutil
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from popdist.records.private_files import make_private
from strategies.argument_checks import positive
from strategies.checkpoints.sealed_folders import (
    DAMAGED,
    INCOMPLETE,
    REMOVED,
    REPLACED,
    TRAINING,
    Packing,
    clear,
    content,
    fault_of,
    plain_metrics,
    plain_values,
    put,
    seal,
    sibling,
)
from strategies.data.layout import Position
from strategies.errors import CheckpointError
from strategies.jax.replicas.processes import own_process

logger = logging.getLogger(__name__)

STATE = "state"
MAX_FAILED = 16
"""The largest number of failed writes whose threads may still run."""
PIECE_BYTES = 1 << 28
"""The size of the arrays that orbax gets: it may hold a second copy of each. (Few large arrays are written faster than
many: 22 MB took 55 ms of processor time as 18 arrays, and 22 ms as one.)"""
_MODES = ("max", "min")
_COMPLETE = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True)
class SavedTraining:
    """The facts in a checkpoint besides the arrays.

    Attributes:
        step: Number of steps so far.
        replicas: Number of replicas of all instances, R.
        seed: Seed of the trainer.
        position: Position in the data set, with its seed; None without a data set.
        packing: Place of each array.
        metrics: Metrics of this state, given by the program.
        extra: The program's own values, in a form that JSON can write.
        order: The names of the parameters, in the order in which an optimizer numbers their state; empty if none does.
    """

    step: int
    replicas: int
    seed: int
    position: Position | None
    packing: Packing
    metrics: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    order: Sequence[str] = ()

    def to_json(self) -> str:
        """Return the facts as JSON, which `from_json` reads."""
        values = asdict(self) | {"packing": self.packing.arrays}
        if not self.order:
            del values["order"]  # release 0.1.0 does not know it
        return json.dumps(values, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> SavedTraining:
        """Return the facts that `to_json` wrote; raise ValueError for any other text."""
        try:
            values = json.loads(text)
            position, packing = values.pop("position"), Packing.from_lists(values.pop("packing"))
            if not all(type(values[name]) is int and values[name] >= 0 for name in ("step", "replicas")):
                raise TypeError
            values["metrics"] = plain_metrics(values.get("metrics", {}))
            values["extra"] = plain_values(values.get("extra", {}))
            return cls(**values, position=position and Position.from_dict(position), packing=packing)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{text!r} does not describe a training") from error


class CheckpointFolder:
    """The checkpoints of one job. One process uses the folder, from one thread at a time.

    Args:
        path: Folder, created with the first checkpoint.
        keep: Number of newest checkpoints to keep.
        best: Choice of other checkpoints to keep; None for no others.

    Raises:
        CheckpointError: If orbax-checkpoint is not installed.
    """

    def __init__(self, path: Path, keep: int, best: Best | None = None) -> None:
        try:
            import orbax.checkpoint as orbax
        except ImportError as error:
            raise CheckpointError(
                f"checkpoints need orbax-checkpoint ({error}); install it with: pip install orbax-checkpoint"
            ) from error
        self.path = path.absolute()
        self._keep = keep
        self._best = best
        self._attempts = itertools.count()
        self._failed: deque[int] = deque()  # descriptors of removed folders
        self._orbax = orbax
        # Compression costs time that training needs, and trained variables hardly shrink.
        alone = _for_this_process_alone(orbax)
        handler = orbax.PyTreeCheckpointHandler(use_compression=False, use_zarr3=True, **alone)
        self._arrays = orbax.Checkpointer(handler, **alone)

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, ascending."""
        names = [entry.name for entry in os.scandir(self.path)] if self.path.is_dir() else []
        return sorted(int(found[1]) for name in names if (found := _COMPLETE.fullmatch(name)))

    def write(self, training: SavedTraining, flat: Mapping[str, np.ndarray]) -> None:
        """Write a checkpoint, and remove checkpoints that are too old. After an error the others are unchanged.

        Args:
            training: Facts of the checkpoint. A complete checkpoint of the same step is replaced.
            flat: For each dtype an array with all arrays of that dtype, as `training.packing` says.

        Raises:
            CheckpointError: If writing fails, for example because the disk is full.
        """
        complete = self.of_step(training.step)
        incomplete = sibling(complete, INCOMPLETE)
        try:
            make_private(self.path)
            clear(incomplete)
            incomplete.mkdir(mode=0o700)
            _check_space(incomplete, sum(array.nbytes for array in flat.values()))
            self._fill(incomplete, training, flat)
            put(incomplete, complete)
        except Exception as error:  # training goes on, whatever orbax raises
            _remove_unfinished(incomplete)
            raise CheckpointError(f"{complete} could not be written: {_reason(error)}") from error
        steps = self.steps()
        best = self._best.steps(self.metrics()) if self._best else []
        for step in {*steps[: -self._keep]}.difference(best):
            self._remove(self.of_step(step))

    def read_newest(self) -> tuple[SavedTraining, dict[str, np.ndarray]] | None:
        """Return the newest complete checkpoint whose files are intact; None if none was ever completed.

        Incomplete checkpoints are removed and damaged ones renamed, each with a warning.

        Raises:
            CheckpointError: If all complete checkpoints are damaged, or orbax cannot read an intact one.
        """
        self._remove_leftovers()
        damaged: dict[Path, str] = {}
        for step in reversed(self.steps()):
            path = self.of_step(step)
            if fault := fault_of(path):
                damaged[path] = fault
                continue
            found = self.read(path)
            for other, fault in damaged.items():
                self._set_aside(other, fault, step)
            return found
        if damaged:
            faults = "; ".join(f"{path.name}: {fault}" for path, fault in damaged.items())
            raise CheckpointError(
                f"no checkpoint in {self.path} is intact ({faults}); to begin anew, use another folder or remove them"
            )
        return None

    def of_step(self, step: int) -> Path:
        """Return the path of the checkpoint of a step, whether or not it exists."""
        return self.path / f"step_{step:08d}"

    def metrics(self) -> dict[int, Mapping[str, float]]:
        """Return the metrics of the complete checkpoints by their steps; none for checkpoints that cannot be read."""
        found: dict[int, Mapping[str, float]] = {}
        for step in self.steps():
            found[step] = {}
            with suppress(OSError, ValueError):
                found[step] = SavedTraining.from_json(content(self.of_step(step) / TRAINING).decode()).metrics
        return found

    def _fill(self, folder: Path, training: SavedTraining, flat: Mapping[str, np.ndarray]) -> None:
        with self._path_of_open(folder) as opened, _without_tracebacks_of_orbax():
            # A new name for each attempt: orbax remembers the content of a path even if a failed write was removed.
            attempt = f"{STATE}.{next(self._attempts)}"
            self._arrays.save(opened / attempt, args=self._orbax.args.PyTreeSave(_pieces(flat)))
        (folder / attempt).rename(folder / STATE)
        (folder / TRAINING).write_text(training.to_json(), encoding="utf-8")
        seal(folder)

    @contextmanager
    def _path_of_open(self, folder: Path) -> Iterator[Path]:
        """Yield another path to a folder, which leads nowhere once the folder is removed.

        If one of its threads fails, orbax leaves the others running. They create missing folders of a path again, but
        cannot do so inside a removed folder. Its descriptor stays open, so that its number does not come to mean
        another folder.
        """
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield Path(f"/proc/self/fd/{descriptor}")
        except BaseException:
            if len(self._failed) == MAX_FAILED:
                os.close(self._failed.popleft())
            self._failed.append(descriptor)
            raise
        os.close(descriptor)

    def read(self, path: Path) -> tuple[SavedTraining, dict[str, np.ndarray]]:
        """Return the facts in a checkpoint, and its arrays by their names.

        Args:
            path: Checkpoint without a fault; see `fault_of`.

        Raises:
            CheckpointError: If it cannot be read although its files are intact.
        """
        try:
            training = SavedTraining.from_json(content(path / TRAINING).decode())
            flat = _put_together(self._arrays.restore(path / STATE))
            return training, training.packing.views(flat)
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{path} is intact, but this version of the project, or of orbax-checkpoint, cannot read it: {error}"
            ) from error

    def _set_aside(self, path: Path, fault: str, used: int) -> None:
        aside = sibling(path, DAMAGED)
        clear(aside)
        try:
            path.rename(aside)
        except OSError as error:
            raise CheckpointError(f"{path} is damaged ({fault}) and cannot be set aside: {error}") from error
        logger.warning("checkpoint %s is damaged (%s) and was renamed to %s; using step %d", path, fault, aside, used)

    def _remove_leftovers(self) -> None:
        for path in self.path.glob(f"step_*{REMOVED}"):
            clear(path)
        for path in self.path.glob(f"step_*{REPLACED}"):
            if path.with_suffix("").exists():
                clear(path)
            else:  # the writer died between two renames
                path.rename(path.with_suffix(""))
        for path in self.path.glob(f"step_*{INCOMPLETE}"):
            clear(path)
            newest = f"using step {self.steps()[-1]}" if self.steps() else "no earlier checkpoint exists"
            logger.warning("checkpoint %s is incomplete, because its writer died; it was removed; %s", path, newest)

    def _remove(self, path: Path) -> None:
        """Remove a complete checkpoint. It is renamed first, so that a half-removed one does not count as complete."""
        try:
            removed = path.rename(sibling(path, REMOVED))
        except OSError as error:
            logger.warning("the old checkpoint %s cannot be removed: %s", path, error)
        else:
            clear(removed)


def _for_this_process_alone(orbax: ModuleType) -> dict[str, object]:
    """Return options that keep orbax from waiting for other processes; none if JAX knows no other process."""
    own = own_process()
    if own is None:
        return {}
    options = orbax.options.MultiprocessingOptions(
        primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"process {own}"
    )
    return {"multiprocessing_options": options}


def _pieces(flat: Mapping[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Cut arrays into pieces for orbax, which refuses empty arrays."""
    found = {}
    for dtype, array in flat.items():
        size = PIECE_BYTES // array.itemsize
        if array.size:
            found[dtype] = {f"{begin:015d}": array[begin : begin + size] for begin in range(0, array.size, size)}
    return found


def _put_together(pieces: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {dtype: np.concatenate([of[begin] for begin in sorted(of)]) for dtype, of in pieces.items()}


def _remove_unfinished(folder: Path) -> None:
    """Remove an unfinished checkpoint; repeat this if a write that orbax left running creates the folder again."""
    for _ in range(1000):
        clear(folder)
        if not folder.exists():
            return


def _check_space(folder: Path, needed: int) -> None:
    """Refuse a write that would fill the disk, because other programs use the disk too."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, {needed:,} bytes are needed and {free:,} are free")


def _reason(error: Exception) -> str:
    """Return the operating system's message, which tensorstore puts after a long list of its own layers.

    If one of its writes fails, another may report the lock of that write (EEXIST), which is not the cause.
    """
    if isinstance(error, OSError):
        return error.strerror or str(error)
    codes = [int(code) for code in re.findall(r"\[os_error_code='(\d+)'\]", str(error))]
    codes.sort(key=lambda code: code == errno.EEXIST)
    return os.strerror(codes[0]) if codes else str(error)


@contextmanager
def _without_tracebacks_of_orbax() -> Iterator[None]:
    """Keep orbax's threads from logging the error that orbax also raises."""

    def is_not_of_orbax(record: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}" not in record.pathname

    log = logging.getLogger("absl")
    log.addFilter(is_not_of_orbax)
    try:
        yield
    finally:
        log.removeFilter(is_not_of_orbax)


@dataclass(frozen=True)
class Best:
    """The checkpoints with the best values of a metric, among those saved with this metric.

    Example::

        strategies.Checkpoints("digits.checkpoints", trainer, dataset, keep_best=strategies.Best("accuracy"))

    Attributes:
        metric: Name of the metric, as given to `Checkpoints.save`.
        mode: "max" if larger values are better, "min" if smaller values are.
        count: Number of checkpoints.

    Raises:
        TypeError: If `count` is not an integer.
        ValueError: If `mode` is neither "max" nor "min", or `count` is not positive.
    """

    metric: str
    mode: str = "max"
    count: int = 1

    def __post_init__(self) -> None:
        positive("count", self.count)
        if self.mode not in _MODES:
            raise ValueError(f"mode is {self.mode!r}; the best values are the largest ('max') or the smallest ('min')")

    def steps(self, metrics: Mapping[int, Mapping[str, float]]) -> list[int]:
        """Return the steps of the best checkpoints, the best first; of equal values the earlier step comes first.

        Args:
            metrics: Metrics of each step. A step without this metric, or with NaN, is never among the best.
        """
        sign = -1 if self.mode == "max" else 1
        values = {step: of[self.metric] for step, of in metrics.items() if self.metric in of}
        known = [step for step, value in values.items() if not math.isnan(value)]
        return sorted(known, key=lambda step: (sign * values[step], step))[: self.count]
