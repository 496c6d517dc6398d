"""The memory in which the replicas of an instance compute: that of the host, or of an accelerator that they share."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import jax
import numpy as np
import torch

from strategies.errors import StrategyError
from strategies.torch.attribute_contents import Contents
from strategies.torch.module_parts import ModuleParts
from strategies.torch.parameter_writes import refuse_writes
from strategies.torch.tensors import as_array
from strategies.typing import Tree

HOST = torch.device("cpu")


class ReplicaMemory:
    """The parameters of a module as its replicas see them, and the device where these compute.

    Replicas have the parameters of the module, in its memory, which is that of the host or, with a device, there.

    Args:
        module: on the device already.
        device: on which the replicas compute in turn; None for the host, where several compute at once.

    Attributes:
        device: see above; the CPU where there is none.
        is_shared: whether replicas share a device, and so take turns on it.
        parameters: of the module.
        reads: how often values were read from the device.
    """

    def __init__(self, module: torch.nn.Module, device: torch.device | None = None) -> None:
        self.module = module
        self.device = device or HOST
        self.is_shared = device is not None
        self.reads = 0
        self._stream = self._stream_here()
        self._named = list(module.named_parameters())
        self.originals = [parameter for _, parameter in self._named]
        self._shapes = [parameter.shape for parameter in self.originals]
        self._parts = ModuleParts(module)
        self.contents = Contents(module)
        self.parameters: list[torch.Tensor] = list(self.originals)

    @property
    def is_on_host(self) -> bool:
        """Whether the memory is that of the host."""
        return bool(self.device.type == HOST.type)

    @property
    def gpu(self) -> int | None:
        """The ordinal of the device among CUDA's; None for other devices."""
        if self.device.type != "cuda":
            return None
        ordinal: int = torch.cuda.current_device() if self.device.index is None else self.device.index
        return ordinal

    def at_once(self, replicas: int) -> int:
        """Return how many of the replicas compute at the same time: as there are cores; in turn on a device."""
        return 1 if self.is_shared else min(replicas, len(os.sched_getaffinity(0)))

    def read(self, values: torch.Tensor) -> np.ndarray:
        """Return values of the device in memory of the host; waits until they are there."""
        self.reads += 1
        return as_array(values.cpu())

    def current(self) -> AbstractContextManager[object]:
        """Return a context for a thread of replicas: PyTorch's current device is theirs, and so is the stream of it.

        The stream is the one that was current where a step began, so that nothing overtakes the program's own work.
        """
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _stream_here(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def follow(self) -> None:
        """Take over what the parameters of the module have become, and the stream of this thread.

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
        self._stream = self._stream_here()
        self.contents.look()

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
        if not numbers:
            return
        trained = [name for name, one in self._named if one.requires_grad]
        refuse_writes([self._named[number][0] for number in numbers], trained)

    def put(self, tree: Tree) -> Tree:
        """Return the tensors of a tree where the replicas are."""
        return _mapped(tree, partial(put, device=self.device)) if self.is_shared else tree

    def put_means(self, means: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return gradients of the host where the parameters are.

        A GPU may copy them later: they stay as they are until it has given the next gradients.
        """
        return [mean.to(self.device, non_blocking=True) for mean in means]

    def fetched(self, tree: Tree) -> Tree:
        """Return the tensors of a tree in the memory of the host."""
        return _mapped(tree, torch.Tensor.cpu) if self.is_shared else tree


def put(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device, without waiting for what a GPU still does.

    The memory of the host may be written to as soon as this returns: a GPU copies from page-locked memory of our own.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    own = tensor.pin_memory()
    if own.data_ptr() == tensor.data_ptr():
        own = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return own.to(device, non_blocking=True)


def _mapped(tree: Tree, function: Callable[[torch.Tensor], torch.Tensor]) -> Tree:
    return jax.tree.map(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


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


def chosen_here(device: torch.device, local_index: int) -> torch.device:
    """See `chosen`, of the devices that there are."""
    return chosen(device, count_of(device.type), local_index)


def count_of(kind: str) -> int:
    """Return the number of devices of a type that PyTorch sees."""
    try:
        module = torch.get_device_module(kind)
    except RuntimeError:  # it was built without
        return 0
    return int(module.device_count()) if module.is_available() else 0
