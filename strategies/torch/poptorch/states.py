"""Buffers that an inference writes, such as counters and caches: the next call goes on with them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from strategies.torch.module_parts import slots_of

logger = logging.getLogger(__name__)


class States:
    """Buffers of an inference model that `forward` has written: a single replica writes those of the module.

    Several replicas have some of their own each, as in PopTorch; the module keeps what it has.

    Args:
        module: of which they are.
        count: of local replicas.
        is_single: whether there is one replica on all instances.
    """

    def __init__(self, module: torch.nn.Module, count: int, is_single: bool) -> None:
        self._module, self._is_single = module, is_single
        self._own: list[dict[int, torch.Tensor]] = [{} for _ in range(count)]

    @property
    def masters(self) -> Sequence[Sequence[torch.Tensor]] | None:
        """The buffers with which each local replica begins; None for those of the module."""
        if not any(self._own):
            return None
        of_module = [slot.tensor for slot in slots_of(self._module)]
        return [[own.get(number, tensor) for number, tensor in enumerate(of_module)] for own in self._own]

    def keep(self, written: Sequence[Mapping[int, torch.Tensor]]) -> None:
        """Go on with what a call has written, for each local replica."""
        if not any(written):
            return
        if self._is_single:
            self._into_module(written[0])
            return
        if not any(self._own):
            logger.info("an inference writes buffers of its module: each replica goes on with its own")
        for own, new in zip(self._own, written, strict=True):
            own.update({number: tensor.clone() for number, tensor in new.items()})

    def _into_module(self, written: Mapping[int, torch.Tensor]) -> None:
        slots = slots_of(self._module)
        with torch.no_grad():
            for number, tensor in written.items():
                slot = slots[number]
                if slot.tensor.shape == tensor.shape:
                    slot.tensor.copy_(tensor)
                else:
                    slot.holder[slot.key] = tensor.clone()
