"""Agreement of replicas on the buffers and frozen parameters that a step has changed, such as moving means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np
import torch

from collectives import Communicator
from strategies.core.gathering import gather_arrays
from strategies.errors import StrategyError
from strategies.exchange.flat import FlatLayout, private_memory
from strategies.exchange.means import Bucket, Means
from strategies.jax.replicas.replicas import Replicas
from strategies.torch.module_parts import Slot, slots_of
from strategies.torch.options import FIRST, MEAN, PER_REPLICA, Aggregation
from strategies.torch.replica_memory import HOST
from strategies.torch.sync_batch_norm import sync_layers_of
from strategies.torch.tensors import as_array, as_tensor, dtype_of, have_other_bits, have_same_bits

_MOST_AXES = 65  # of a tensor of PyTorch, 64, behind their number
OF_EACH = " of each replica"
"""Behind the name of a buffer of which each replica keeps its own."""


class ModelBuffers:
    """The buffers and frozen parameters of a module, on which all replicas agree after each step.

    Only those that a replica has changed are exchanged: the mean of many equal numbers may be rounded, so what stays
    is let alone.

    Args:
        module: of the training; its buffers are those with which a step begins.
        shown: the replica whose buffers the module has where each keeps its own.

    Attributes:
        declared: the ways of agreement that were named, by the names of buffers and frozen parameters.
        moving: the numbers of those that a step has changed, from the first time on.
        words: for each of them the way of agreement.
        own: by their numbers those of which each replica keeps its own, with a first axis of all replicas.

    Raises:
        ValueError: if a name is none of a buffer or frozen parameter, or one that has no mean is to get it.
    """

    def __init__(self, module: torch.nn.Module, aggregation: Aggregation, count: int, shown: int = 0) -> None:
        self._module = module
        self._aggregation = aggregation
        self.declared: Mapping[str, str] = {} if aggregation is None or isinstance(aggregation, str) else aggregation
        self._count = count
        self._shown = shown
        self.slots: list[Slot] = []
        self.moving: frozenset[int] = frozenset()
        self.own: dict[int, torch.Tensor] = {}
        self._bucket: Bucket | None = None  # of the means in the last step
        self.follow()

    def follow(self) -> None:
        """Look for what was frozen, or is trained again."""
        slots = slots_of(self._module)
        names = [slot.name for slot in slots]
        before = [slot.name for slot in self.slots]
        if slots and _places_of(slots) == _places_of(self.slots):
            return
        for name in self.declared:
            if name not in names:
                raise ValueError(
                    f"there is no buffer or frozen parameter {name!r}; there are {', '.join(names) or 'none'}"
                )
        own = {before[number]: each for number, each in self.own.items()}
        moving = {before[number] for number in self.moving}
        self.slots = slots
        alike = {id(layer._buffers) for layer in sync_layers_of(self._module).values()}  # on all replicas
        self.words = [_word(slot, self._aggregation, id(slot.holder) in alike) for slot in slots]
        self.moving = frozenset(number for number, name in enumerate(names) if name in moving)
        places = enumerate(zip(slots, self.words, strict=True))
        each = [n for n, (slot, word) in places if word == PER_REPLICA and (self.declared or not slot.is_parameter)]
        self.own = {number: self._of_all(slots[number].tensor, own.get(names[number])) for number in each}

    def _of_all(self, tensor: torch.Tensor, known: torch.Tensor | None) -> torch.Tensor:
        """Return the known values of a buffer on all replicas; if there are none of its shape, the module's for all."""
        if known is not None and known.shape[1:] == tensor.shape:
            return known
        return torch.stack([tensor.detach()] * self._count)

    @property
    def written(self) -> frozenset[str]:
        """The names of the frozen parameters that steps change, as far as is known or was said."""
        slots = enumerate(self.slots)
        names = [slot.name for number, slot in slots if slot.is_parameter and number in self.moving]
        return frozenset([*names, *self.declared])

    def masters_of(self, replica: int) -> list[torch.Tensor]:
        """Return the buffers with which a replica begins a step."""
        self._follow_shown()
        found = [slot.tensor for slot in self.slots]
        for number, own in self.own.items():
            found[number] = own[replica]
        return found

    def _follow_shown(self) -> None:
        """Give all replicas what the program has changed in the module."""
        for number, own in self.own.items():
            shown = self.slots[number].tensor.detach()
            if own.device != HOST and own.shape[1:] == shown.shape:  # nothing waits for a device
                own.copy_(torch.where(have_other_bits(own[self._shown], shown), shown.expand_as(own), own))
            elif not have_same_bits(own[self._shown], shown):
                own.copy_(shown.expand_as(own))

    def named(self) -> dict[str, torch.Tensor]:
        """Return all tensors to be saved besides parameters, by name."""
        found = {slot.name: slot.tensor for slot in self.slots if not slot.is_parameter}
        return found | {f"{self.slots[number].name}{OF_EACH}": own for number, own in self.own.items()}

    def agreed(
        self,
        shares: np.ndarray,
        of_replicas: Sequence[Sequence[Slot]],
        replicas: Replicas,
    ) -> dict[int, torch.Tensor]:
        """Return new values of those that have changed, by their numbers, until the next call.

        Makes collective calls where there are any.

        Args:
            shares: for each the share of the replicas that have changed it; above 1 if its shape has changed.
            of_replicas: for each local replica its buffers after the step.
            replicas: connects the instances.

        Raises:
            StrategyError: if replicas have other shapes of one, or it is not said that each replica has its own.
        """
        changed = np.flatnonzero(shares).tolist()
        if not changed:
            return {}
        for number in np.flatnonzero(shares > 1).tolist():
            self.refuse_other_shapes(number, of_replicas, replicas)
        each = [number for number in changed if self.words[number] == PER_REPLICA]
        means = [number for number in changed if self.words[number] == MEAN]
        firsts = [number for number in changed if self.words[number] == FIRST]
        self.refuse_unnamed(each)
        found = self._means(means, of_replicas, replicas) if means else {}
        found |= self._firsts(firsts, of_replicas[0], replicas.communicator) if firsts else {}
        return found | (self._of_each(each, of_replicas, replicas) if each else {})

    def refuse_unnamed(self, numbers: Sequence[int]) -> None:
        """Refuse frozen parameters that forward passes write, unless it was said that each replica has its own."""
        if unnamed := [self.slots[number].name for number in numbers if number not in self.own]:
            raise StrategyError(
                f"{unnamed[0]} is a frozen parameter that forward passes write; for each replica to keep its own it "
                f"has to be named: model_state_aggregation={ {unnamed[0]: PER_REPLICA} }"
            )

    def refuse_other_shapes(self, number: int, of_replicas: Sequence[Sequence[Slot]], replicas: Replicas) -> None:
        """Compare the shapes of a buffer that has grown; a collective call."""
        name = self.slots[number].name
        if number in self.own:
            raise StrategyError(
                f"{name} has changed its shape in the forward pass, and each replica keeps its own; call the module "
                "once before the Trainer, so that it has its shape"
            )
        shapes = [[np.zeros(_MOST_AXES, np.int64)] for _ in of_replicas]
        for slots, [shape] in zip(of_replicas, shapes, strict=True):
            own = slots[number].tensor.shape
            shape[: len(own) + 1] = len(own), *own
        gathered = gather_arrays(replicas, shapes, f"shape of {name}")
        of_all = {tuple(row[1 : row[0] + 1].tolist()) for [row] in gathered}
        if len(of_all) > 1:
            raise StrategyError(
                f"{name} has become of the shapes {', '.join(map(str, map(list, sorted(of_all))))} on different "
                "replicas, which cannot agree on it; give it one shape for all batches"
            )

    def keep(self, values: dict[int, torch.Tensor], moving: frozenset[int] | None = None) -> None:
        """Have a step end with these values.

        Args:
            values: by the numbers of buffers.
            moving: the numbers of those of which it is known that steps change them; None: of all.
        """
        with torch.no_grad():
            for number, value in values.items():
                if number in self.own:
                    self.own[number].copy_(value)
                    value = value[self._shown]
                self.slots[number].put(value)
        self.moving |= values.keys() if moving is None else moving

    def _of_each(
        self, numbers: Sequence[int], of_replicas: Sequence[Sequence[Slot]], replicas: Replicas
    ) -> dict[int, torch.Tensor]:
        """Gather what all replicas have on every instance, so that nothing is lost with one."""
        local = [[as_array(slots[number].tensor.to(HOST)) for number in numbers] for slots in of_replicas]
        gathered = gather_arrays(replicas, local, "buffers of each replica")
        columns = zip(*gathered, strict=True)
        return {number: as_tensor(np.stack(arrays)) for number, arrays in zip(numbers, columns, strict=True)}

    def _means(
        self, numbers: Sequence[int], of_replicas: Sequence[Sequence[Slot]], replicas: Replicas
    ) -> dict[int, torch.Tensor]:
        tensors = [of_replicas[0][number].tensor for number in numbers]
        shapes = [jax.ShapeDtypeStruct(tuple(one.shape), dtype_of(one)) for one in tensors]
        layout = FlatLayout.of(shapes, 0)
        if self._bucket is None or self._bucket.layout != layout:
            self._bucket = Bucket.of("buffers", layout, private_memory, {}, {})
        bucket = self._bucket
        contributions = []
        for slots in of_replicas:
            flat = [np.zeros(buffer.size, buffer.dtype) for buffer in bucket.layout.buffers]
            for view, number in zip(bucket.layout.views(flat), numbers, strict=True):
                as_tensor(view).copy_(slots[number].tensor.detach())
            contributions.append(flat)
        means = Means(replicas.communicator, replicas.num_replicas_in_sync, None)
        means.reduce(bucket, list(zip(*contributions, strict=True)))
        views = bucket.layout.views(bucket.results)
        return {number: as_tensor(view) for number, view in zip(numbers, views, strict=True)}

    def _firsts(
        self, numbers: Sequence[int], of_first: Sequence[Slot], communicator: Communicator
    ) -> dict[int, torch.Tensor]:
        """Broadcast what replica 0 has, which is on the first of the instances, in one message."""
        values = [of_first[number].tensor.detach().to(HOST, copy=True) for number in numbers]
        if communicator.size > 1:
            arrays = [as_array(value).reshape(-1).view(np.uint8) for value in values]
            packed = np.concatenate(arrays)
            communicator.broadcast(packed, 0, name="buffers of replica 0")
            cuts = np.cumsum([array.size for array in arrays])[:-1]
            for array, part in zip(arrays, np.split(packed, cuts), strict=True):
                array[...] = part
        return dict(zip(numbers, values, strict=True))


def _places_of(slots: Sequence[Slot]) -> list[tuple[str, int]]:
    """Return values that are others when a tensor is in another place."""
    return [(slot.name, id(slot.holder)) for slot in slots]


def _word(slot: Slot, aggregation: Aggregation, is_alike: bool) -> str:
    word = aggregation if isinstance(aggregation, str) else (aggregation or {}).get(slot.name)
    is_float = slot.tensor.is_floating_point()
    if word == MEAN and not is_float:
        if isinstance(aggregation, str):
            return FIRST
        raise ValueError(f"{slot.name} is {slot.tensor.dtype}, which has no mean; use 'first' for it")
    if word is None and (is_alike or slot.tensor.is_complex()):
        return FIRST
    return word or (MEAN if is_float else FIRST)
