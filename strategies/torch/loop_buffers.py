"""The buffers and frozen parameters of a module in the program's own loop, and whether forward passes change them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from strategies.torch.parameter_writes import ForwardWatch
from strategies.torch.replicas.buffers import ModelBuffers
from strategies.torch.replicas.module_parts import Slot
from strategies.torch.tensors import have_same_bits


class LoopBuffers:
    """The values with which a step begins, and the changes since.

    Args:
        module: The module.
        model: The buffers on which replicas agree.

    Attributes:
        writes: The watch over frozen parameters that forward passes write.
    """

    def __init__(self, module: torch.nn.Module, model: ModelBuffers) -> None:
        self._model = model
        self.writes = ForwardWatch(module, model.declared)
        self._masters: dict[str, torch.Tensor] = {}
        self.begin_with({})

    def begin_with(self, known: Mapping[str, torch.Tensor]) -> None:
        """Copy the buffers, to find changes later: the `known` value of a buffer, or else its present value."""
        buffers = [slot for slot in self._model.slots if not slot.is_parameter]
        self._masters = {slot.name: known.get(slot.name, slot.tensor.detach()).clone() for slot in buffers}

    def follow(self) -> None:
        """Find the buffers that the module has now. New ones count as changed."""
        known = {slot.name for slot in self._model.slots}
        self._model.follow()
        self.begin_with(self._masters)
        slots = enumerate(self._model.slots)
        self._model.moving |= {number for number, slot in slots if slot.name not in known and not slot.is_parameter}

    def has_changed(self, number: int, slot: Slot) -> bool:
        """Return whether forward passes have changed a buffer or a frozen parameter."""
        if slot.is_parameter:
            return slot.name in self.writes.frozen
        return number in self._model.moving or not have_same_bits(slot.tensor, self._masters[slot.name])

    def keep(self, values: dict[int, torch.Tensor]) -> None:
        """Put the values on which all replicas have agreed into buffers and frozen parameters, by their numbers."""
        self._model.keep(values)
        for slot in map(self._model.slots.__getitem__, values):
            if not slot.is_parameter:
                self._masters[slot.name] = slot.tensor.detach().clone()
        self.writes.frozen.clear()
