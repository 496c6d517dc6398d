"""The memory in which an instance's replicas compute: the host's, or that of a shared accelerator."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
import torch

import strategies.trees as trees
from strategies.errors import StrategyError
from strategies.torch.attribute_contents import Contents
from strategies.torch.module_parts import ModuleParts
from strategies.torch.parameter_writes import refuse_writes
from strategies.torch.tensors import as_array
from strategies.typing import Tree

HOST = torch.device("cpu")


class ReplicaMemory:
    """The parameters of a module as its replicas use them, and the device on which replicas compute.

    Replicas share the module's parameters, in the memory of the host or of the device.

    Args:
        module: The module, already on the device.
        device: The device on which the replicas compute in turn; None for the host, where several compute at once.

    Attributes:
        module: The module.
        device: The device of the replicas; the CPU if none was given.
        is_shared: Whether replicas share a device, and so compute in turn.
        originals: The parameters of the module.
        parameters: The tensors whose memory replicas share: the module's parameters.
        reads: The number of times that values were read from the device.
        contents: The contents of the module's attributes, to find changes.
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
        """Whether replicas compute in the memory of the host."""
        return bool(self.device.type == HOST.type)

    @property
    def gpu(self) -> int | None:
        """The CUDA ordinal of the device; None for other devices."""
        if self.device.type != "cuda":
            return None
        ordinal: int = torch.cuda.current_device() if self.device.index is None else self.device.index
        return ordinal

    def at_once(self, replicas: int) -> int:
        """Return the number of replicas that compute at the same time: one per core, or one on a device."""
        return 1 if self.is_shared else min(replicas, len(os.sched_getaffinity(0)))

    def read(self, values: torch.Tensor) -> np.ndarray:
        """Copy values from the device to the host. The call waits until the device has computed them."""
        self.reads += 1
        return as_array(values.cpu())

    def current(self) -> AbstractContextManager[object]:
        """Return a context for a replica's thread, with the replicas' device and stream.

        The stream is the current stream of the thread that began the step. So replicas cannot overtake the program's
        own work.
        """
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _stream_here(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def follow(self) -> None:
        """Take over the changes to the module's parameters, and the current stream of this thread.

        Raises:
            StrategyError: If parts of the module were replaced, added or removed, or a parameter has another shape.
        """
        if name := self._parts.changed():
            raise StrategyError(
                f"{name} was replaced, added or removed after the module was given to strategies.torch. Replicas and "
                "optimizer still have the earlier parts; change values in place, or close the Trainer and construct "
                "another one, with an optimizer of the new parameters"
            )
        for (name, parameter), shape in zip(self._named, self._shapes, strict=True):
            if parameter.shape != shape:
                raise StrategyError(
                    f"{name} is of shape {list(parameter.shape)}, but was {list(shape)} when the module was given to "
                    "strategies.torch; close the Trainer and construct another one, with a new optimizer"
                )
        self._stream = self._stream_here()
        self.contents.look()

    def refuse_gradients_of_originals(self) -> None:
        """Raise if the module itself has gradients, which belong to its copies. It had none before the step."""
        for name, parameter in self._named:
            if parameter.grad is not None:
                raise StrategyError(
                    f"the gradient of {name} went to the module that was given to the Trainer, and not to a copy. "
                    "The loss function, a hook or an attribute of the module refers to that module; use the first "
                    "argument of the loss function instead"
                )

    def refuse_writes(self, numbers: Sequence[int]) -> None:
        """Raise if parameters that replicas share were written while replicas computed."""
        if not numbers:
            return
        trained = [name for name, one in self._named if one.requires_grad]
        refuse_writes([self._named[number][0] for number in numbers], trained)

    def put(self, tree: Tree) -> Tree:
        """Return the tree with its tensors on the device of the replicas."""
        return _mapped(tree, partial(put, device=self.device)) if self.is_shared else tree

    def put_means(self, means: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return gradients of the host on the device of the parameters.

        The call does not wait for a GPU to copy them: the host's memory stays unchanged until the next gradients
        arrive.
        """
        return [mean.to(self.device, non_blocking=True) for mean in means]

    def fetched(self, tree: Tree) -> Tree:
        """Return the tree with its tensors in the memory of the host."""
        return _mapped(tree, torch.Tensor.cpu) if self.is_shared else tree


def put(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device, without waiting for the GPU's earlier work.

    The caller may overwrite the host's memory at once: a GPU copies from a page-locked copy.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    own = tensor.pin_memory()
    if own.data_ptr() == tensor.data_ptr():
        own = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return own.to(device, non_blocking=True)


def _mapped(tree: Tree, function: Callable[[torch.Tensor], torch.Tensor]) -> Tree:
    return trees.map(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


# ---- choice of a device


def as_device(given: object) -> torch.device | None:
    """Return the given device of replicas as a `torch.device`; None for None.

    Raises:
        TypeError: If it is neither a device nor a name.
        ValueError: If PyTorch knows no such device, or it is "meta".
    """
    if given is None:
        return None
    if not isinstance(given, torch.device | str):
        raise TypeError(f"replica_device is {given!r}; give 'cuda', 'cuda:1', a torch.device, or None for the host")
    try:
        device = torch.device(given)
    except RuntimeError as error:
        raise ValueError(f"replica_device is {given!r}, which PyTorch does not know; use 'cuda', say") from error
    if device.type == "meta":
        raise ValueError("replica_device is 'meta', whose tensors have no values; use 'cuda', for example")
    return device


def chosen(device: torch.device, count: int, local_index: int) -> torch.device:
    """Return the accelerator on which the replicas of an instance compute.

    Args:
        device: The requested device. Without a number, the instances of a host take the devices in turn.
        count: The number of devices of this type that the instance sees.
        local_index: The index of the instance on its host.

    Raises:
        StrategyError: If there is no device of this type, or none with this number.
    """
    if device.type == "cpu":
        return HOST
    if not count:
        raise StrategyError(
            f"replica_device is {str(device)!r}, but PyTorch sees no {device.type} device here; install PyTorch for "
            "it, or leave replica_device out: replicas then compute on the CPU"
        )
    if device.index is not None and device.index >= count:
        raise StrategyError(
            f"replica_device is {str(device)!r}, but there are only {count} here, numbered from 0; use a smaller "
            f"number, or {device.type!r}, so that the instances of a host take them in turn"
        )
    return torch.device(device.type, local_index % count if device.index is None else device.index)


def chosen_here(device: torch.device, local_index: int) -> torch.device:
    """Return the accelerator on which the replicas of an instance compute, among those that PyTorch sees."""
    return chosen(device, count_of(device.type), local_index)


def count_of(kind: str) -> int:
    """Return the number of devices of a type that PyTorch sees."""
    try:
        module = torch.get_device_module(kind)
    except RuntimeError:  # PyTorch was built without this type
        return 0
    return int(module.device_count()) if module.is_available() else 0
