"""The memory in which the replicas of an instance compute: that of the host, or of one accelerator that they share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax
import torch

from strategies.errors import StrategyError
from strategies.torch.attribute_contents import Contents
from strategies.torch.module_parts import ModuleParts
from strategies.torch.parameter_writes import refuse_writes
from strategies.typing import Tree

HOST = torch.device("cpu")


class ReplicaMemory:
    """The parameters of a module as its replicas see them, and the device to which their rows go.

    Without a device replicas have the parameters that the module has, in its memory. With one they have copies there,
    the same for all replicas of the instance, which are made anew before each step; the module stays on the host, and
    so do optimizer, buffers on which replicas agree, and the sums of gradients.

    Args:
        device: on which the replicas compute; None for the memory of the module. The CPU is one with a copy of its own.

    Attributes:
        device: see above; the CPU where there is none.
        is_shared: whether replicas share a device, and so take turns on it.
        parameters: for each of the module's what replicas have in its place.
    """

    def __init__(self, module: torch.nn.Module, device: torch.device | None = None) -> None:
        self.module = module
        self.device = device or HOST
        self.is_shared = device is not None
        self._named = list(module.named_parameters())
        self.originals = [parameter for _, parameter in self._named]
        self._shapes = [parameter.shape for parameter in self.originals]
        self._parts = ModuleParts(module)
        self.contents = Contents(module)
        self.parameters: list[torch.Tensor] = list(self.originals)
        if self.is_shared:
            self.parameters = [one.detach().to(self.device, copy=True) for one in self.originals]

    def at_once(self, replicas: int) -> int:
        """Return how many of the replicas compute at the same time: as there are cores; in turn on a device."""
        return 1 if self.is_shared else min(replicas, len(os.sched_getaffinity(0)))

    @property
    def copies(self) -> Sequence[torch.Tensor]:
        """The parameters that have memory of their own."""
        return self.parameters if self.is_shared else ()

    def follow(self) -> None:
        """Take over what the parameters of the module have become.

        Raises:
            StrategyError: if the module has other parts than when this was made, or parameters of other shapes.
        """
        if name := self._parts.changed():
            raise StrategyError(
                f"{name} was replaced, added or removed since the module was given to strategies.torch, whose replicas "
                "and optimizer have the parts from before; change values in place, or close the Trainer and make "
                "another, with an optimizer of the new parameters"
            )
        for (name, parameter), shape in zip(self._named, self._shapes, strict=True):
            if parameter.shape != shape:
                raise StrategyError(
                    f"{name} is of shape {list(parameter.shape)}, and was {list(shape)} when the module was given to "
                    "strategies.torch; close the Trainer and make another, with a new optimizer"
                )
        self.contents.look()
        with torch.no_grad():
            for mine, original in zip(self.copies, self.originals, strict=False):
                mine.copy_(original)

    def refuse_gradients_of_originals(self) -> None:
        """Refuse gradients that went to the module instead of its copies; it had none before replicas computed."""
        for name, parameter in self._named:
            if parameter.grad is not None:
                raise StrategyError(
                    f"the gradient of {name} went to the module that was given to the Trainer, and not to a replica's "
                    "copy: the loss function, a hook or an attribute of the module closes over that module; use the "
                    "one that the loss function is given"
                )

    def refuse_writes(self, numbers: Sequence[int]) -> None:
        """Refuse writes to parameters that replicas share, made while they computed."""
        trained = [name for name, one in self._named if one.requires_grad]
        refuse_writes([self._named[number][0] for number in numbers], trained)

    def put(self, tree: Tree) -> Tree:
        """Return the tensors of a tree where the replicas are."""
        return _moved(tree, self.device) if self.is_shared else tree

    def fetched(self, tree: Tree) -> Tree:
        """Return the tensors of a tree in the memory of the host."""
        return _moved(tree, HOST) if self.is_shared else tree


def _moved(tree: Tree, device: torch.device) -> Tree:
    return jax.tree.map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, tree)


# ---- which device


def as_device(given: object) -> torch.device | None:
    """Return the device of replicas that was given, as PyTorch has it.

    Raises:
        TypeError: if it is neither a device nor a name.
        ValueError: if PyTorch knows no such device, or its tensors have no numbers.
    """
    if given is None:
        return None
    if not isinstance(given, torch.device | str):
        raise TypeError(f"replica_device is {given!r}; give 'cuda', 'cuda:1', a torch.device, or None for the host")
    try:
        device = torch.device(given)
    except RuntimeError as error:
        raise ValueError(f"replica_device is {given!r}, which PyTorch does not know; 'cuda' is one, say") from error
    if device.type == "meta":
        raise ValueError("replica_device is 'meta', where tensors have no numbers to compute with; use 'cuda', say")
    return device


def chosen(device: torch.device, count: int, local_index: int) -> torch.device:
    """Return the one accelerator on which the replicas of an instance compute.

    Args:
        device: that was asked for; without a number instances of a host take turns.
        count: how many of this type the instance sees.
        local_index: of the instance among those of its host.

    Raises:
        StrategyError: if there is none, or none of that number.
    """
    if device.type == "cpu":
        return HOST
    if not count:
        raise StrategyError(
            f"replica_device is {str(device)!r}, and PyTorch sees no {device.type} device here; install PyTorch for "
            "it, or leave replica_device out: replicas then compute on the CPU"
        )
    if device.index is not None and device.index >= count:
        raise StrategyError(
            f"replica_device is {str(device)!r}, and there are {count} here, numbered from 0; use {device.type!r}, of "
            "which instances of a host take turns, or a smaller number"
        )
    return torch.device(device.type, local_index % count if device.index is None else device.index)


def device_here(device: torch.device | None, local_index: int) -> torch.device | None:
    """See `chosen`, of the devices that there are; None where replicas are to compute in the host's memory."""
    return None if device is None else chosen(device, count_of(device.type), local_index)


def count_of(kind: str) -> int:
    """Return the number of devices of a type that PyTorch sees."""
    try:
        module: Any = torch.get_device_module(kind)
    except RuntimeError:  # it was built without
        return 0
    return int(module.device_count()) if module.is_available() else 0
