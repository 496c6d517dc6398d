"""Checkpoints of a training: saved in the background by one instance, restored on any number of them."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from collectives.instruments import CHECKPOINT
from popdist.switches import require_switches
from strategies.argument_checks import positive
from strategies.checkpoints.checkpoint_folder import Best, CheckpointFolder, SavedTraining
from strategies.checkpoints.own_loop import Loop, OwnLoop
from strategies.checkpoints.sealed_folders import shown
from strategies.checkpoints.serialization import HostArray, Packing, plain_metrics, plain_values
from strategies.core.agreement import broadcast_text
from strategies.core.survival import meet, surviving
from strategies.data.datasets import DistributedDataset
from strategies.errors import CheckpointError
from strategies.jax.gradients.arguments import are_used_up, check_state
from strategies.jax.replicas.devices import borrow, is_key
from strategies.jax.replicas.shards import PartOfArray
from strategies.jax.step_record import checkpoint_folder
from strategies.train_state import TrainState
from strategies.typing import Leaf

logger = logging.getLogger(__name__)

LEAVE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
NICE = 10
"""The writer's share of a core for which training competes. (Two instances on two cores, a checkpoint every 10 steps of
the MLP: a step takes 1.37 times as long without this, 0.99 with it, and 1.13 with 5; but fewer are made.)"""
RESIDUALS = ".residuals"
WRITE_LIMIT_S = 600.0
"""The most seconds that anybody waits for a checkpoint to be written."""


class Checkpoints:
    """Saves a training so that, resumed, it gives the same bits as if it had never stopped.

    Use it in a `with` statement, on all instances alike:

        with strategies.Checkpoints("digits.checkpoints", trainer, dataset, every=100) as checkpoints:
            state = checkpoints.restore(trainer.init(variables))
            for epoch in range(dataset.position().epoch, 10):
                for batch in dataset.epoch(epoch):
                    state, metrics = trainer.step(state, batch)
                    checkpoints.after_step(state)

    Instance 0 alone reads and writes the folder. A checkpoint has all arrays of the state, the step, the seeds, R, the
    position in the data set, and what the program says of it. The arrays are copied before `save` returns; a thread
    writes the copy.

    Inside of the `with` statement SIGTERM and SIGUSR1 do not end the process: all instances save after the same step
    and leave together, see `after_step`.

    Args:
        directory: of instance 0; one for each job.
        trainer: its seed and its strategy's number of replicas are saved, and compared when restoring. A program that
            makes its steps itself gives an `OwnLoop`.
        dataset: whose position is saved and restored; None leaves that to the program.
        every: `after_step` saves when the step is a multiple of it, or as soon as it can after that.
        keep: how many checkpoints are kept, the newest.
        keep_best: which others are kept besides, by a metric that `save` or `after_step` gets.
        grace_s: how long poprun waits, after SIGTERM, for the last checkpoint.

    Attributes:
        extra: the program's own values, such as its best accuracy, by their names: saved with each checkpoint, and
            brought back by `restore` on all instances. See `save`.
        last_step: the step of which the last checkpoint is, that was begun or restored; None where there is none.

    Raises:
        CheckpointError: on instance 0 if orbax-checkpoint is not installed.
        TypeError: if `every` or `keep` is no integer.
        ValueError: if `every` or `keep` is not positive, or `grace_s` is no time.
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
        self._directory, self._keep, self._keep_best = checkpoint_folder(Path(directory)), keep, keep_best
        self._opened: CheckpointFolder | None = None
        _ = self._folder  # which may be refused
        self._thread = ThreadPoolExecutor(1, "checkpoints", _stand_back)
        self._writing: Future[None] | None = None
        self.extra: dict[str, Any] = {}
        self.last_step: int | None = None
        self._last_metrics: dict[str, float] = {}  # that were saved with it
        self._owns_folder = False
        self._is_due = False
        self._packing = Packing(())
        self._flat: dict[str, np.ndarray] = {}
        self._handlers: dict[signal.Signals, Any] = {}
        self._gathered_step: int | None = None
        self._last: tuple[TrainState, Mapping[str, Any] | None] | None = None  # to be saved, maybe by another instance
        self._seen: int | None = None  # the step of the last call of `after_step`, or of what was restored

    @property
    def _folder(self) -> CheckpointFolder | None:
        """Where instance 0 writes, which this one may become when others are lost; None on all others."""
        if self._strategy.instance_index != 0:
            return None
        if self._opened is None:
            self._opened = CheckpointFolder(self._directory, self._keep, self._keep_best)
        return self._opened

    def __enter__(self) -> Checkpoints:
        """From here on the process does not end by itself at the signals; in the main thread only."""
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._take_signal) for number in LEAVE_SIGNALS}
            self._strategy.progress.grace(self._grace_s)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for what is being written, also after an error.

        A collective call after none, where the others carry on when an instance is lost: they wait too, and if it is
        instance 0, the next one writes what was to be saved last.
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
        """The state of the newest whole checkpoint, and the data set where it was; a collective call.

        `extra` is then what was saved with it.

        Checkpoints that are incomplete or damaged are passed over, each with one warning.

        Args:
            state: what `Trainer.init` returned: names, shapes and dtypes are compared with it. Whether optimizer state
                was sharded when it was saved, or is now, does not matter.
            other_replicas: go on from a checkpoint of another number of replicas too. The bits are then not those of a
                training that never stopped, and the data set begins where the program says.

        Returns:
            `state` if there is no checkpoint.

        Raises:
            CheckpointError: on all instances if the checkpoint is of another number of replicas, of another seed or
                of other variables, or if all checkpoints are damaged; nothing has been changed then.
            ValueError: on all instances if the data set is read in another way than then.
        """
        require_switches(other_replicas=other_replicas)
        arrays = self._arrays_of(state)
        training, saved = self._read(arrays, other_replicas)
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
        received = {name: self._received(name, leaf, saved[name]) for name, leaf in arrays.items()}
        return _with_arrays(state, received, training.step)

    def save(
        self,
        state: TrainState,
        *,
        extra: Mapping[str, object] | None = None,
        metrics: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        """Begin to save the state.

        A step that was saved or restored last is saved again only where `extra` or `metrics` say something of it.

        Asks no other instance, unless optimizer state is sharded: it is then a collective call, and array after array
        is gathered on instance 0.

        Waits while the checkpoint before it is still being written. What cannot be written is one warning: the training
        goes on, and older checkpoints stay.

        Args:
            state: what `Trainer.init` or a step returned last.
            extra: the program's own values from here on, in place of those in the attribute `extra`: a dictionary of
                what JSON can write. Those of instance 0 are saved.
            metrics: what was measured with this state, such as the accuracy on other data, or what the step returned:
                a dictionary of numbers, by which `keep_best` chooses.

        Raises:
            CheckpointError: if the first checkpoint is not newer than those that are there; `restore` was not called.
            TypeError: if `extra` or `metrics` cannot be saved.
            ValueError: if a step has used the state up.
        """
        check_state(state)
        own, measured = plain_values(self.extra if extra is None else extra), plain_metrics(metrics or {})
        is_said = extra is not None or metrics is not None
        self.extra = self.extra if extra is None else dict(extra)
        folder = self._folder
        is_sharded = self._trainer.is_sharded
        if self._strategy.can_carry_on and not is_sharded:
            self._last = state, metrics
        packing = self._gather(state, is_said) if is_sharded else None
        if folder is None:
            self._owns_folder, self._is_due = True, False  # instance 0 sees to that
        is_saved = state.step == self.last_step
        if folder is None or (is_saved and not is_said) or (is_sharded and packing is None):
            return
        if self._owns_folder and not is_said and state.step in folder.steps():  # another instance, lost, has made it
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
                state.step, replicas, self._trainer.seed, position, packing, self._last_metrics, own
            )
            self._writing = self._thread.submit(self._write, folder, training, self._flat)

    def after_step(
        self,
        state: TrainState,
        *,
        extra: Mapping[str, object] | None = None,
        metrics: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        """Call it after every step, or some steps, on all instances: saves when it is time, or leaves if told to.

        It is time when the step is a multiple of `every`, or has passed one since the last call.

        The training does not wait for the disk: where the checkpoint before is still being written when the next one
        is due, that is made after the first step at which the writer is free. (Sharded optimizer state is gathered when
        it is due, because only instance 0 knows whether the writer is free; there training does wait.)

        An instance that gets SIGTERM or SIGUSR1 tells the others along with its next gradients. After that step all
        of them are here, wait until the state is saved, and leave.

        Args:
            state: see `save`.
            extra: see `save`.
            metrics: see `save`; not read where nothing is saved.

        Raises:
            SystemExit: 128 + the number of the signal, on all instances, once the state is saved.
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
        """On instance 0: see to it that what was to be saved last is, which may have been for another one to do."""
        state, metrics = self._last or (None, None)
        folder = self._folder
        if state is not None and folder is not None and not are_used_up(state.variables):
            is_begun = state.step == self.last_step or state.step in folder.steps()
            if not is_begun:
                self.save(state, metrics=metrics)
        self.wait()

    def wait(self) -> None:
        """Return when nothing is being written any more.

        Raises:
            CheckpointError: after `WRITE_LIMIT_S`.
        """
        if self._writing is None:
            return
        try:
            self._writing.result(WRITE_LIMIT_S)
        except TimeoutError as error:
            assert self._folder is not None
            raise CheckpointError(
                f"the checkpoint of step {self.last_step} in {self._folder.path} is still being written after "
                f"WRITE_LIMIT_S = {WRITE_LIMIT_S:g} s; look after that disk"
            ) from error
        self._writing = None

    # ---- saving

    def _arrays_of(self, state: TrainState) -> dict[str, Any]:
        return _named_arrays(self._trainer.whole(state))

    def _gather(self, state: TrainState, is_said: bool) -> Packing | None:
        """`_copy` on instance 0, while the others send their parts; None where that was done for this step.

        Args:
            state: see `save`.
            is_said: whether something new is said of it.
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
        """Copy the arrays to `_flat`, always the same memory: the next step gives up that of the state."""
        arrays = self._arrays_of(state)
        packing = Packing.of(arrays)
        if packing != self._packing:
            self._packing, self._flat = packing, packing.allocate()
        for name, copy in packing.views(self._flat).items():
            leaf = arrays[name]
            np.copyto(copy, leaf.gather(name) if isinstance(leaf, PartOfArray) else borrow(leaf))
        return packing

    def _write(self, folder: CheckpointFolder, training: SavedTraining, flat: Mapping[str, np.ndarray]) -> None:
        """In its thread. Metrics come first: steps before a checkpoint are not made again, so nobody tells of them."""
        for sinks in tuple(self._strategy.replicas.sinks):
            sinks.wait()
        try:
            folder.write(training, flat)
        except CheckpointError as error:
            self.last_step = None
            newest = folder.steps()[-1:]
            logger.warning(
                "checkpoint %s; training goes on, %s", error, f"step {newest[0]} is kept" if newest else "none is there"
            )

    # ---- restoring

    def _read(self, arrays: Mapping[str, Leaf], other_replicas: bool) -> tuple[SavedTraining | None, dict[str, Any]]:
        """Return what instance 0 has read, on all instances; the others keep their own arrays for now."""
        found, fault = None, ""
        if self._folder is not None:
            try:
                found = self._folder.read_newest()
                fault = self._mismatch(found[0], arrays, other_replicas) if found else ""
            except (CheckpointError, OSError) as error:
                fault = str(error)
        known = json.dumps([fault, found and found[0].to_json()])
        text = broadcast_text(self._strategy.communicator, known, 0, "what is known of the checkpoint")
        fault, training = json.loads(text)
        if fault:
            raise CheckpointError(fault)
        values = found[1] if found else {}
        if found and found[0].replicas != self._strategy.num_replicas_in_sync:
            values = {name: array for name, array in values.items() if not name.startswith(RESIDUALS)}
        return training and SavedTraining.from_json(training), {
            name: values[name] if name in values else _room(leaf) for name, leaf in arrays.items()
        }

    def _received(self, name: str, leaf: Leaf, array: Leaf) -> Any:
        """Return the array that takes the place of `leaf`, from the array that instance 0 has read. Collective."""
        if _is_on_host(leaf):  # JAX would take 32 of its 64 bits
            received = self._strategy.communicator.broadcast(np.array(array, order="C"), 0, name=name)
            return leaf.of(received) if isinstance(leaf, PartOfArray) else received
        return _like(leaf, self._strategy.broadcast({name: array})[name])

    def _mismatch(self, training: SavedTraining, arrays: Mapping[str, Leaf], other_replicas: bool) -> str:
        """Why the checkpoint cannot be the beginning of this training; empty if it can."""
        assert self._folder is not None
        what = f"the checkpoint of step {training.step} in {self._folder.path}"
        replicas, seed = self._strategy.num_replicas_in_sync, self._trainer.seed
        if training.replicas != replicas and not other_replicas:
            return (
                f"{what} was saved with {training.replicas} replicas, and this training has {replicas}; the number of "
                f"replicas decides the bits, that of instances does not: use {training.replicas} replicas, or "
                "restore(..., other_replicas=True)"
            )
        if training.seed != seed:
            return f"{what} was saved with the trainer's seed {training.seed}, and this training has {seed}"
        theirs, ours = training.packing.layouts, Packing.of(arrays).layouts
        names = theirs.keys() | ours.keys()
        if training.replicas != replicas:  # each replica has its own residuals
            names = {name for name in names if not name.startswith(RESIDUALS)}
        for name in sorted(names):
            there, here = theirs.get(name, "nothing"), ours.get(name, "nothing")
            if there != here:
                return (
                    f"{what} has {there} as {shown(name)}, and this training has {here}; use the same model and "
                    "optimizer"
                )
        return ""

    # ---- leaving

    def _take_signal(self, number: int, frame: object) -> None:
        self._trainer.notice.give(number)

    def _leave(self, state: TrainState, metrics: Mapping[str, ArrayLike] | None) -> None:
        def save_together() -> np.ndarray:
            self.save(state, metrics=metrics)
            self.wait()
            number = np.array([self._trainer.notice.number], np.int32)
            return self._strategy.communicator.all_reduce(number, "max", name="signal to leave")

        def catch_up() -> None:
            meet(self._strategy.replicas)

        # If the first instance is lost the next one saves; but no other one has its parts of sharded state.
        is_sharded = self._trainer.is_sharded
        number = save_together() if is_sharded else surviving(self._strategy.replicas, save_together, catch_up)
        if self._folder is not None:
            name = signal.Signals(int(number[0])).name
            logger.warning("%s: leaving after step %d; see %s", name, state.step, self._folder.path)
        raise SystemExit(128 + int(number[0]))


def _stand_back() -> None:
    """Let this thread, and those that it starts, have what time the training leaves over."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def _is_on_host(leaf: Leaf) -> bool:
    """Return whether a leaf is memory in which a training goes on, or a part of an array there."""
    return isinstance(leaf, HostArray) or (isinstance(leaf, PartOfArray) and isinstance(leaf.local, np.ndarray))


def _room(leaf: Leaf) -> Any:
    """Return an array of that shape and dtype, to be filled."""
    return np.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, PartOfArray) else leaf


def _like(leaf: Leaf, array: jax.Array) -> Any:
    """Return this instance's part of an array, placed like `leaf`."""
    if isinstance(leaf, PartOfArray):
        return leaf.of(array)
    return jax.device_put(array, leaf.sharding) if isinstance(leaf, jax.Array) and not is_key(leaf) else array


def _named_arrays(state: TrainState) -> dict[str, Any]:
    """All arrays of a state, those of random keys as what is inside, under names such as `.variables['w']`."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): jax.random.key_data(leaf) if is_key(leaf) else leaf for path, leaf in leaves}


def _with_arrays(state: TrainState, arrays: Mapping[str, jax.Array], step: int) -> TrainState:
    """A state like this one, with other arrays and another step."""

    def of(path: Any, leaf: Leaf) -> Any:
        array = arrays[jax.tree_util.keystr(path)]
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf)) if is_key(leaf) else array

    restored: TrainState = jax.tree_util.tree_map_with_path(of, state)
    return replace(restored, step=step)
