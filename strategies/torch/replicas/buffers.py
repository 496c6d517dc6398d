"""Agreement of replicas on buffers and frozen parameters that a step has changed, such as moving means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from collectives import Communicator
from collectives.tree import TreeNode
from strategies.core.agreement import gather_arrays
from strategies.errors import StrategyError
from strategies.exchange.flat import FlatLayout, private_memory
from strategies.exchange.means import Bucket, Means
from strategies.jax.replicas.replicas import Replicas
from strategies.torch.exchange.plan import Fact
from strategies.torch.options import FIRST, MEAN, PER_REPLICA, WORDS, Aggregation
from strategies.torch.replicas.module_parts import Slot, slots_of
from strategies.torch.replicas.sync_batch_norm import sync_layers_of
from strategies.torch.tensors import (
    HOST,
    TorchArithmetic,
    as_array,
    as_tensor,
    dtype_of,
    have_other_bits,
    have_same_bits,
)
from strategies.trees import ShapeOfArray

_MOST_AXES = 65  # the number of axes, and the lengths of at most 64, PyTorch's limit
OF_EACH = " of each replica"
"""Suffix of a buffer's name, if each replica keeps its own value."""


class ModelBuffers:
    """The buffers and frozen parameters of a module, on which all replicas agree after each step.

    If no replica has changed a buffer, it is not exchanged, because the mean of many equal numbers may be rounded.

    Args:
        module: The module of the training. A step begins with its buffers.
        aggregation: The ways of agreement, `TorchOptions.model_state_aggregation`.
        count: The number of replicas.
        shown: The replica whose buffers the module shows, if each replica keeps its own.

    Attributes:
        slots: The places of the buffers and frozen parameters.
        declared: The ways of agreement given by name, by the names of buffers and frozen parameters.
        moving: The numbers of the slots that a step has changed, from the first change on.
        are_known: Whether a step was made with these slots. Frozen parameters that steps write are in `written` then.
        reductions: For each slot, the way of agreement.
        own: The values of slots that each replica keeps for itself, by number; the first axis is that of all replicas.

    Raises:
        ValueError: If no buffer or frozen parameter has a given name, or "mean" is given for one without a mean.
    """

    def __init__(self, module: torch.nn.Module, aggregation: Aggregation, count: int, shown: int = 0) -> None:
        self._module = module
        self._aggregation = aggregation
        self.declared: Mapping[str, str] = {} if aggregation is None or isinstance(aggregation, str) else aggregation
        self._count = count
        self._shown = shown
        self.slots: list[Slot] = []
        self.moving: frozenset[int] = frozenset()
        self.are_known = False
        self.own: dict[int, torch.Tensor] = {}
        self._bucket: Bucket | None = None  # the memory of the means
        self.follow()

    def follow(self) -> None:
        """Find the parameters that were frozen, or are trained again, and new buffers."""
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
        self.slots, self.are_known = slots, False
        alike = {id(layer._buffers) for layer in sync_layers_of(self._module).values()}  # equal on all replicas
        self.reductions = [_reduction(slot, self._aggregation, id(slot.holder) in alike) for slot in slots]
        self.moving = frozenset(number for number, name in enumerate(names) if name in moving)
        each = [number for number, word in enumerate(self.reductions) if word == PER_REPLICA]
        each = [number for number in each if self.declared or not slots[number].is_parameter]
        self.own = {number: self._of_all(slots[number].tensor, own.get(names[number])) for number in each}

    def _of_all(self, tensor: torch.Tensor, known: torch.Tensor | None) -> torch.Tensor:
        """Return the known values of a buffer on all replicas. If none have its shape, repeat the module's value."""
        if known is not None and known.shape[1:] == tensor.shape:
            return known
        return torch.stack([tensor.detach()] * self._count)

    @property
    def written(self) -> frozenset[str]:
        """The names of the frozen parameters that a step has written, or that the program has declared as changing."""
        slots = enumerate(self.slots)
        names = [slot.name for number, slot in slots if slot.is_parameter and number in self.moving]
        return frozenset([*names, *self.declared])

    def follow_shown(self) -> None:
        """Copy to all replicas the changes that the program has made to the module's buffers."""
        for number, own in self.own.items():
            shown = self.slots[number].tensor.detach()
            if own.device != HOST and own.shape[1:] == shown.shape:  # do not wait for the device
                own.copy_(torch.where(have_other_bits(own[self._shown], shown), shown.expand_as(own), own))
            elif not have_same_bits(own[self._shown], shown):
                own.copy_(shown.expand_as(own))

    def named(self) -> dict[str, torch.Tensor]:
        """Return all tensors to be saved besides parameters, by name."""
        found = {slot.name: slot.tensor for slot in self.slots if not slot.is_parameter}
        return found | {f"{self.slots[number].name}{OF_EACH}": own for number, own in self.own.items()}

    def agreed(
        self, shares: np.ndarray, of_replicas: Sequence[Sequence[Slot]], replicas: Replicas
    ) -> dict[int, torch.Tensor]:
        """Return new values of the slots that have changed, by their numbers, valid until the next call.

        Collective if any has changed.

        Args:
            shares: For each slot, the share of the replicas that have changed it; above 1 if its shape has changed.
            of_replicas: For each local replica, its slots after the step.
            replicas: The replicas of all instances.

        Raises:
            StrategyError: If replicas have different shapes of a slot, or a frozen parameter that changes is not named.
        """
        if not (changed := np.flatnonzero(shares).tolist()):
            return {}
        for number in np.flatnonzero(shares > 1).tolist():
            self.check_same_shapes(number, of_replicas, replicas)
        by_word = {word: [number for number in changed if self.reductions[number] == word] for word in WORDS}
        means, firsts, each = by_word[MEAN], by_word[FIRST], by_word[PER_REPLICA]
        self.check_declared_by_name(each)
        found = self._means(means, of_replicas, replicas) if means else {}
        found |= self._firsts(firsts, of_replicas[0], replicas.communicator) if firsts else {}
        return found | (self._of_each(each, of_replicas, replicas) if each else {})

    def agreed_here(
        self,
        changed: Sequence[Sequence[Fact]],
        of_replicas: Sequence[Sequence[Slot]],
        replicas: Replicas,
        read: Callable[[torch.Tensor], np.ndarray] | None = None,
    ) -> tuple[dict[int, torch.Tensor], frozenset[int]]:
        """Return new values with the bits of `agreed` if all replicas are on this instance, and leave them on a device.

        Args:
            changed: For each replica and slot, whether the step has changed it.
            of_replicas: For each replica, its slots after the step.
            replicas: The replicas.
            read: Reads values from the device, to know every entry of `changed`, as in a first step; None not to wait.

        Returns:
            The values by the numbers of slots, and the numbers of the slots known to have changed.

        Raises:
            StrategyError: As `agreed` does.
        """
        columns, values, sure = [list(column) for column in zip(*changed, strict=True)], {}, set()
        if read is not None and (unknown := [one for column in columns for one in _unknown(column)]):
            known = iter(read(torch.stack(unknown)).tolist())
            columns = [[next(known) if isinstance(one, torch.Tensor) else one for one in column] for column in columns]
        for number, column in enumerate(columns):
            unknown, reduction = _unknown(column), self.reductions[number]
            if largest := max(one for one in (0, *column) if not isinstance(one, torch.Tensor)):
                sure.add(number)
                if largest > 1:
                    self.check_same_shapes(number, of_replicas, replicas)
                if reduction == PER_REPLICA:
                    self.check_declared_by_name([number])
            elif not unknown or (reduction == PER_REPLICA and number not in self.own):
                continue
            value = _value(reduction, [slots[number].tensor.detach() for slots in of_replicas], replicas.local_replicas)
            if not largest:
                old = self.own.get(number, self.slots[number].tensor).detach()
                value = torch.where(torch.stack(unknown).any(), value, old)
            values[number] = value
        return values, frozenset(sure)

    def check_declared_by_name(self, numbers: Sequence[int]) -> None:
        """Raise if forward passes write a frozen parameter of each replica that was not declared by name."""
        if unnamed := [self.slots[number].name for number in numbers if number not in self.own]:
            raise StrategyError(
                f"{unnamed[0]} is a frozen parameter that forward passes write; for each replica to keep its own it "
                f"must be named: model_state_aggregation={ {unnamed[0]: PER_REPLICA} }"
            )

    def check_same_shapes(self, number: int, of_replicas: Sequence[Sequence[Slot]], replicas: Replicas) -> None:
        """Raise unless all replicas have the same shape of a buffer that has grown. Collective."""
        name = self.slots[number].name
        if number in self.own:
            raise StrategyError(
                f"{name} has changed its shape in the forward pass, but each replica keeps its own; call the module "
                "once before the Trainer, so that the buffer has its final shape"
            )
        shapes = [[np.zeros(_MOST_AXES, np.int64)] for _ in of_replicas]
        for slots, [shape] in zip(of_replicas, shapes, strict=True):
            own = slots[number].tensor.shape
            shape[: len(own) + 1] = len(own), *own
        gathered = gather_arrays(replicas, shapes, f"shape of {name}")
        of_all = {tuple(row[1 : row[0] + 1].tolist()) for [row] in gathered}
        if len(of_all) > 1:
            raise StrategyError(
                f"{name} has the shapes {', '.join(map(str, map(list, sorted(of_all))))} on different replicas after "
                "the step, so they cannot agree on it; give it one shape for all batches"
            )

    def keep(self, values: dict[int, torch.Tensor], moving: frozenset[int] | None = None) -> None:
        """Put the new values of a step into the module.

        Args:
            values: The values, by the numbers of slots.
            moving: The numbers of the slots that are known to change in steps; None for all of `values`.
        """
        with torch.no_grad():
            for number, value in values.items():
                if number in self.own:
                    self.own[number].copy_(value)
                    value = value[self._shown]
                self.slots[number].put(value)
        self.moving |= values.keys() if moving is None else moving
        self.are_known = True

    def _of_each(
        self, numbers: Sequence[int], of_replicas: Sequence[Sequence[Slot]], replicas: Replicas
    ) -> dict[int, torch.Tensor]:
        """Gather the values of all replicas on every instance. If an instance is lost, no value is lost."""
        local = [[as_array(slots[number].tensor.to(HOST)) for number in numbers] for slots in of_replicas]
        gathered = gather_arrays(replicas, local, "buffers of each replica")
        columns = zip(*gathered, strict=True)
        return {number: as_tensor(np.stack(arrays)) for number, arrays in zip(numbers, columns, strict=True)}

    def _means(
        self, numbers: Sequence[int], of_replicas: Sequence[Sequence[Slot]], replicas: Replicas
    ) -> dict[int, torch.Tensor]:
        tensors = [of_replicas[0][number].tensor for number in numbers]
        shapes = [ShapeOfArray(tuple(one.shape), dtype_of(one)) for one in tensors]
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
        means = Means(replicas.communicator)
        means.reduce(bucket, list(zip(*contributions, strict=True)))
        views = bucket.layout.views(bucket.results)
        return {number: as_tensor(view) for number, view in zip(numbers, views, strict=True)}

    def _firsts(
        self, numbers: Sequence[int], of_first: Sequence[Slot], communicator: Communicator
    ) -> dict[int, torch.Tensor]:
        """Broadcast the values of replica 0, which the first instance drives, in one message."""
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
    """Return the name and the holder of each slot, to find tensors that were moved to another holder."""
    return [(slot.name, id(slot.holder)) for slot in slots]


def _reduction(slot: Slot, aggregation: Aggregation, is_alike: bool) -> str:
    reduction = aggregation if isinstance(aggregation, str) else (aggregation or {}).get(slot.name)
    is_float = slot.tensor.is_floating_point()
    if reduction == MEAN and not is_float:
        if isinstance(aggregation, str):
            return FIRST
        raise ValueError(f"{slot.name} is {slot.tensor.dtype}, which has no mean; use 'first' for it")
    if reduction is None and (is_alike or slot.tensor.is_complex()):
        return FIRST
    return reduction or (MEAN if is_float else FIRST)


def _unknown(column: Sequence[Fact]) -> list[torch.Tensor]:
    """Return the values on the device, which the host does not know."""
    return [one for one in column if isinstance(one, torch.Tensor)]


def _value(reduction: str, values: Sequence[torch.Tensor], replicas: range) -> torch.Tensor:
    """Return the value on which replicas agree, if any of them has changed the buffer."""
    if reduction == PER_REPLICA:
        return torch.stack(list(values))
    if reduction == FIRST or len(values) == 1:
        return values[0]
    flat, nodes = [value.reshape(-1).clone() for value in values], [TreeNode(one, one + 1) for one in replicas]
    return TorchArithmetic().mean(nodes, flat, dtype_of(values[0]), len(values)).view(values[0].shape)
