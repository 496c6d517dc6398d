"""The local replicas in the program's own loop, which take turns with the module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from collectives.instruments import EXCHANGE, FORWARD_BACKWARD
from strategies.core.journal import Recorded
from strategies.core.survival import lost_with_an_instance, meet, surviving, warn_of_loss
from strategies.errors import StrategyError
from strategies.jax.replicas.replicas import Replicas
from strategies.outcome import Outcome
from strategies.torch.distributed_model.averaging import GradientAveraging
from strategies.torch.distributed_model.means import LoopMeans, Turn, refuse_spares
from strategies.torch.distributed_model.parts import AveragedParts
from strategies.torch.outcomes import outcome_of, weighted_value
from strategies.torch.replicas.attributes import Attributes
from strategies.torch.replicas.guard import refuse_difference
from strategies.torch.replicas.sync_batch_norm import sync_layers_of
from strategies.torch.replicas.turns import Gradients, ReplicaTurns, TurnsOfStep
from strategies.torch.tensors import parts_of, tensors_of
from strategies.typing import Batch

LossOfBatch = Callable[[Batch], torch.Tensor | Outcome]
"""(rows of one replica) -> loss, or `Outcome` with the loss and its weight."""


class LoopTurns:
    """The local replicas of a `DistributedModel`.

    Args:
        module: The module.
        replicas: The replicas of all instances.
        averaging: The averaging of the module's gradients.

    Attributes:
        attributes: The attributes of the module, of which each replica has its own.
    """

    def __init__(self, module: torch.nn.Module, replicas: Replicas, averaging: GradientAveraging) -> None:
        self._module, self._replicas, self._averaging = module, replicas, averaging
        self._has_warned = False
        self.attributes = Attributes(module)
        self._turns: ReplicaTurns[Turn] | None = None
        self._key: object = None
        self._first_step = 0
        self._is_repetition = False

    def backward(self, loss_fn: LossOfBatch, batch: Batch, micro_batches: int) -> torch.Tensor:
        """Let every local replica compute, and average the gradients; see `DistributedModel.backward`. Collective."""
        replicas = self._replicas
        batch = replicas.up_to_date(batch)
        self._refuse_passes_before()
        self._warn(batch)
        averaging = self._averaging
        known = averaging.parts.known
        begin = {one: _copy(one.grad) for one in self._module.parameters()}
        self._is_repetition = False

        def attempt() -> LoopMeans:
            averaging.connect(known)
            self._refuse_sync_layers()
            replicas.dealing.refuse_others(batch)
            local = replicas.local_replicas
            parts = parts_of(tensors_of(batch), len(local) * micro_batches)
            losses = [partial(loss_fn, part) for part in parts]
            columns = [losses[place * micro_batches :][:micro_batches] for place in range(len(local))]
            with replicas.instruments.during[FORWARD_BACKWARD]:
                turns = self._taken(columns, begin)
            with replicas.instruments.during[EXCHANGE]:
                return self._averaged(turns)

        def catch_up() -> LoopMeans | None:
            nonlocal batch
            meeting = meet(replicas)
            if meeting.is_late:
                return self._taken_over(self._averaging.shared(None, meeting.newest), begin)
            batch = replicas.replicas_batch(batch)
            return None

        recorded = Recorded[LoopMeans]("backward pass of all replicas", lambda means: bool, refuse_spares)
        means = surviving(replicas, attempt, catch_up, self._averaging.shared, recorded)
        self._averaging.end_step(means.weight, self._averaging.loop.step - 1)
        return torch.tensor(means.loss)

    # ---- one replica after another

    def _taken(
        self, losses: Sequence[Sequence[Callable[[], object]]], begin: Mapping[torch.nn.Parameter, torch.Tensor | None]
    ) -> list[Turn]:
        """Let the local replicas compute, each with the gradients of the beginning."""
        self._averaging.follow()
        turns, local = self._turns_with(self._averaging.parts), self._replicas.local_replicas
        step = self._averaging.loop.step
        number, device = step - self._first_step + 1, self._averaging.parts.device
        of_step = TurnsOfStep(step, number, local, device, self._is_repetition)
        self._is_repetition = True
        found: list[Turn] = []
        every = [partial(self._turn, turns, *pair, begin) for pair in zip(local, losses, strict=True)]
        turns.run(of_step, every, every[0], lambda place, turn, gradients: found.append(turn))
        if turns.repeats_in(of_step):
            refuse_difference(self._replicas, turns.guard.found, step)
        return found

    def _turns_with(self, parts: AveragedParts) -> ReplicaTurns[Turn]:
        """Return the turns. If other instances or parts are there, it is not known what they write."""
        if parts.is_behind:
            parts.changes.follow()
            self.attributes.follow()
        key = self._replicas.communicator, self._replicas.local_replicas
        if self._key != key or parts.is_behind:
            self._key, self._first_step = key, self._averaging.loop.step
        if self._turns is None or self._turns.state.buffers is not parts.buffers:
            count, may_repeat = self._replicas.num_replicas_in_sync, self._replicas.can_carry_on
            self._turns = ReplicaTurns(self._module, parts.watch, parts.buffers, self.attributes, count, may_repeat)
        return self._turns

    def _turn(
        self,
        turns: ReplicaTurns[Turn],
        replica: int,
        losses: Sequence[Callable[[], object]],
        begin: Mapping[torch.nn.Parameter, torch.Tensor | None],
    ) -> tuple[Turn, Gradients]:
        averaging = self._averaging
        parts, loop = averaging.parts, averaging.loop
        for parameter, gradient in begin.items():
            parameter.grad = _copy(gradient)
        with turns.of(replica, parts.device), loop.turn(replica), torch.enable_grad():
            of_losses, total = [], 0.0
            for number, loss in enumerate(losses):
                loop.seed_micro_batch(number, parts.device)
                value, weighted = self._backward(loss)
                of_losses.append(value)
                total += weighted
            came, weight = frozenset(loop.carried), loop.weights.total
            if not averaging.is_alone:
                parts.refuse_gradients_that_are_gone(came)
            gradients = {id(one): one.grad for one in averaging.parameters}
            state = turns.state
            changes = state.changes(replica, parts.buffers.moving, self._replicas.num_replicas_in_sync)
            slots = {
                slot.name: (slot, float(changed)) for slot, changed in zip(state.slots(changes), changes, strict=True)
            }
        for parameter in begin:
            parameter.grad = None
        trained = [gradients[id(one)] for one in averaging.parameters if one.requires_grad]
        return Turn(total, gradients, came, slots, of_losses, weight), trained

    def _backward(self, compute: Callable[[], object]) -> tuple[torch.Tensor, float]:
        """Make a backward pass, and return its loss, and the same times its weight if it has one."""
        outcome = outcome_of(compute)
        loss, weight = outcome.loss, outcome.weight
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = f" of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
            raise TypeError(f"loss_fn has returned a {type(loss).__name__}{shape}; return the loss, a scalar tensor")
        if outcome.metrics or outcome.outputs is not None:
            raise TypeError("loss_fn has returned metrics or outputs, which a loop can keep by itself; return the loss")
        if weight is None:
            loss.backward()
        else:
            self._averaging.weighted_backward(loss, weight)
        return loss.detach(), weighted_value(float(loss.detach()), weight)

    def _averaged(self, turns: Sequence[Turn]) -> LoopMeans:
        """Average the results of all turns. Afterwards the module has the means."""
        averaging = self._averaging
        means = averaging.average(turns)
        for parameter in averaging.parameters:
            parameter.grad = turns[0].gradients.get(id(parameter))
        for (_, parameter), mean in zip(averaging.parts.named if means.gradients else (), means.gradients, strict=True):
            parameter.grad = parameter.grad if mean is None else mean
        averaging.loop.next_step()
        return means.kept() if self._replicas.can_carry_on else means

    def _taken_over(self, means: LoopMeans, begin: Mapping[torch.nn.Parameter, torch.Tensor | None]) -> LoopMeans:
        """Put the means of a step that the others have completed into the module."""
        averaging = self._averaging
        for parameter, gradient in begin.items():
            parameter.grad = gradient
        for (_, parameter), gradient in zip(averaging.parts.named, means.gradients, strict=True):
            if gradient is not None:
                parameter.grad = gradient.clone()
        averaging.parts.changes.keep(dict(means.buffers))
        averaging.loop.next_step()
        return means

    # ---- what is refused

    def _refuse_passes_before(self) -> None:
        loop = self._averaging.loop
        if not loop.syncs or loop.carried:
            raise StrategyError(
                "model.backward computes a whole step of each replica, and backward passes inside no_sync cannot be a "
                "part of it; use model.backward(loss_fn, batch, micro_batches=2)"
            )

    def _refuse_sync_layers(self) -> None:
        local = len(self._replicas.local_replicas)
        if local > 1 and (layers := sync_layers_of(self._module)):
            raise StrategyError(
                f"SyncBatchNorm {next(iter(layers))!r} needs all replicas at the same time, but the {local} replicas "
                "of this instance compute one after another; use BatchNorm, or strategies.torch.Trainer"
            )

    def _warn(self, batch: Batch) -> None:
        """Warn once if the others cannot go on without a lost instance."""
        if self._has_warned:
            return
        self._has_warned = True
        reason = lost_with_an_instance(False, self._replicas.dataset_of(batch))
        if layers := sync_layers_of(self._module):
            reason = f"SyncBatchNorm {next(iter(layers))!r} needs one replica on each instance"
        warn_of_loss(self._replicas, reason)


def _copy(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.detach().clone()
