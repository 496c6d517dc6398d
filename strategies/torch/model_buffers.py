"""How replicas agree on the buffers that a step has changed, such as moving means."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from collectives import Communicator
from strategies.exchange.flat import FlatLayout
from strategies.replicas.gathering import gather_replicas
from strategies.replicas.replicas import Replicas
from strategies.torch.options import FIRST, MEAN, PER_REPLICA, Aggregation
from strategies.torch.replica_memory import HOST
from strategies.torch.replica_modules import Slot, slots_of
from strategies.torch.tensors import as_array, as_tensor

OF_EACH = " of each replica"
"""Behind the name of a buffer of which each replica keeps its own."""


class ModelBuffers:
    """The buffers of a module, on which all replicas agree after each step.

    Only those that a replica has changed are exchanged: the mean of many equal numbers may be rounded, so what stays
    is let alone.

    Args:
        module: of the training; its buffers are those with which a step begins.
        aggregation: see `TorchOptions.model_state_aggregation`.
        count: how many replicas there are on all instances.
        shown: the replica whose buffers the module has where each keeps its own.

    Attributes:
        slots: where they are.
        moving: the numbers of those that a step has changed, from the first time on.
        own: by their numbers those of which each replica keeps its own, with a first axis of all replicas.

    Raises:
        ValueError: if a name is none of a buffer, or a buffer that has no mean is to get it.
    """

    def __init__(self, module: torch.nn.Module, aggregation: Aggregation, count: int, shown: int = 0) -> None:
        self.slots = slots_of(module)
        self._words = [_word(slot, aggregation) for slot in self.slots]
        names = [slot.name for slot in self.slots]
        if aggregation is not None and not isinstance(aggregation, str):
            for name in aggregation:
                if name not in names:
                    raise ValueError(f"there is no buffer {name!r}; there are {', '.join(names) or 'none'}")
        self.moving: frozenset[int] = frozenset()
        self._shown = shown
        each = [number for number, word in enumerate(self._words) if word == PER_REPLICA]
        self.own = {number: torch.stack([self.slots[number].tensor.detach()] * count) for number in each}

    @property
    def masters(self) -> list[torch.Tensor]:
        """The buffers that the module has."""
        return [slot.tensor for slot in self.slots]

    def masters_of(self, replica: int) -> list[torch.Tensor]:
        """The buffers with which a replica begins a step."""
        self._follow()
        found = self.masters
        for number, own in self.own.items():
            found[number] = own[replica]
        return found

    def _follow(self) -> None:
        """What the program has changed in the module all replicas get."""
        for number, own in self.own.items():
            if not torch.equal(own[self._shown], self.slots[number].tensor):
                own.copy_(self.slots[number].tensor.detach().expand_as(own))

    def named(self) -> dict[str, torch.Tensor]:
        """All that there is to be saved, by name."""
        found = {slot.name: slot.tensor for slot in self.slots}
        return found | {f"{self.slots[number].name}{OF_EACH}": own for number, own in self.own.items()}

    def agreed(
        self, changed: Sequence[int], of_replicas: Sequence[Sequence[Slot]], replicas: Replicas
    ) -> dict[int, torch.Tensor]:
        """New values of those that have changed; collective calls where there are any.

        Args:
            changed: their numbers, the same on all instances.
            of_replicas: for each local replica its buffers after the step.
            replicas: connects the instances.
        """
        communicator = replicas.communicator
        each = [number for number in changed if self._words[number] == PER_REPLICA]
        means = [number for number in changed if self._words[number] == MEAN]
        firsts = [number for number in changed if self._words[number] == FIRST]
        found = self._means(means, of_replicas, communicator) if means else {}
        found |= self._firsts(firsts, of_replicas[0], communicator) if firsts else {}
        return found | (self._of_each(each, of_replicas, replicas) if each else {})

    def keep(self, values: dict[int, torch.Tensor]) -> None:
        """Have a step end with these."""
        with torch.no_grad():
            for number, value in values.items():
                if number in self.own:
                    self.own[number].copy_(value)
                    value = value[self._shown]
                self.slots[number].tensor.copy_(value)
        self.moving |= values.keys()

    def _of_each(
        self, numbers: Sequence[int], of_replicas: Sequence[Sequence[Slot]], replicas: Replicas
    ) -> dict[int, torch.Tensor]:
        """What all replicas have, which is on every instance, so that nothing is lost with one."""
        local = [[as_array(slots[number].tensor.to(HOST)) for number in numbers] for slots in of_replicas]
        gathered = gather_replicas(replicas, local, "buffers of each replica")
        columns = zip(*gathered, strict=True)
        return {number: as_tensor(np.stack(arrays)) for number, arrays in zip(numbers, columns, strict=True)}

    def _means(
        self, numbers: Sequence[int], of_replicas: Sequence[Sequence[Slot]], communicator: Communicator
    ) -> dict[int, torch.Tensor]:
        layout = FlatLayout.of([as_array(self.slots[number].tensor) for number in numbers], 0)
        contributions = []
        for slots in of_replicas:
            flat = [np.zeros(buffer.size, buffer.dtype) for buffer in layout.buffers]
            for view, number in zip(layout.views(flat), numbers, strict=True):
                view[...] = as_array(slots[number].tensor.to(HOST))
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
        values = [of_first[number].tensor.detach().to(HOST, copy=True) for number in numbers]
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
