"""The results of a backward pass of all replicas in the program's own loop, and what each replica gives for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch

from collectives import Communicator
from strategies.errors import SpareError
from strategies.torch.device import HOST
from strategies.torch.distributed_model.weights import Named
from strategies.torch.replicas.module_parts import Slot
from strategies.torch.tensors import as_array, real_view


@dataclass(frozen=True)
class Turn:
    """The results of one replica's forward and backward pass.

    Attributes:
        loss: The loss; the sum of the weighted losses if they have weights.
        gradients: The `grad` of each parameter, by the parameter's id.
        came: The ids of the parameters to which this pass has added gradients.
        named_slots: The buffers and frozen parameters after the pass, by name, and whether the pass has changed them.
        losses: The loss of each micro-batch, without its weight.
        weight: The sum of the weights of the losses; None if they have no weights.
    """

    loss: float
    gradients: Mapping[int, torch.Tensor | None]
    came: frozenset[int]
    named_slots: Mapping[str, tuple[Slot, float]]
    losses: Sequence[torch.Tensor]
    weight: float | None = None

    @property
    def slots(self) -> list[Slot]:
        """The buffers and frozen parameters after the pass."""
        return [slot for slot, _ in self.named_slots.values()]

    def in_order(self, slots: Sequence[Slot]) -> list[tuple[Slot, float]]:
        """Return them in the order of the module's slots; one that is new stands for itself, as a changed one."""
        return [self.named_slots.get(slot.name, (slot, 1.0)) for slot in slots]

    def of(self, named: Named) -> list[torch.Tensor | None]:
        """Return the gradients of these parameters, None for parameters without one."""
        return [self.gradients.get(id(one)) if id(one) in self.came else None for _, one in named]


@dataclass(frozen=True)
class LoopMeans:
    """The results of a backward pass over all replicas, equal on all instances.

    Attributes:
        loss: The mean loss.
        gradients: The mean gradients, in the order of the plan; None for a parameter without one.
        buffers: The agreed values of the buffers and frozen parameters that have changed, by number.
        weight: The mean weight of the losses; None if they have no weights.
    """

    loss: float
    gradients: Sequence[torch.Tensor | None]
    buffers: Mapping[int, torch.Tensor]
    weight: float | None = None

    def kept(self) -> LoopMeans:
        """Return copies, which the program cannot change."""
        gradients = [None if one is None else one.detach().clone() for one in self.gradients]
        buffers = {number: one.clone() for number, one in self.buffers.items()}
        return LoopMeans(self.loss, gradients, buffers, self.weight)


def received_means(
    means: LoopMeans | None,
    named: Named,
    slots: Mapping[int, torch.Tensor],
    communicator: Communicator,
    root: int,
) -> LoopMeans:
    """Return the means that an instance has. Collective.

    Args:
        means: The means on instances that have them; None elsewhere.
        named: The parameters of the plan.
        slots: Tensors in the shapes of the buffers and frozen parameters, by number.
        communicator: The communicator of all instances.
        root: The rank of an instance that has the means.
    """
    known = np.zeros(3 + len(named) + len(slots), np.float64)
    if means is not None:
        flags = [one is not None for one in means.gradients]
        weight = (0.0, 0.0) if means.weight is None else (1.0, means.weight)
        known[:] = [means.loss, *weight, *flags, *(number in means.buffers for number in sorted(slots))]
    communicator.broadcast(known, root, name="which means there are")
    has_gradient, has_changed = np.split(known[3:] > 0, [len(named)])
    gradients: list[torch.Tensor | None] = [None] * len(named)
    for number in np.flatnonzero(has_gradient).tolist():
        name, parameter = named[number]
        own = None if means is None else means.gradients[number]
        shape = parameter.detach() if own is None else own
        gradients[number] = _received(f"mean gradient of {name}", shape, communicator, root)
    buffers = {}
    for number in np.flatnonzero(has_changed).tolist():
        shape = slots[number] if means is None else means.buffers[number]
        buffers[number] = _received(f"buffer {number}", shape, communicator, root)
    return LoopMeans(float(known[0]), gradients, buffers, float(known[2]) if known[1] else None)


def _received(name: str, like: torch.Tensor, communicator: Communicator, root: int) -> torch.Tensor:
    copy = like.detach().to(HOST, copy=True, memory_format=torch.contiguous_format)
    communicator.broadcast(as_array(real_view(copy)), root, name=name)
    return copy.to(like.device)


def refuse_spares(told: object) -> NoReturn:
    """Raise on a spare, given the result of an operation that it cannot replay."""
    raise SpareError(
        "a spare cannot follow the loop of a DistributedModel, because it would not get the optimizer and other state "
        "of the loop; use strategies.torch.Trainer, or start the job without spares. The job goes on without this spare"
    )
