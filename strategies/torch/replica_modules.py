"""A module for each local replica: with the parameters of all of them, and buffers and other attributes of its own."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from operator import is_
from typing import Any, NamedTuple

import torch

from strategies.torch.replica_groups import part_of, row_of
from strategies.torch.replica_memory import ReplicaMemory

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Slot(NamedTuple):
    """Where a module has a buffer.

    Attributes:
        name: of the buffer, as `named_buffers` has it.
        buffers: the dictionary in which it is.
        key: its name there.
    """

    name: str
    buffers: dict[str, Any]
    key: str

    @property
    def tensor(self) -> torch.Tensor:
        """What is there now."""
        return self.buffers[self.key]


def slots_of(module: torch.nn.Module) -> list[Slot]:
    """The buffers of a module, each once, in their order."""
    seen: set[int] = set()
    found = []
    for prefix, inner in module.named_modules():
        for key, buffer in inner._buffers.items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                found.append(Slot(f"{prefix}.{key}" if prefix else key, inner._buffers, key))
    return found


class ReplicaModule:
    """A copy of a module, whose parameters share the memory that replicas have, and have gradients of their own.

    What the program changes in the original between steps is changed here too: parameters and buffers, modes, and
    attributes that are numbers, words or None. What the copy itself changes in such attributes stays with it.

    Args:
        memory: of the module, which is not changed, and of its replicas.
        replica: whose copy it is, by its global index.
        replicas: how many there are on all instances.

    Attributes:
        module: the copy.
        parameters: its parameters in the order of `original.named_parameters()`.
        rows: for each of them which row the replica has; None where it has all of it.
        slots: its buffers in the order of `slots_of(original)`.

    Raises:
        TypeError: if it cannot be copied.
        StrategyError: if a parameter has not a row for each group of replicas.
    """

    def __init__(self, memory: ReplicaMemory, replica: int = 0, replicas: int = 1) -> None:
        original, device = memory.module, memory.device
        named = list(original.named_parameters())
        self.rows = [row_of(name, parameter, replica, replicas) for name, parameter in named]
        shared = {
            id(parameter): torch.nn.Parameter(part_of(mine, row), parameter.requires_grad)
            for (_, parameter), mine, row in zip(named, memory.parameters, self.rows, strict=True)
        }
        buffers = {id(one.tensor): one.tensor.detach().to(device, copy=True) for one in slots_of(original)}
        memo = {**shared, **buffers}
        try:
            self.module: torch.nn.Module = copy.deepcopy(original, memo)
        except (TypeError, RuntimeError) as error:
            raise TypeError(
                f"the module cannot be copied for a replica: {error}; keep what cannot be copied, such as open files "
                "and tensors that were computed, out of its attributes"
            ) from error
        self._memory = memory
        self.parameters = list(shared.values())
        self.slots = slots_of(self.module)
        self._pairs = list(zip(original.modules(), self.module.modules(), strict=True))
        self._last = [dict(_plain_attributes(one)) for one, _ in self._pairs]
        self._seen = [dict(vars(one)) for one, _ in self._pairs]

    def follow(self) -> None:
        """Take over what the program has changed in the original, but for its buffers."""
        memory = self._memory
        for mine, source, original, row in zip(
            self.parameters, memory.parameters, memory.originals, self.rows, strict=True
        ):
            part = source if row is None else part_of(source, row)
            if mine.data_ptr() != part.data_ptr():
                mine.data = part.detach()
            if mine.requires_grad is not original.requires_grad:
                mine.requires_grad_(original.requires_grad)
        for (original, mine), last, seen in zip(self._pairs, self._last, self._seen, strict=True):
            now = vars(original)
            if now.keys() == seen.keys() and all(map(is_, now.values(), seen.values())):
                continue  # 1 us; to look at the attributes one by one takes ten times as long
            seen.clear()
            seen.update(now)
            for name, value in _plain_attributes(original):
                if last.get(name, _Unknown) != value:
                    last[name] = value
                    setattr(mine, name, value)


class _Unknown:
    """No attribute has this value."""


def _plain_attributes(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    attributes: Mapping[str, Any] = vars(module)
    return ((name, value) for name, value in attributes.items() if isinstance(value, _PLAIN))
