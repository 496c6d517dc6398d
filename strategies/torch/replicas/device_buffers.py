"""Agreement on buffers if one instance has all replicas: on the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from collectives.tree import TreeNode
from strategies.jax.replicas.replicas import Replicas
from strategies.torch.exchange.arithmetic import TorchArithmetic
from strategies.torch.exchange.plan import Fact
from strategies.torch.options import FIRST, PER_REPLICA
from strategies.torch.replica_memory import ReplicaMemory
from strategies.torch.replicas.buffers import ModelBuffers
from strategies.torch.replicas.module_parts import Slot
from strategies.torch.tensors import dtype_of


class BuffersHere:
    """New values of a module's buffers on all replicas, with the bits of `ModelBuffers.agreed`.

    Args:
        buffers: The buffers of the module.
        replicas: The replicas, all of which are on this instance.
        memory: The memory of the replicas.
    """

    def __init__(self, buffers: ModelBuffers, replicas: Replicas, memory: ReplicaMemory) -> None:
        self._buffers = buffers
        self._replicas = replicas
        self._memory = memory
        self._nodes = [TreeNode(replica, replica + 1) for replica in replicas.local_replicas]

    def agreed(
        self, slots: Sequence[Sequence[Slot]], changed: Sequence[Sequence[Fact]], reads: bool
    ) -> tuple[dict[int, torch.Tensor], frozenset[int]]:
        """Return the new values by their numbers, and the numbers of the buffers known to have changed.

        Args:
            slots: For each replica, its buffers after the step.
            changed: For each replica and buffer, whether the step has changed it.
            reads: Whether to wait for the device until every entry of `changed` is known, as in a first step.
        """
        columns = [list(of_slot) for of_slot in zip(*changed, strict=True)]
        if reads:
            columns = self._read(columns)
        sure = [number for number, column in enumerate(columns) if any(map(_is_sure, column))]
        unsure = {number: column for number, column in enumerate(columns) if number not in sure and any_unknown(column)}
        for number in sure:
            if any(_is_sure(one) and one > 1 for one in columns[number]):
                self._buffers.refuse_other_shapes(number, slots, self._replicas)
        words = self._buffers.words
        self._buffers.refuse_unnamed([number for number in sure if words[number] == PER_REPLICA])
        values = {
            number: self._value(words[number], [of_replica[number].tensor.detach() for of_replica in slots])
            for number in (*sure, *unsure)
            if number in sure or words[number] != PER_REPLICA or number in self._buffers.own
        }
        for number in unsure.keys() & values.keys():
            values[number] = self._kept(number, values[number], unsure[number])
        return values, frozenset(sure)

    def _read(self, columns: list[list[Fact]]) -> list[list[Fact]]:
        """Replace values on the device by numbers on the host, with one read for all."""
        unknown = [one for column in columns for one in column if isinstance(one, torch.Tensor)]
        if not unknown:
            return columns
        known = iter(self._memory.read(torch.stack(unknown)).tolist())
        return [[float(next(known)) if isinstance(one, torch.Tensor) else one for one in column] for column in columns]

    def _value(self, word: str, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the value on which replicas agree, if any of them has changed the buffer."""
        if word == PER_REPLICA:
            return torch.stack(list(values))
        if word == FIRST or len(values) == 1:
            return values[0]
        flat = [value.reshape(-1).clone() for value in values]
        mean = TorchArithmetic().mean(self._nodes, flat, dtype_of(values[0]), len(values))
        return mean.view(values[0].shape)

    def _kept(self, number: int, value: torch.Tensor, column: Sequence[Fact]) -> torch.Tensor:
        """Return the new value if any replica has changed its own, else the old value. The host does not wait."""
        old = self._buffers.own.get(number, self._buffers.slots[number].tensor).detach()
        has_changed = torch.stack([one for one in column if isinstance(one, torch.Tensor)]).any()
        return torch.where(has_changed, value, old)


def any_unknown(column: Sequence[Fact]) -> bool:
    """Return whether any value is on the device, unknown to the host."""
    return any(isinstance(one, torch.Tensor) for one in column)


def _is_sure(one: Fact) -> bool:
    return not isinstance(one, torch.Tensor) and bool(one)
