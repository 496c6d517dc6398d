"""The path of sums of gradients over PyTorch's own collectives: NCCL on GPUs, gloo on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch

from collectives import Communicator
from collectives.arrays import ALIGNMENT_BYTES, accumulator_dtype
from collectives.plans.spread import Spread
from strategies.exchange.fusion import fusion_groups
from strategies.exchange.on_device import COMPILED, DevicePath
from strategies.torch.on_device.arithmetic import TorchArithmetic, torch_dtype
from strategies.torch.on_device.instance_group import InstanceGroup

FUSED_BYTES = 64 << 20
"""Buffers travel together up to so many bytes. A copy of them costs less than collectives of their own."""


@final
class TorchCompiledPath(DevicePath):
    """All-to-all of slices, sum of the own slice in the order of the tree, all-gather of the means of slices.

    So 2 (n - 1) / n of the bytes pass each link, as in a ring. To make it is a collective call.

    Instances meet on the host before each exchange: one that never comes is noticed there, and no collective of PyTorch
    waits for it.

    Args:
        communicator: connects the instances; used to meet only.
        spread: see `DevicePath`.
        device: on which the sums lie. The current device of the calling thread has nothing to do with it.

    Raises:
        StrategyError: see `InstanceGroup`.
    """

    word = COMPILED

    def __init__(self, communicator: Communicator, spread: Spread, device: torch.device) -> None:
        super().__init__(spread, communicator.rank)
        self._communicator = communicator
        self._device = device
        self._arithmetic = TorchArithmetic()
        self._all_nodes = tuple(node for nodes in spread.sums for node in nodes)
        self._travels_narrow = all(node.is_leaf for node in self._all_nodes)
        self._group = InstanceGroup(communicator, device)

    def means(
        self, name: str, sums: Sequence[Sequence[torch.Tensor]], dtypes: Sequence[np.dtype]
    ) -> Sequence[torch.Tensor]:
        """See `DevicePath`; the means of a parcel of buffers are views of one tensor, aligned to 64 bytes."""
        self._meet(name)
        with torch.no_grad():
            found = [torch.empty(0, dtype=torch_dtype(dtype), device=self._device) for dtype in dtypes]
            nbytes = [of_buffer[0].numel() * dtype.itemsize for of_buffer, dtype in zip(sums, dtypes, strict=True)]
            for numbers in fusion_groups(nbytes, dtypes, FUSED_BYTES):
                for number, mean in zip(numbers, self._parcel(sums, numbers, dtypes[numbers[0]]), strict=True):
                    found[number] = mean
            return found

    def gather(self, name: str, own: torch.Tensor) -> torch.Tensor:
        """See `DevicePath`."""
        self._meet(name)
        with torch.no_grad():
            rows = own.new_empty((self.spread.size, own.numel()))
            if own.numel():
                self._group.all_gather(rows.view(-1), own.contiguous().view(-1))
            return rows

    def close(self) -> None:
        """See `DevicePath`."""
        self._group.close()

    def _meet(self, name: str) -> None:
        self._group.insist_on_being_open()
        self._communicator.barrier(name=f"compiled exchange of {name}")

    # ---- one parcel

    def _parcel(
        self, sums: Sequence[Sequence[torch.Tensor]], numbers: Sequence[int], dtype: np.dtype
    ) -> list[torch.Tensor]:
        wire = torch_dtype(dtype if self._travels_narrow else accumulator_dtype(dtype, "mean"))
        rows = [
            _joined([sums[number][node].to(wire) for number in numbers], _multiple(dtype))
            for node in range(len(self.nodes))
        ]
        means = self._exchange(rows, dtype)
        found, start = [], 0
        for number in numbers:
            size = sums[number][0].numel()
            found.append(means[start : start + size])
            start += _rounded_up(size, _multiple(dtype))
        return found

    def _exchange(self, rows: Sequence[torch.Tensor], dtype: np.dtype) -> torch.Tensor:
        """Return the means of flat tensors, of which there is one for each of the nodes of this instance."""
        instances, size = self.spread.size, rows[0].numel()
        part = _rounded_up(-(-size // instances), _multiple(dtype))
        bounds = [min(size, part * instance) for instance in range(instances + 1)]
        cuts = [slice(*pair) for pair in zip(bounds, bounds[1:], strict=False)]
        counts = [cut.stop - cut.start for cut in cuts]
        given = rows[0] if len(rows) == 1 else torch.cat([row[cut] for cut in cuts for row in rows])
        own = counts[self.rank]
        received = given.new_empty((len(self._all_nodes), own))
        self._group.all_to_all(
            received.view(-1),
            given,
            [len(nodes) * own for nodes in self.spread.sums],
            [len(rows) * count for count in counts],
        )
        mean = self._arithmetic.mean(self._all_nodes, list(received), dtype, self.spread.replicas)
        if own < part:
            mean = torch.nn.functional.pad(mean, (0, part - own))
        means = mean.new_empty(instances * part)
        self._group.all_gather(means, mean)
        return means[:size]


def _joined(parts: Sequence[torch.Tensor], multiple: int) -> torch.Tensor:
    """Return flat tensors one behind the other, each at a multiple of elements; one alone as it is."""
    if len(parts) == 1:
        return parts[0].contiguous()
    pieces = []
    for part in parts:
        pieces += [part, part.new_zeros(_rounded_up(part.numel(), multiple) - part.numel())]
    return torch.cat(pieces)


def _multiple(dtype: np.dtype) -> int:
    return ALIGNMENT_BYTES // dtype.itemsize


def _rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
