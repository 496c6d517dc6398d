"""The memory behind tensors of PyTorch."""

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
    """See `DeviceViews`. All streams of the device are waited for."""

    def view(self, array: ExportedArray) -> torch.Tensor:
        """See `DeviceViews`."""
        found: torch.Tensor = from_dlpack(array)
        return found

    def addresses(self, arrays: Sequence[torch.Tensor]) -> list[int]:
        """See `DeviceViews`."""
        if arrays:
            _wait(arrays[0])
        return [array.data_ptr() for array in arrays]

    def dtype_of(self, array: torch.Tensor) -> np.dtype:
        """See `DeviceViews`."""
        return dtype_of(array)

    def taken(self, view: torch.Tensor, starts: Sequence[int], sizes: Sequence[int]) -> list[torch.Tensor]:
        """See `DeviceViews`; the copies are parts of one tensor."""
        whole = view.clone()
        _wait(whole)
        return [whole[start : start + size] for start, size in zip(starts, sizes, strict=True)]

    def stacked(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `DeviceViews`."""
        found = torch.stack(list(rows))
        _wait(found)
        return found


def _wait(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
