"""The memory in which an instance's replicas compute: the host's, or that of a shared accelerator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

import strategies.trees as trees
from strategies.errors import StrategyError
from strategies.torch.tensors import as_array
from strategies.typing import Tree

HOST = torch.device("cpu")


class ReplicaMemory:
    """The memory in which an instance's replicas compute: the host's, or that of a device on which gradients may stay.

    Args:
        device: The device of the module if it was chosen for the replicas; None for the host.

    Attributes:
        device: The device of the replicas; the CPU if none was given.
        is_shared: Whether a device was given.
        reads: The number of times that values were read from the device.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or HOST
        self.is_shared = device is not None
        self.reads = 0

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

    def read(self, values: torch.Tensor) -> np.ndarray:
        """Copy values from the device to the host. The call waits until the device has computed them."""
        self.reads += 1
        return as_array(values.cpu())

    def put(self, tree: Tree) -> Tree:
        """Return the tree with its tensors on the device of the replicas."""
        return _mapped(tree, partial(put, device=self.device)) if self.is_shared else tree

    def put_means(self, means: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return gradients of the host on the device of the parameters.

        The call does not wait for a GPU to copy them: the host's memory stays unchanged until the next gradients
        arrive.
        """
        return [None if mean is None else mean.to(self.device, non_blocking=True) for mean in means]

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
