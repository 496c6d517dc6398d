"""The place of a Lightning loop in its epoch, which checkpoints have, with the states of samplers and generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import TypeAlias, final

import numpy as np
import pytorch_lightning as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop
from pytorch_lightning.utilities import move_data_to_device
from torch.utils.data import Sampler

from strategies.torch.tensors import HOST
from strategies.typing import Tree

_ROWS = "data_source"
"""The attribute in which samplers of PyTorch keep the data set."""

Access: TypeAlias = tuple[Callable[[], Tree], Callable[[Tree], object]]
"""Functions that read and write a state."""


def states_of(sampler: object) -> dict[str, Tree]:
    """Return the states that decide which order a sampler draws next, by the names of attributes.

    These are the states of random generators of PyTorch, NumPy and Python in attributes of the sampler, of samplers in
    it, and of lists, tuples and dictionaries there. A sampler with `state_dict` and `load_state_dict` has the state
    that it returns. `torch.load(weights_only=True)` reads them.

    Args:
        sampler: The sampler, or another iterable; or a dictionary of generators.
    """
    return {name: read() for name, (read, _) in _stateful(sampler, "", set(), not isinstance(sampler, dict))}


def write_states(sampler: object, states: Mapping[str, Tree]) -> None:
    """Set the states that `states_of` has returned. States of attributes that are missing are left out."""
    for name, (_, write) in _stateful(sampler, "", set(), not isinstance(sampler, dict)):
        if name in states:
            write(states[name])


def _stateful(value: Tree, name: str, known: set[int], is_sampler: bool) -> Iterator[tuple[str, Access]]:
    """Yield the names of the states in a value, each once, and the access to them."""
    if id(value) in known:
        return
    known.add(id(value))
    if access := _access_to(value):
        yield name, access
    elif is_sampler and hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        yield name, (value.state_dict, value.load_state_dict)
    elif is_sampler:
        for attribute, part in getattr(value, "__dict__", {}).items():
            if attribute != _ROWS:
                yield from _stateful(part, f"{name}.{attribute}", known, isinstance(part, Sampler))
    elif isinstance(value, list | tuple | dict):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _stateful(part, f"{name}.{key}", known, isinstance(part, Sampler))


def _access_to(generator: object) -> Access | None:
    """Return the access to the state of a generator of random numbers; None for other objects."""
    match generator:
        case torch.Generator():
            return generator.get_state, generator.set_state
        case random.Random() if not isinstance(generator, random.SystemRandom):
            return generator.getstate, generator.setstate
        case np.random.RandomState():
            return lambda: _plain(generator.get_state(legacy=False)), generator.set_state
        case np.random.Generator():
            return _access_to(generator.bit_generator)
        case np.random.BitGenerator():
            return lambda: _plain(generator.state), partial(setattr, generator, "state")
    return None


def _plain(state: Tree) -> Tree:
    """Return a state of NumPy with lists in place of arrays."""
    if isinstance(state, np.ndarray):
        return state.tolist()
    return {name: _plain(one) for name, one in state.items()} if isinstance(state, dict) else state


_PROGRESS = "epoch_loop.batch_progress"
_LOADERS = "combined_loader"  # Lightning's key of the states of training loaders
_OF_PROCESS = {"torch": torch.default_generator, "numpy": np.random.mtrand._rand, "python": random._inst}
"""The generators from which hooks of modules and callbacks draw."""


def is_in_batch(trainer: pl.Trainer) -> bool:
    """Return whether a batch of the training has begun, and its step is not done."""
    batches = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(batches.ready > batches.processed)


def place_of(trainer: pl.Trainer) -> dict[str, Tree]:
    """Return what a checkpoint of a training needs besides Lightning's part. Collective.

    Returns:
        States of the validation's loaders and of the generators of the process; the epochs in which loaders were made;
        values of metrics; whether the validation after the last batch is over; gradients if the optimizer has not used
        them yet.
    """
    fit = trainer.fit_loop
    loop, validation = fit.epoch_loop, fit.epoch_loop.val_loop
    batches, seen = loop.batch_progress.current, validation.batch_progress
    is_last = batches.processed == batches.ready and loop._num_ready_batches_reached()
    means = [loop._results._forked_name(one, on_step=False)[1] for one in loop._results.values() if one.meta.on_epoch]
    state = {
        "loaders": validation._combined_loader._state_dicts() if validation._combined_loader is not None else [],
        "made": [validation._last_val_dl_reload_epoch, fit._last_train_dl_reload_epoch],
        "generators": states_of(_OF_PROCESS),
        "metrics": {
            name: move_data_to_device(one, HOST) for name, one in trainer.callback_metrics.items() if name not in means
        },
        "means": [] if is_last else means,
        "validated": trainer.validating
        and seen.is_last_batch
        and seen.current.completed == seen.current.ready
        and not validation._logged_outputs,  # on_validation_epoch_end may still log
    }
    if batches.processed % trainer.accumulate_grad_batches and not is_last:
        module = trainer.lightning_module
        state["gradients"] = {name: one.grad.cpu() for name, one in module.named_parameters() if one.grad is not None}
    return state


@final
class ResumedPlace:
    """The place at which a training goes on.

    Lightning goes on with the next batch. A checkpoint may be older than what follows a batch: a validation, updates of
    ReduceLROnPlateau, the end of the epoch. This is made up for.

    Args:
        checkpoint: The checkpoint. Its part for Lightning's loops is changed: a batch counts as done if its step is
            done, and only then; states of loaders are taken out.
        state: The result of `place_of`, or an empty dictionary.
    """

    def __init__(self, checkpoint: Mapping[str, Tree], state: Mapping[str, Tree]) -> None:
        self._state = state
        loops = checkpoint["loops"]["fit_loop"]
        batches, epochs = loops[_PROGRESS], loops["epoch_progress"]
        states = list(loops["state_dict"].pop(_LOADERS, []))  # Lightning would not load them between two epochs
        of_batch, of_epoch = batches["current"], epochs["current"]
        if of_batch["ready"] > of_batch["processed"]:
            for one in states:
                one["given"] = max(0, one["given"] - 1)
        self._ends_batch = bool(state) and 0 < of_batch["processed"] == of_batch["ready"]
        self._ends_epoch = bool(state) and of_epoch["completed"] < of_epoch["processed"] == of_epoch["ready"]
        for progress, ends in ((batches, self._ends_batch), (epochs, self._ends_epoch)):
            for counts in (progress["current"], progress["total"]) if ends else ():
                counts["completed"] = counts["processed"]
        self._loaders = {True: states, False: list(state.get("loaders", []))}
        self._made = list(state.get("made", ()))  # empty in checkpoints of version 0.1

    def state_of_loader(self, trainer: pl.Trainer, is_training: bool) -> Mapping[str, Tree] | None:
        """Return the state of the next loader that is made; None if it begins anew."""
        states, fit = self._loaders[is_training], trainer.fit_loop
        if self._made and (every := trainer.reload_dataloaders_every_n_epochs):
            loop, epoch = fit if is_training else fit.epoch_loop.val_loop, trainer.current_epoch
            if epoch - self._made[is_training] >= every:  # a training without a stop makes its loaders anew, too
                self._made[is_training] = epoch
                if loop._data_source.is_module():
                    states.clear()
            fit.epoch_loop.val_loop._last_val_dl_reload_epoch = self._made[False]
        return states.pop(0) if states else None

    def enter(self, trainer: pl.Trainer) -> None:
        """Go on there. Called when Lightning's loops have their state, and before the first batch."""
        state, fit, loop = self._state, trainer.fit_loop, trainer.fit_loop.epoch_loop
        is_inside = loop.restarting and fit.epoch_progress.current.ready > fit.epoch_progress.current.processed
        if is_in_batch(trainer):
            batches = loop.batch_progress
            batches.total.ready = batches.total.started = batches.total.completed
            rank_zero_warn(
                f"the checkpoint was written in batch {batches.current.processed} of epoch {trainer.current_epoch}, "
                "which begins again, so accumulated gradients, buffers and hooks may see it twice; save checkpoints in "
                "on_train_batch_end, when the step is done",
            )
        if is_inside:
            _warn_of_means(trainer, state.get("means", ()))
        fit._restarting = False  # else the first epoch ends without updates of ReduceLROnPlateau
        if not state:
            return
        fit._last_train_dl_reload_epoch = self._made[True]
        metrics = move_data_to_device(state["metrics"], trainer.strategy.root_device)
        trainer._logger_connector._callback_metrics.update(metrics)
        parameters = dict(trainer.lightning_module.named_parameters())
        for name, gradient in state.get("gradients", {}).items():
            parameters[name].grad = gradient.to(parameters[name].device)
        write_states(_OF_PROCESS, state["generators"])
        if is_inside and self._ends_batch:
            _end_batch_first(loop, state["validated"])
        elif not is_inside:
            loop.restarting = False
        if self._ends_epoch:
            progress = fit.epoch_progress.current
            progress.completed -= 1  # the number of the epoch that ends
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
            progress.completed += 1


def _end_batch_first(loop: _TrainingEpochLoop, is_validated: bool) -> None:
    """Let the first turn of the loop do what follows a batch, without a batch."""

    def advance(data_fetcher: object) -> None:
        del loop.advance
        loop.val_loop.restarting, loop._skip_next_val = False, is_validated

    loop.advance = advance


def _warn_of_means(trainer: pl.Trainer, means: Collection[str]) -> None:
    users = {getattr(one, "monitor", None): type(one).__name__ for one in trainer.callbacks}
    users |= {
        one.monitor: type(one.scheduler).__name__ for one in trainer.lr_scheduler_configs if one.reduce_on_plateau
    }
    for name in sorted(set(means) & users.keys()):
        rank_zero_warn(
            f"{users[name]} depends on {name}, a value over a whole epoch, but this training resumes in the middle of "
            "one, and Lightning does not save the values of its first batches; save checkpoints at the end of epochs, "
            "or depend on a value of the validation",
        )
