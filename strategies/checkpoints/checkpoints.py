"""Checkpoints of a training: saved in the background by one instance, restored on any number of instances."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

import strategies.trees as trees
from collectives.instruments import CHECKPOINT
from popdist.records.recording import FOLDER_VARIABLE
from popdist.switches import require_switches
from strategies.argument_checks import positive
from strategies.checkpoints.checkpoint_folder import Best, CheckpointFolder, SavedTraining
from strategies.checkpoints.loading import Loop, OwnLoop
from strategies.checkpoints.sealed_folders import HostArray, Packing, plain_metrics, plain_values, shown
from strategies.core.agreement import broadcast_text
from strategies.core.journal import Recorded
from strategies.core.survival import meet, surviving
from strategies.data.datasets import DistributedDataset
from strategies.errors import CheckpointError
from strategies.jax.replicas.devices import borrow, is_key
from strategies.jax.replicas.variables import PartOfArray
from strategies.late_jax import is_jax_array, jax
from strategies.placeholders import packed, placeholders_like
from strategies.typing import Leaf
from strategies.values import TrainState, are_used_up, check_state

if TYPE_CHECKING:
    from jax.typing import ArrayLike

logger = logging.getLogger(__name__)

_Restored: TypeAlias = tuple[SavedTraining | None, TrainState]
LEAVE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_PATIENCE = b"SIGINT: saving after this step, then leaving; press Ctrl-C again to end at once, without saving\n"
NICE = 10
"""The niceness of the writer's thread, with which training competes for cores. (Two instances on two cores, a
checkpoint every 10 steps of the MLP: a step takes 1.37 times as long with niceness 0, 1.13 with 5, and 0.99 with 10.
With 10 fewer checkpoints are made.)"""
WRITE_LIMIT_S = 600.0
"""The longest wait for a checkpoint to be written, in seconds."""


class Checkpoints:
    """The checkpoints of a training, from which it continues with the same bits as if it had never stopped.

    Use it in a `with` statement, in the same way on all instances::

        with strategies.Checkpoints("digits.checkpoints", trainer, dataset, every=100) as checkpoints:
            state = checkpoints.restore(trainer.init(variables))
            for epoch in range(dataset.position().epoch, 10):
                for batch in dataset.epoch(epoch):
                    state, metrics = trainer.step(state, batch)
                    checkpoints.after_step(state)

    Only instance 0 reads and writes the folder. A checkpoint contains all arrays of the state, the step, the seeds, R,
    the position in the data set, and the program's own values. `save` copies the arrays before it returns; a thread
    writes the copy. If writing fails, a warning says so, and training goes on.

    Inside the `with` statement SIGTERM, SIGUSR1 and a first SIGINT (Ctrl-C) do not end the process. All instances save
    after the same step and leave together; see `after_step`.

    Args:
        directory: Folder on instance 0, one per job.
        trainer: Trainer whose seed and number of replicas are saved, and compared when restoring. A program that makes
            its steps itself gives an `OwnLoop`.
        dataset: Data set whose position is saved and restored; None leaves positions to the program.
        every: `after_step` saves if the step is a multiple of `every`, or as soon as possible after that.
        keep: Number of newest checkpoints to keep.
        keep_best: Choice of other checkpoints to keep, by a metric given to `save` or `after_step`.
        grace_s: Seconds that poprun waits for the last checkpoint after SIGTERM or SIGINT.

    Attributes:
        extra: The program's own values by name, such as its best accuracy. They are saved with each checkpoint, and
            `restore` sets them on all instances; see `save`.
        last_step: Step of the last checkpoint that was begun or restored; None without one.

    Raises:
        CheckpointError: On instance 0, if orbax-checkpoint is not installed.
        TypeError: If `every` or `keep` is not an integer.
        ValueError: If `every` or `keep` is not positive, or `grace_s` is negative or infinite.
    """

    def __init__(
        self,
        directory: str | Path,
        trainer: Loop,
        dataset: DistributedDataset | None = None,
        *,
        every: int = 1,
        keep: int = 3,
        keep_best: Best | None = None,
        grace_s: float = 30.0,
    ) -> None:
        every, keep = positive("every", every), positive("keep", keep)
        if not 0 <= grace_s < inf:
            raise ValueError(f"grace_s is {grace_s}; it must be a number of seconds, 0 or more")
        self._trainer = trainer
        self._strategy = trainer.strategy
        self._dataset = dataset
        self._every = every
        self._grace_s = grace_s
        self._directory, self._keep, self._keep_best = _folder_for(Path(directory)), keep, keep_best
        self._opened: CheckpointFolder | None = None
        _ = self._folder  # raises now if orbax is missing
        self._thread = ThreadPoolExecutor(1, "checkpoints", _stand_back)
        self._writing: Future[None] | None = None
        self.extra: dict[str, Any] = {}
        self.last_step: int | None = None
        self._last_metrics: dict[str, float] = {}  # the metrics saved with last_step
        self._owns_folder = False
        self._is_due = False
        self._packing = Packing(())
        self._flat: dict[str, np.ndarray] = {}
        self._handlers: dict[signal.Signals, Any] = {}
        self._gathered_step: int | None = None
        self._last: tuple[TrainState, Mapping[str, Any] | None] | None = None  # last state; another may save it
        self._seen: int | None = None  # the step of the last `after_step`, or the restored step

    @property
    def _folder(self) -> CheckpointFolder | None:
        """The folder in which instance 0 writes; None on others, until a loss makes one of them instance 0."""
        if self._strategy.instance_index != 0 or self._strategy.replicas.is_spare:
            return None
        if self._opened is None:
            self._opened = CheckpointFolder(self._directory, self._keep, self._keep_best)
        return self._opened

    def __enter__(self) -> Checkpoints:
        """Take over the signals to leave, in the main thread only: they no longer end the process.

        SIGINT is left to a program that handles or ignores it by itself.
        """
        if threading.current_thread() is threading.main_thread():
            is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            taken = [number for number in LEAVE_SIGNALS if number != signal.SIGINT or is_ours]
            self._handlers = {number: signal.signal(number, self._take_signal) for number in taken}
            self._strategy.progress.grace(self._grace_s)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the checkpoint that is being written, also after an error.

        Without an error, in a job that can carry on, this is a collective call: all instances wait. If instance 0 is
        lost meanwhile, the next instance writes the last state that was to be saved.
        """
        try:
            if error is None and self._strategy.can_carry_on:
                self._strategy.on_chief(self._save_last)
            self.wait()
        finally:
            self._thread.shutdown(wait=False)
            for number, handler in self._handlers.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            self._strategy.progress.grace(0)

    def restore(self, state: TrainState, *, other_replicas: bool = False) -> TrainState:
        """Return the state of the newest intact checkpoint, and set the data set to its position. Collective.

        `extra` becomes the values that were saved with it. Incomplete or damaged checkpoints are skipped, each with one
        warning.

        Args:
            state: Result of `Trainer.init`; the checkpoint must have the same names, shapes and dtypes. Optimizer state
                may be sharded or whole, then and now.
            other_replicas: Whether to accept a checkpoint of another number of replicas. The bits then differ from a
                training that never stopped, and the program chooses the position in the data set.

        Returns:
            The restored state; `state` itself if no checkpoint exists.

        Raises:
            CheckpointError: On all instances, if the checkpoint has another number of replicas, another seed or other
                variables, or if all checkpoints are damaged. Nothing has changed then.
            ValueError: On all instances, if the data set was read in another way.
        """
        require_switches(other_replicas=other_replicas)
        replicas = self._strategy.replicas

        def replayed(received: str | None) -> _Restored:
            if received is None:
                return None, state
            training = SavedTraining.from_json(received)
            return training, replace(placeholders_like(state, replicas.wait_for_values), step=training.step)

        recorded = Recorded("restoring a checkpoint", lambda made: getattr(made[0], "to_json", lambda: None), replayed)
        training, found = replicas.journal.perform(
            recorded, lambda: self._restored(state, other_replicas), survives=False
        )
        replicas.journal.replaced(state, found)
        self._owns_folder = True
        if training is None:
            self._seen = state.step
            return state
        if training.replicas != self._strategy.num_replicas_in_sync:
            logger.warning("step %d was reached with %d replicas", training.step, training.replicas)
        elif self._dataset is not None and training.position is not None:
            self._dataset.restore(training.position)
        self.last_step = self._gathered_step = self._seen = training.step
        self.extra, self._last_metrics = dict(training.extra), dict(training.metrics)
        return found

    def _restored(self, state: TrainState, other_replicas: bool) -> _Restored:
        """Return the facts of the newest checkpoint, and its state; None and `state` without one. Collective."""
        whole = self._trainer.whole(state)
        arrays = _named_arrays(whole)
        training, saved = self._read(arrays, other_replicas)
        if training is None:
            return None, state
        received = {name: self._received(name, leaf, saved[name]) for name, leaf in arrays.items()}
        restored = _with_arrays(state, received, training.step)
        return training, replace(restored, held=whole.held)  # the new parts are for the present replicas

    def save(
        self,
        state: TrainState,
        *,
        extra: Mapping[str, object] | None = None,
        metrics: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        """Begin to save the state.

        If the step was saved or restored last, it is saved again only if `extra` or `metrics` are given. If the
        previous checkpoint is still being written, the call waits. If a checkpoint cannot be written, one warning says
        so; training goes on, and older checkpoints stay.

        The call is collective only with sharded optimizer state, which is gathered array by array on instance 0.

        Args:
            state: State that `Trainer.init` or a step returned last.
            extra: The program's own values from now on, which replace the attribute `extra`: a dictionary that JSON can
                write. The values of instance 0 are saved.
            metrics: Metrics of this state, such as an accuracy on other data or the metrics of the step: a dictionary
                of numbers, by which `keep_best` chooses.

        Raises:
            CheckpointError: If the folder has checkpoints of another training, because `restore` was not called.
            TypeError: If `extra` or `metrics` cannot be saved.
            ValueError: If a step has used the state up.
        """
        check_state(state)
        own, measured = plain_values(self.extra if extra is None else extra), plain_metrics(metrics or {})
        is_said = extra is not None or metrics is not None
        self.extra = self.extra if extra is None else dict(extra)
        is_sharded = self._trainer.is_sharded
        if self._strategy.can_carry_on and not is_sharded:
            self._last = state, metrics
        is_spare = self._strategy.replicas.is_spare
        packing = self._gather_surviving(state, is_said) if is_sharded and not is_spare else None
        folder = self._folder
        if folder is None:
            self._owns_folder, self._is_due = True, False  # instance 0 saves it
        is_saved = state.step == self.last_step
        if folder is None or (is_saved and not is_said) or (is_sharded and packing is None):
            return
        if self._owns_folder and not is_said and state.step in folder.steps():  # a lost instance has saved it
            self.last_step, self._is_due = state.step, False
            return
        with self._strategy.instruments.during[CHECKPOINT]:
            self.wait()
            if not self._owns_folder and folder.steps():
                raise CheckpointError(
                    f"{folder.path} has checkpoints up to step {folder.steps()[-1]} of another training; "
                    "call restore before the first step, or use another folder"
                )
            if metrics is not None or not is_saved:
                self._last_metrics = measured
            self.last_step, self._owns_folder, self._is_due = state.step, True, False
            position = None if self._dataset is None else self._dataset.position()
            replicas, packing = self._strategy.num_replicas_in_sync, packing or self._copy(state)
            training = SavedTraining(
                state.step, replicas, self._trainer.seed, position, packing, self._last_metrics, own, self._order
            )
            self._writing = self._thread.submit(self._write, folder, training, self._flat)

    def after_step(
        self,
        state: TrainState,
        *,
        extra: Mapping[str, object] | None = None,
        metrics: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        """Save if a checkpoint is due; leave if a signal asks for it. Call it after every step, on all instances.

        A checkpoint is due if the step is a multiple of `every`, or has passed a multiple since the last call.

        Training does not wait for the disk. If the previous checkpoint is still being written, the next one is made
        after the first step at which the writer is free. Only sharded optimizer state is gathered at once and makes
        training wait, because only instance 0 knows whether the writer is free.

        If an instance gets SIGTERM, SIGUSR1 or SIGINT, it tells the others with its next gradients. After that step all
        instances save the state together, and leave. A second SIGINT raises KeyboardInterrupt at once.

        Args:
            state: State that `Trainer.init` or a step returned last.
            extra: The program's own values from now on, as in `save`.
            metrics: Metrics of this state, as in `save`; read only if the state is saved.

        Raises:
            SystemExit: With status 128 + the number of the signal, on all instances, after the state is saved.
        """
        self.extra = self.extra if extra is None else dict(extra)
        if isinstance(self._trainer, OwnLoop):  # the gradients of a Trainer's step have carried the notice
            self._trainer.share_notice()
        if self._trainer.notice.is_agreed:
            self._leave(state, metrics)
        before = state.step - 1 if self._seen is None else self._seen
        self._is_due |= state.step // self._every > before // self._every
        self._seen = state.step
        if self._is_due and (self._trainer.is_sharded or self._writing is None or self._writing.done()):
            self.save(state, metrics=metrics)

    def _save_last(self) -> None:
        """Save the last state that was to be saved, on the new instance 0, unless the lost instance 0 has saved it."""
        state, metrics = self._last or (None, None)
        folder = self._folder
        if state is not None and folder is not None and not are_used_up(state.variables):
            is_begun = state.step == self.last_step or state.step in folder.steps()
            if not is_begun:
                self.save(state, metrics=metrics)
        self.wait()

    def wait(self) -> None:
        """Wait until no checkpoint is being written.

        Raises:
            CheckpointError: If this takes longer than `WRITE_LIMIT_S`.
        """
        if self._writing is None:
            return
        try:
            self._writing.result(WRITE_LIMIT_S)
        except TimeoutError as error:
            assert self._folder is not None
            raise CheckpointError(
                f"the checkpoint of step {self.last_step} in {self._folder.path} is still being written after "
                f"WRITE_LIMIT_S = {WRITE_LIMIT_S:g} s; check that disk"
            ) from error
        self._writing = None

    # ---- saving

    def _arrays_of(self, state: TrainState) -> dict[str, Any]:
        return _named_arrays(self._trainer.whole(state))

    def _gather_surviving(self, state: TrainState, is_said: bool) -> Packing | None:
        """Return what `_gather` returns. If instances are lost meanwhile and the others have copies, repeat it."""
        if state.held is None:
            return self._gather(state, is_said)
        replicas = self._strategy.replicas

        def catch_up() -> list[Packing | None] | None:
            return [None] if meet(replicas).is_late else None

        [packing] = surviving(replicas, lambda: [self._gather(state, is_said)], catch_up)
        self._gathered_step = state.step
        return packing

    def _gather(self, state: TrainState, is_said: bool) -> Packing | None:
        """Return `_copy` on instance 0, and send parts of arrays on the others; None if this was done for this step.

        Args:
            state: State to save.
            is_said: Whether new `extra` or `metrics` were given for it.
        """
        if state.step == self._gathered_step and not is_said:
            return None
        packing = None
        if self._folder is not None:
            self.wait()
            packing = self._copy(state)
        else:
            for name, leaf in self._arrays_of(state).items():
                if isinstance(leaf, PartOfArray):
                    leaf.gather(name)
        self._gathered_step = state.step
        return packing

    def _copy(self, state: TrainState) -> Packing:
        """Copy the arrays into `_flat`, whose memory is reused, because the next step uses up the state's memory."""
        arrays = self._arrays_of(state)
        packing = Packing.of(arrays)
        if packing != self._packing:
            self._packing, self._flat = packing, packing.allocate()
        for name, copy in packing.views(self._flat).items():
            leaf = arrays[name]
            np.copyto(copy, leaf.gather(name) if isinstance(leaf, PartOfArray) else borrow(leaf))
        return packing

    def _write(self, folder: CheckpointFolder, training: SavedTraining, flat: Mapping[str, np.ndarray]) -> None:
        """Write a checkpoint, in the thread of the writer, after sinks have written the metrics of earlier steps."""
        for sinks in tuple(self._strategy.replicas.sinks):
            sinks.wait()
        try:
            folder.write(training, flat)
        except CheckpointError as error:
            self.last_step = None
            newest = folder.steps()[-1:]
            logger.warning(
                "checkpoint %s; training goes on, and %s",
                error,
                f"step {newest[0]} is kept" if newest else "no checkpoint exists",
            )

    # ---- restoring

    def _read(self, arrays: Mapping[str, Leaf], other_replicas: bool) -> tuple[SavedTraining | None, dict[str, Any]]:
        """Return the checkpoint that instance 0 reads, on all instances; its arrays on instance 0 alone."""
        found, fault = None, ""
        if self._folder is not None:
            try:
                found = self._folder.read_newest()
                fault = self._mismatch(found[0], arrays, other_replicas) if found else ""
            except (CheckpointError, OSError) as error:
                fault = str(error)
        known = json.dumps([fault, found and found[0].to_json()])
        text = broadcast_text(self._strategy.replicas.communicator, known, 0, "facts of the checkpoint")
        fault, training = json.loads(text)
        if fault:
            raise CheckpointError(fault)
        values = found[1] if found else {}
        for name in arrays.keys() - values.keys():  # to be filled
            leaf = arrays[name]
            values[name] = np.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, PartOfArray) else leaf
        return training and SavedTraining.from_json(training), values

    def _received(self, name: str, leaf: Leaf, array: Leaf) -> Any:
        """Return the new value of `leaf` on every instance, given the array that instance 0 has read. Collective."""
        if _is_on_host(leaf):  # JAX would cut 64-bit numbers to 32 bits
            received = self._strategy.replicas.communicator.broadcast(np.array(array, order="C"), 0, name=name)
            return leaf.of(received) if isinstance(leaf, PartOfArray) else received
        return _like(leaf, self._strategy.broadcast({name: array})[name])

    def _mismatch(self, training: SavedTraining, arrays: Mapping[str, Leaf], other_replicas: bool) -> str:
        """Return the reason why this training cannot continue from the checkpoint; empty if it can."""
        assert self._folder is not None
        what = f"the checkpoint of step {training.step} in {self._folder.path}"
        replicas, seed = self._strategy.num_replicas_in_sync, self._trainer.seed
        if training.replicas != replicas and not other_replicas:
            return (
                f"{what} was saved with {training.replicas} replicas, but this training has {replicas}; the number of "
                f"replicas decides the bits, the number of instances does not: use {training.replicas} replicas, or "
                "restore(..., other_replicas=True)"
            )
        if training.seed != seed:
            return (
                f"{what} was saved with the trainer's seed {training.seed}, but this training has {seed}; use the same"
            )
        theirs, ours = training.packing.layouts, Packing.of(arrays).layouts
        names = theirs.keys() | ours.keys()
        for name in sorted(names):
            there, here = theirs.get(name, "nothing"), ours.get(name, "nothing")
            if there != here:
                return (
                    f"{what} has {there} as {shown(name)}, but this training has {here}; use the same model and "
                    "optimizer"
                )
        pairs = enumerate(zip(training.order, self._order, strict=False))  # without an order in 0.1.0
        for number, (there, here) in pairs:
            if there != here:
                return (
                    f"{what} has the parameters of the optimizer in another order than this training: number {number} "
                    f"is {there} there, and {here} here; make them in one order, as with sorted(names) in place of a "
                    "set, or set PYTHONHASHSEED as in the run that saved it"
                )
        return ""

    @property
    def _order(self) -> list[str]:
        """The names of the parameters by the numbers in the optimizer's state; empty for trainers that name them."""
        return list(getattr(self._trainer, "order", ()))

    # ---- leaving

    def _take_signal(self, number: int, frame: object) -> None:
        self._trainer.notice.give(number)
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
            if not self._strategy.progress.is_supervised:  # poprun says it itself
                with suppress(OSError):  # no logging: the signal may have come inside of it
                    os.write(2, _PATIENCE)

    def _leave(self, state: TrainState, metrics: Mapping[str, ArrayLike] | None) -> None:
        def save_together() -> np.ndarray:
            self.save(state, metrics=metrics)
            self.wait()
            number = np.array([self._trainer.notice.number], np.int32)
            return self._strategy.replicas.communicator.all_reduce(number, "max", name="signal to leave")

        def catch_up() -> None:
            meet(self._strategy.replicas)
            self._gathered_step = None  # if instance 0 is lost, the next instance needs the parts, and saves

        replicas = self._strategy.replicas
        if self._trainer.is_sharded and state.held is None:
            number = replicas.recorded("signal to leave", save_together)
        else:
            recorded = Recorded[np.ndarray]("signal to leave", packed, lambda received: np.array(received))
            number = surviving(replicas, save_together, catch_up, recorded=recorded)
        if self._folder is not None:
            name = signal.Signals(int(number[0])).name
            logger.warning("%s: leaving after step %d; see %s", name, state.step, self._folder.path)
        raise SystemExit(128 + int(number[0]))


def _stand_back() -> None:
    """Lower the priority of this thread, and of all threads that it starts, below training's."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def _is_on_host(leaf: Leaf) -> bool:
    """Return whether a leaf is host memory that the training reuses, or a part of an array in it."""
    return isinstance(leaf, HostArray) or (isinstance(leaf, PartOfArray) and isinstance(leaf.local, np.ndarray))


def _like(leaf: Leaf, array: jax.Array) -> Any:
    """Return this instance's part of an array, placed like `leaf`."""
    if isinstance(leaf, PartOfArray):
        return leaf.of(array)
    return jax.device_put(array, leaf.sharding) if is_jax_array(leaf) and not is_key(leaf) else array


def _named_arrays(state: TrainState) -> dict[str, Any]:
    """Return all arrays of a state, with the data of random keys, by names such as `.variables['w']`."""
    leaves = trees.leaves_with_path(state)
    return {trees.keystr(path): jax.random.key_data(leaf) if is_key(leaf) else leaf for path, leaf in leaves}


def _with_arrays(state: TrainState, arrays: Mapping[str, jax.Array], step: int) -> TrainState:
    """Return a state like this one, with other arrays and another step."""

    def of(path: Any, leaf: Leaf) -> Any:
        array = arrays[trees.keystr(path)]
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf)) if is_key(leaf) else array

    restored: TrainState = trees.map_with_path(of, state)
    return replace(restored, step=step)


def _folder_for(directory: Path) -> Path:
    """Return the folder for checkpoints: the requested folder, or another one during verification."""
    if FOLDER_VARIABLE not in os.environ:
        return directory
    from strategies.jax.step_record import checkpoint_folder  # imports JAX

    return checkpoint_folder(directory)
