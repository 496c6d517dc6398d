"""The memory behind PyTorch's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from collectives.dlpack import ExportedArray
from strategies.torch.tensors import dtype_of


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
