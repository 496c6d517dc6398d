"""PyTorch's arithmetic of sums and means on any device, with the bits of the host's, and views of its memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack
from typing_extensions import override

from collectives.dlpack import ExportedArray
from collectives.tree import TreeNode, steps
from strategies.exchange.on_device import DeviceArithmetic
from strategies.torch.tensors import as_tensor, dtype_of

_NARROW = (torch.float16, torch.bfloat16)


class TorchArithmetic(DeviceArithmetic):
    """PyTorch's arithmetic on flat tensors of one device, with the bits of `collectives.reduction.Reduction`.

    If the given tensors have the accumulators' dtype, sums overwrite them.
    """

    def total(self, nodes: Sequence[TreeNode], sums: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of neighbours in the tree, in the order of the tree and in the accumulators' dtype.

        Args:
            nodes: Neighbours in their order, which together are one node.
            sums: The sums of these nodes, which may be overwritten.
        """
        with torch.no_grad():
            values = list(sums)
            for left, right, _ in steps(tuple(nodes)):
                values.append(_added(values[left], values[right]))
            return widened(values[-1])

    @override
    def mean(
        self, nodes: Sequence[TreeNode], sums: Sequence[torch.Tensor], dtype: np.dtype, replicas: int
    ) -> torch.Tensor:
        with torch.no_grad():
            return _divided(self.total(nodes, sums), replicas).to(torch_dtype(dtype))

    @override
    def means(
        self,
        nodes: Sequence[TreeNode],
        sums: Sequence[Sequence[torch.Tensor]],
        dtypes: Sequence[np.dtype],
        replicas: int,
    ) -> list[torch.Tensor]:
        pairs = zip(zip(*sums, strict=True), dtypes, strict=True)
        return [self.mean(nodes, of_buffer, dtype, replicas) for of_buffer, dtype in pairs]


def torch_dtype(dtype: np.dtype) -> torch.dtype:
    """Return the PyTorch dtype for a dtype of NumPy or ml_dtypes."""
    return as_tensor(np.empty(0, dtype)).dtype


def widened(values: torch.Tensor) -> torch.Tensor:
    """Return values in the dtype in which they are added: float32 for 16-bit floats."""
    return values.float() if values.dtype in _NARROW else values


def _added(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if left.dtype not in _NARROW:
        return left.add_(right)
    if right.dtype not in _NARROW:
        return torch.add(left, right, out=right)
    return left.float().add_(right)


def _divided(total: torch.Tensor, replicas: int) -> torch.Tensor:
    divide([total], replicas)
    return total


def divide(tensors: Sequence[torch.Tensor], divisor: float) -> None:
    """Divide tensors in place, once, as IEEE 754 defines division. On any device the bits are those of the host.

    CUDA's kernels multiply by the reciprocal of a number on the host, but divide by a tensor on the device.
    """
    if divisor == 1 or not tensors:
        return
    if math.frexp(divisor)[0] == 0.5 and 2.0**-126 <= divisor <= 2.0**126:
        torch._foreach_mul_(list(tensors), 1 / divisor)  # exact, so the same bits as a division
        return
    on_device: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
    for one in tensors:
        kind = one.dtype, one.device
        if kind not in on_device:
            on_device[kind] = torch.full((), divisor, dtype=one.dtype, device=one.device)
        one.div_(on_device[kind])


@final
class TorchViews:
    """PyTorch's form of `DeviceViews`. It waits for all streams of the device."""

    def view(self, array: ExportedArray) -> torch.Tensor:
        """Return an array in memory of the path as a tensor, without a copy."""
        found: torch.Tensor = from_dlpack(array)
        return found

    def addresses(self, arrays: Sequence[torch.Tensor]) -> list[int]:
        """Wait until contiguous tensors have been computed, and return their addresses."""
        if arrays:
            _wait(arrays[0])
        return [array.data_ptr() for array in arrays]

    def dtype_of(self, array: torch.Tensor) -> np.dtype:
        """Return the dtype of a tensor as a NumPy dtype."""
        return dtype_of(array)

    def taken(self, view: torch.Tensor, starts: Sequence[int], sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return copies of parts of a flat view, once they are made; they are parts of one tensor."""
        whole = view.clone()
        _wait(whole)
        return [whole[start : start + size] for start, size in zip(starts, sizes, strict=True)]

    def stacked(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a copy of flat views, stacked along a new first axis, once it is made."""
        found = torch.stack(list(rows))
        _wait(found)
        return found


def _wait(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
