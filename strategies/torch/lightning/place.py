"""The place of an instance in a Lightning job, and of a loop in its epoch."""

from __future__ import annotations

import random
import warnings
from collections.abc import Collection, Mapping
from typing import NoReturn, final

import numpy as np
import pytorch_lightning as pl
import torch
from lightning_fabric.plugins import ClusterEnvironment
from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop
from pytorch_lightning.utilities import move_data_to_device
from typing_extensions import override

from strategies.errors import StrategyError
from strategies.strategy import Strategy
from strategies.torch.lightning.loader import states_of, write_states
from strategies.typing import Tree


@final
class PopDistEnvironment(ClusterEnvironment):
    """The instances of a strategy. A process of Lightning is an instance, which may drive several replicas.

    Args:
        strategy: The strategy that connects the instances.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._instance, self._hosts = strategy.instance, strategy.communicator.hosts

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        self._refuse_process_groups()

    @property
    @override
    def main_port(self) -> int:
        self._refuse_process_groups()

    @staticmethod
    @override
    def detect() -> bool:
        """Return False: the strategy brings its environment, and other strategies need another one."""
        return False

    @override
    def world_size(self) -> int:
        return self._instance.count

    @override
    def set_world_size(self, size: int) -> None:
        """Ignore the number: the launcher has started the instances."""

    @override
    def global_rank(self) -> int:
        return self._instance.index

    @override
    def set_global_rank(self, rank: int) -> None:
        """Ignore the number: the launcher has numbered the instances."""

    @override
    def local_rank(self) -> int:
        return self._instance.local_index

    @override
    def node_rank(self) -> int:
        return self._hosts[self._instance.index]

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise if a program's numbers differ from the job's.

        Raises:
            StrategyError: If `num_devices` is neither 1 nor the number of this host's instances, or `num_nodes` is
                neither 1 nor the number of hosts.
        """
        hosts = len(set(self._hosts))
        here = self._hosts.count(self.node_rank())
        for name, number, count in (("devices", num_devices, here), ("num_nodes", num_nodes, hosts)):
            if number not in (1, count):
                raise StrategyError(
                    f"the program asks Lightning for {name}={number}, but the launcher has started "
                    f"{self._instance.count} instances, {here} of them on this host, on {hosts} "
                    f"{'host' if hosts == 1 else 'hosts'}; leave out {name}, and give the numbers to poprun: "
                    "poprun --num-instances 2 --num-replicas 4 python train.py"
                )

    def _refuse_process_groups(self) -> NoReturn:
        raise StrategyError(
            "PopDist's strategy connects the instances without a process group of torch.distributed, so there is no "
            "address for one; call torch.distributed.init_process_group with an address of your own"
        )


_HOST = torch.device("cpu")
_PROGRESS = "epoch_loop.batch_progress"
_LOADERS = "combined_loader"  # Lightning's key of the states of training loaders


def _of_process() -> dict[str, Tree]:
    """Return the generators from which hooks of modules and callbacks draw."""
    return {"torch": torch.default_generator, "numpy": np.random.mtrand._rand, "python": random._inst}


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
        "generators": states_of(_of_process()),
        "metrics": {
            name: move_data_to_device(one, _HOST) for name, one in trainer.callback_metrics.items() if name not in means
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
            _warn(
                trainer,
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
        trainer._logger_connector._callback_metrics.update(
            move_data_to_device(state["metrics"], trainer.strategy.root_device)
        )
        parameters = dict(trainer.lightning_module.named_parameters())
        for name, gradient in state.get("gradients", {}).items():
            parameters[name].grad = gradient.to(parameters[name].device)
        write_states(_of_process(), state["generators"])
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
        _warn(
            trainer,
            f"{users[name]} depends on {name}, a value over a whole epoch, but this training resumes in the middle of "
            "one, and Lightning does not save the values of its first batches; save checkpoints at the end of epochs, "
            "or depend on a value of the validation",
        )


def _warn(trainer: pl.Trainer, message: str) -> None:
    if trainer.is_global_zero:
        warnings.warn(message, UserWarning, stacklevel=2)
