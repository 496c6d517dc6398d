"""Checkpoints in a folder: each is written whole or not at all, and checked before it is used.

| name | what it is |
|---|---|
| step_00000040/ | a complete checkpoint |
| step_00000040/state/ | all arrays of one dtype behind each other, cut into pieces, written by orbax-checkpoint |
| step_00000040/training.json | where each array lies, and what else is needed to go on |
| step_00000040/SHA256SUMS | of all other files; `sha256sum --check` reads it |
| step_00000050.incomplete/ | one that is being written, or whose writer was ended |
| step_00000030.damaged/ | one whose files are not those that were written |
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath

import numpy as np

from strategies.errors import CheckpointError
from strategies.packing import Packing
from strategies.position import Position
from strategies.private_folders import close_to_others, make_private

logger = logging.getLogger(__name__)

STATE, TRAINING, SUMS = "state", "training.json", "SHA256SUMS"
INCOMPLETE, DAMAGED, REMOVED = ".incomplete", ".damaged", ".removed"
PIECE_BYTES = 1 << 28
"""What orbax gets as one array: it may hold a second copy of it. (Few large arrays are written faster than many: 22 MB
in 18 arrays took 55 ms of processor time, in one 22 ms.)"""
_COMPLETE = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True)
class Training:
    """What a checkpoint says besides the arrays.

    Attributes:
        step: updates that were made.
        replicas: R, of all instances.
        seed: the trainer's.
        position: where the data set was, with its seed; None where there was none.
        packing: where each array lies.
    """

    step: int
    replicas: int
    seed: int
    position: Position | None
    packing: Packing

    def to_json(self) -> str:
        """The inverse of `from_json`."""
        values = asdict(self) | {"packing": self.packing.arrays}
        return json.dumps(values, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Training:
        """What `to_json` wrote; ValueError for anything else."""
        try:
            values = json.loads(text)
            position, packing = values.pop("position"), Packing.from_lists(values.pop("packing"))
            return cls(**values, position=position and Position.from_dict(position), packing=packing)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{text!r} does not describe a training") from error


class CheckpointFolder:
    """The checkpoints of one job. One process uses it, from one thread at a time.

    Args:
        path: the folder; made with the first checkpoint.
        keep: how many checkpoints are kept, the newest.

    Raises:
        CheckpointError: if orbax-checkpoint is not installed.
    """

    def __init__(self, path: Path, keep: int) -> None:
        try:
            import orbax.checkpoint as orbax
        except ImportError as error:
            raise CheckpointError(
                f"checkpoints need orbax-checkpoint ({error}); install it with: "
                "pip install 'popdist-everywhere[checkpoint]'"
            ) from error
        self.path = path.absolute()
        self._keep = keep
        self._orbax = orbax
        # Trained variables hardly shrink, and compressing them takes time that training needs.
        self._arrays = orbax.Checkpointer(orbax.PyTreeCheckpointHandler(use_compression=False, use_zarr3=True))

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, ascending."""
        names = [entry.name for entry in os.scandir(self.path)] if self.path.is_dir() else []
        return sorted(int(found[1]) for name in names if (found := _COMPLETE.fullmatch(name)))

    def write(self, training: Training, flat: Mapping[str, np.ndarray]) -> None:
        """Write a checkpoint and remove those that are too old. After an error the others are as they were.

        Args:
            training: its step is not that of a complete checkpoint.
            flat: for each dtype all arrays, as its packing says.

        Raises:
            CheckpointError: if that fails, for example because the disk is full.
        """
        complete = self._of_step(training.step)
        incomplete = _beside(complete, INCOMPLETE)
        try:
            make_private(self.path)
            shutil.rmtree(incomplete, ignore_errors=True)
            incomplete.mkdir(mode=0o700)
            _check_space(incomplete, sum(array.nbytes for array in flat.values()))
            self._fill(incomplete, training, flat)
            incomplete.rename(complete)
            _sync(self.path)
        except Exception as error:  # whatever orbax raises, it does not concern the training
            _remove_unfinished(incomplete)
            raise CheckpointError(f"{complete} could not be written: {_reason(error)}") from error
        for step in self.steps()[: -self._keep]:
            self._remove(self._of_step(step))

    def read_newest(self) -> tuple[Training, dict[str, np.ndarray]] | None:
        """The newest checkpoint that is complete and whole; None if none was ever completed.

        Warns of those that are not; incomplete ones are removed, damaged ones renamed.

        Raises:
            CheckpointError: if there are complete ones and all are damaged, or orbax cannot read a whole one.
        """
        self._remove_leftovers()
        damaged: dict[Path, str] = {}
        for step in reversed(self.steps()):
            path = self._of_step(step)
            if fault := fault_of(path):
                damaged[path] = fault
                continue
            found = self._read(path)
            for other, fault in damaged.items():
                self._set_aside(other, fault, step)
            return found
        if damaged:
            faults = "; ".join(f"{path.name}: {fault}" for path, fault in damaged.items())
            raise CheckpointError(
                f"no checkpoint in {self.path} is whole ({faults}); to begin anew, use another folder or remove them"
            )
        return None

    # ---- one checkpoint

    def _of_step(self, step: int) -> Path:
        return self.path / f"step_{step:08d}"

    def _fill(self, folder: Path, training: Training, flat: Mapping[str, np.ndarray]) -> None:
        with _without_tracebacks_of_orbax():
            self._arrays.save(folder / STATE, args=self._orbax.args.PyTreeSave(_pieces(flat)))
        (folder / TRAINING).write_text(training.to_json(), encoding="utf-8")
        sums = [f"{_sha256(path)}  {path.relative_to(folder)}\n" for path in _files(folder)]
        (folder / SUMS).write_text("".join(sums), encoding="utf-8")
        for parent, _, names in os.walk(folder, topdown=False):
            for path in (*(Path(parent, name) for name in names), Path(parent)):
                close_to_others(path)
                _sync(path)

    def _read(self, path: Path) -> tuple[Training, dict[str, np.ndarray]]:
        try:
            training = Training.from_json((path / TRAINING).read_text(encoding="utf-8"))
            flat = _put_together(self._arrays.restore(path / STATE))
            return training, training.packing.views(flat)
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{path} is whole, but this version of the project, or of orbax-checkpoint, cannot read it: {error}"
            ) from error

    def _set_aside(self, path: Path, fault: str, used: int) -> None:
        aside = _beside(path, DAMAGED)
        shutil.rmtree(aside, ignore_errors=True)
        try:
            path.rename(aside)
        except OSError as error:
            raise CheckpointError(f"{path} is damaged ({fault}) and cannot be set aside: {error}") from error
        logger.warning("checkpoint %s is damaged (%s) and was renamed to %s; using step %d", path, fault, aside, used)

    def _remove_leftovers(self) -> None:
        for path in self.path.glob(f"step_*{REMOVED}"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.path.glob(f"step_*{INCOMPLETE}"):
            shutil.rmtree(path, ignore_errors=True)
            newest = f"using step {self.steps()[-1]}" if self.steps() else "there is none before it"
            logger.warning("checkpoint %s is incomplete: its writer was ended; it was removed; %s", path, newest)

    def _remove(self, path: Path) -> None:
        """Remove a complete checkpoint; half removed, it has another name."""
        try:
            removed = path.rename(_beside(path, REMOVED))
        except OSError as error:
            logger.warning("the old checkpoint %s cannot be removed: %s", path, error)
        else:
            shutil.rmtree(removed, ignore_errors=True)


def fault_of(checkpoint: Path) -> str:
    """What is wrong with the files of a checkpoint; empty when nothing is."""
    try:
        lines = (checkpoint / SUMS).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        return f"{SUMS} cannot be read: {error}"
    wanted = {name: sha256 for sha256, _, name in (line.partition("  ") for line in lines)}
    if TRAINING not in wanted:
        return f"{SUMS} is cut off"
    for name, sha256 in wanted.items():
        if not _is_inside(checkpoint, name):
            return f"{SUMS} names {ascii(name[:100])}, which is no file of the checkpoint"
        try:
            if _sha256(checkpoint / name) != sha256:
                return f"{name} is not what was written"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return ""


def _is_inside(checkpoint: Path, name: str) -> bool:
    """Whether a name leads to nothing outside of a checkpoint, and to no device or pipe; it may lead nowhere."""
    within = PurePath(name)
    if within.is_absolute() or ".." in within.parts or "\0" in name:
        return False
    path = os.path.join(os.path.realpath(checkpoint), within)
    return os.path.realpath(path) == path and (os.path.isfile(path) or not os.path.exists(path))


def _pieces(flat: Mapping[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """What orbax gets; it refuses empty arrays."""
    found = {}
    for dtype, array in flat.items():
        size = PIECE_BYTES // array.itemsize
        if array.size:
            found[dtype] = {f"{begin:015d}": array[begin : begin + size] for begin in range(0, array.size, size)}
    return found


def _put_together(pieces: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {dtype: np.concatenate([of[begin] for begin in sorted(of)]) for dtype, of in pieces.items()}


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove_unfinished(folder: Path) -> None:
    """Remove what could not be finished; threads that orbax has left behind may still write there for a moment."""
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.05)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_space(folder: Path, needed: int) -> None:
    """Do not begin what would fill the disk, on which others write too."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, {needed:,} bytes are needed and {free:,} are free")


def _reason(error: Exception) -> str:
    """What the operating system said; tensorstore puts it behind a long way through its layers."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    code = re.search(r"\[os_error_code='(\d+)'\]", str(error))
    return os.strerror(int(code[1])) if code else str(error)


@contextmanager
def _without_tracebacks_of_orbax() -> Iterator[None]:
    """Keep orbax from logging, thread by thread, the error that it raises as well."""

    def is_not_of_orbax(record: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}" not in record.pathname

    log = logging.getLogger("absl")
    log.addFilter(is_not_of_orbax)
    try:
        yield
    finally:
        log.removeFilter(is_not_of_orbax)
