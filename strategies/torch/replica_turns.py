"""The local replicas in the program's own loop, which compute one after another with the same module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from collectives.instruments import EXCHANGE, FORWARD_BACKWARD
from strategies.core.journal import Recorded
from strategies.core.survival import lost_with_an_instance, meet, surviving, warn_of_loss
from strategies.errors import StrategyError
from strategies.jax.replicas.replicas import Replicas
from strategies.outcome import Outcome
from strategies.torch.gradient_averaging import GradientAveraging
from strategies.torch.loop_means import LoopMeans, Turn, refuse_spares
from strategies.torch.replicas.module_parts import Slot, slots_of
from strategies.torch.outcomes import outcome_of, weighted_value
from strategies.torch.replicas.sync_batch_norm import sync_layers_of
from strategies.torch.tensors import parts_of, tensors_of
from strategies.typing import Batch

LossOfBatch = Callable[[Batch], torch.Tensor | Outcome]
"""(rows of one replica) -> loss, or `Outcome` with the loss and its weight."""


@dataclass(frozen=True)
class _Beginning:
    """The gradients, buffers and declared frozen parameters with which every replica begins.

    Attributes:
        gradients: The `grad` of each parameter.
        slots: The slots that a pass may change, with their values.
        own: The values of slots that each replica keeps for itself, by name.
    """

    gradients: Mapping[torch.nn.Parameter, torch.Tensor | None]
    slots: Sequence[tuple[Slot, torch.Tensor]]
    own: Mapping[str, torch.Tensor]


class ReplicaTurns:
    """The local replicas of a `DistributedModel`.

    Args:
        module: The module.
        replicas: The replicas of all instances.
        averaging: The averaging of the module's gradients.
    """

    def __init__(self, module: torch.nn.Module, replicas: Replicas, averaging: GradientAveraging) -> None:
        self._module, self._replicas, self._averaging = module, replicas, averaging
        self._has_warned = False

    def backward(self, loss_fn: LossOfBatch, batch: Batch, micro_batches: int) -> torch.Tensor:
        """Let every local replica compute, and average the gradients; see `DistributedModel.backward`. Collective."""
        replicas = self._replicas
        batch = replicas.up_to_date(batch)
        self._refuse_passes_before()
        self._warn(batch)
        known = self._averaging.parts.known
        begin = self._beginning() if replicas.can_carry_on or len(replicas.local_replicas) > 1 else None

        def attempt() -> LoopMeans:
            self._averaging.connect(known)
            self._refuse_sync_layers()
            replicas.dealing.refuse_others(batch)
            local = replicas.local_replicas
            parts = parts_of(tensors_of(batch), len(local) * micro_batches)
            losses = [partial(loss_fn, part) for part in parts]
            with replicas.instruments.during[FORWARD_BACKWARD]:
                turns = [
                    self._turn(replica, losses[place * micro_batches :][:micro_batches], begin)
                    for place, replica in enumerate(local)
                ]
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

    def _beginning(self) -> _Beginning:
        """Return copies of all that a pass changes, so that every replica, and a repetition, begins alike."""
        parameters, buffers = self._module.parameters(), self._averaging.parts.buffers
        buffers.follow_shown()
        written = buffers.written
        slots = [slot for slot in slots_of(self._module) if not slot.is_parameter or slot.name in written]
        kept = [(slot, slot.tensor.detach().clone()) for slot in slots]
        own = {buffers.slots[number].name: one.clone() for number, one in buffers.own.items()}
        return _Beginning({one: _copy(one.grad) for one in parameters}, kept, own)

    def _turn(self, replica: int, losses: Sequence[Callable[[], object]], begin: _Beginning | None) -> Turn:
        averaging = self._averaging
        if begin is not None:
            self._begin(replica, begin)
        with averaging.loop.turn(replica), torch.enable_grad():
            total = sum(map(self._backward, losses))
            came, weight = frozenset(averaging.loop.carried), averaging.loop.weights.total
        if not averaging.is_alone:
            averaging.parts.refuse_gradients_that_are_gone(came)
        parameters = averaging.parameters
        gradients = {id(one): one.grad for one in parameters}
        slots: Mapping[str, Slot] = {}
        if begin is not None:
            averaging.parts.refuse_new_parts()
            self._refuse_writes()
            for one in parameters:
                one.grad = None
            slots = {slot.name: slot.copied() for slot, _ in begin.slots}
        return Turn(total, gradients, came, slots, weight)

    def _backward(self, compute: Callable[[], object]) -> float:
        """Make a backward pass, and return its loss, times its weight if it has one."""
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
        return weighted_value(float(loss.detach()), weight)

    def _begin(self, replica: int, begin: _Beginning) -> None:
        """Give a replica the gradients and buffers with which it begins."""
        buffers = self._averaging.parts.buffers
        for parameter, gradient in begin.gradients.items():
            parameter.grad = _copy(gradient)
        with torch.no_grad():
            for number, one in buffers.own.items():
                one.copy_(begin.own.get(buffers.slots[number].name, one))
            for slot, value in begin.slots:
                own = begin.own.get(slot.name)
                slot.put(value if own is None else own[replica])

    def _averaged(self, turns: Sequence[Turn]) -> LoopMeans:
        """Average the results of all turns. Afterwards the module has the means."""
        averaging = self._averaging
        means = averaging.average(turns)
        for parameter in averaging.parameters:
            parameter.grad = turns[0].gradients.get(id(parameter))
        averaging.loop.next_step()
        return means.kept() if self._replicas.can_carry_on else means

    def _taken_over(self, means: LoopMeans, begin: _Beginning | None) -> LoopMeans:
        """Put the means of a step that the others have completed into the module."""
        averaging = self._averaging
        assert begin is not None
        for parameter, gradient in begin.gradients.items():
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

    def _refuse_writes(self) -> None:
        averaging = self._averaging
        if unknown := sorted(averaging.parts.changes.writes.frozen - averaging.parts.buffers.written):
            raise StrategyError(
                f"{unknown[0]} is a frozen parameter that forward passes write, and every replica of this instance "
                f"must begin with the same value; declare it: model_state_aggregation={ {unknown[0]: 'mean'} }"
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
