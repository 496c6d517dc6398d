"""In which stages of a pipeline the buffers of a module are used, found out while one micro-batch goes through it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import torch
from torch.overrides import TorchFunctionMode

from strategies.errors import StrategyError
from strategies.torch.module_parts import Slot, slots_of


class BufferUses(TorchFunctionMode):
    """Watches what the operators of PyTorch are given, in the thread that enters it.

    Args:
        module: whose buffers are looked for.
        stage: says where the micro-batch is.
    """

    def __init__(self, module: torch.nn.Module, stage: Callable[[], int]) -> None:
        super().__init__()
        self._slots = slots_of(module)
        self._stage = stage
        self._stages: dict[str, set[int]] = {slot.name: set() for slot in self._slots}
        self._before = [_identity(slot) for slot in self._slots]

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See `TorchFunctionMode`."""
        given = {id(leaf) for leaf in jax.tree.leaves((args, kwargs))}
        for slot in self._slots:
            if id(slot.tensor) in given:
                self._stages[slot.name].add(self._stage())
        return function(*args, **(kwargs or {}))

    def refuse_changes_that_cross(self) -> None:
        """Look at what was used.

        Raises:
            StrategyError: if a buffer is used in several stages, and was changed.
        """
        for slot, before in zip(self._slots, self._before, strict=True):
            stages = sorted(self._stages[slot.name])
            if len(stages) > 1 and _identity(slot) != before:
                raise StrategyError(
                    f"buffer {slot.name} is changed, and used in the stages {', '.join(map(str, stages))}, whose "
                    "micro-batches would meet there out of order; use it in the blocks of one stage"
                )


def _identity(slot: Slot) -> tuple[int, int]:
    """What is another one when a buffer has been changed."""
    return id(slot.tensor), slot.tensor._version
