"""How replicas agree on the buffers that a step has changed, such as moving means."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from collectives import Communicator
from strategies.exchange.flat import FlatLayout
from strategies.torch.options import FIRST, MEAN, Aggregation
from strategies.torch.replica_modules import Slot, slots_of
from strategies.torch.tensors import as_array, as_tensor


class ModelBuffers:
    """The buffers of a module, on which all replicas agree after each step.

    Only those that a replica has changed are exchanged: the mean of many equal numbers may be rounded, so what stays
    is let alone.

    Args:
        module: of the training; its buffers are those with which a step begins.
        aggregation: see `TorchOptions.model_state_aggregation`.

    Attributes:
        slots: where they are.
        moving: the numbers of those that a step has changed, from the first time on.

    Raises:
        ValueError: if a name is none of a buffer, or a buffer that has no mean is to get it.
    """

    def __init__(self, module: torch.nn.Module, aggregation: Aggregation) -> None:
        self.slots = slots_of(module)
        self._words = [_word(slot, aggregation) for slot in self.slots]
        names = [slot.name for slot in self.slots]
        if aggregation is not None and not isinstance(aggregation, str):
            for name in aggregation:
                if name not in names:
                    raise ValueError(f"there is no buffer {name!r}; there are {', '.join(names) or 'none'}")
        self.moving: frozenset[int] = frozenset()

    @property
    def masters(self) -> list[torch.Tensor]:
        """The buffers."""
        return [slot.tensor for slot in self.slots]

    def agreed(
        self, changed: Sequence[int], of_replicas: Sequence[Sequence[Slot]], communicator: Communicator
    ) -> dict[int, torch.Tensor]:
        """New values of those that have changed; collective calls where there are any.

        Args:
            changed: their numbers, the same on all instances.
            of_replicas: for each local replica its buffers after the step.
            communicator: connects the instances.
        """
        means = [number for number in changed if self._words[number] == MEAN]
        firsts = [number for number in changed if self._words[number] == FIRST]
        found = self._means(means, of_replicas, communicator) if means else {}
        return {**found, **(self._firsts(firsts, of_replicas[0], communicator) if firsts else {})}

    def keep(self, values: dict[int, torch.Tensor]) -> None:
        """Have a step end with these."""
        with torch.no_grad():
            for number, value in values.items():
                self.slots[number].tensor.copy_(value)
        self.moving |= values.keys()

    def _means(
        self, numbers: Sequence[int], of_replicas: Sequence[Sequence[Slot]], communicator: Communicator
    ) -> dict[int, torch.Tensor]:
        layout = FlatLayout.of([as_array(self.slots[number].tensor) for number in numbers], 0)
        contributions = []
        for slots in of_replicas:
            flat = [np.zeros(buffer.size, buffer.dtype) for buffer in layout.buffers]
            for view, number in zip(layout.views(flat), numbers, strict=True):
                view[...] = as_array(slots[number].tensor)
            contributions.append(flat)
        filled = [place for place, buffer in enumerate(layout.buffers) if buffer.size]
        results = [np.empty(buffer.size, buffer.dtype) for buffer in layout.buffers]
        communicator.grouped_ordered_all_reduce(
            [[flat[place] for flat in contributions] for place in filled],
            [results[place] for place in filled],
            "mean",
            names=[f"buffers/{layout.buffers[place].name}" for place in filled],
        )
        return {number: as_tensor(view) for number, view in zip(numbers, layout.views(results), strict=True)}

    def _firsts(
        self, numbers: Sequence[int], of_first: Sequence[Slot], communicator: Communicator
    ) -> dict[int, torch.Tensor]:
        """What replica 0 has, which is on the first of the instances: all of them in one message."""
        values = [of_first[number].tensor.detach().clone() for number in numbers]
        if communicator.size > 1:
            arrays = [as_array(value).reshape(-1).view(np.uint8) for value in values]
            packed = np.concatenate(arrays)
            communicator.broadcast(packed, 0, name="buffers of replica 0")
            cuts = np.cumsum([array.size for array in arrays])[:-1]
            for array, part in zip(arrays, np.split(packed, cuts), strict=True):
                array[...] = part
        return dict(zip(numbers, values, strict=True))


def _word(slot: Slot, aggregation: Aggregation) -> str:
    word = aggregation if isinstance(aggregation, str) else (aggregation or {}).get(slot.name)
    is_float = slot.tensor.is_floating_point()
    if word == MEAN and not is_float:
        if isinstance(aggregation, str):
            return FIRST
        raise ValueError(f"buffer {slot.name} is {slot.tensor.dtype}, which has no mean; use 'first' for it")
    if slot.tensor.is_complex() and word is None:
        return FIRST
    return word or (MEAN if is_float else FIRST)
