"""The path of gradient sums over PyTorch's own collectives: NCCL on GPUs, gloo on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from typing_extensions import override

from collectives import Communicator
from collectives.arrays import ALIGNMENT_BYTES, accumulator_dtype
from collectives.plans.spread import Spread
from strategies.exchange.fusion import fusion_groups
from strategies.exchange.on_device import COMPILED, DevicePath
from strategies.torch.exchange.arithmetic import TorchArithmetic, torch_dtype
from strategies.torch.exchange.instance_group import InstanceGroup

FUSED_BYTES = 64 << 20
"""Largest size of buffers that travel together. Copying them costs less than a collective for each."""


@final
class TorchCompiledPath(DevicePath):
    """An all-to-all of slices, the sum of the own slice in the order of the tree, an all-gather of the slices' means.

    So 2 (n - 1) / n of the bytes pass each link, as in a ring all-reduce (Patarasuk & Yuan, 2009). The constructor is a
    collective call.

    Instances pass a barrier on the host before each exchange. The barrier detects an instance that never comes, so no
    collective of PyTorch waits for it.

    Args:
        communicator: The communicator of all instances, for the barriers only.
        spread: The spread of the replicas over the instances.
        device: The device of the sums. It need not be the current device of the calling thread.

    Raises:
        StrategyError: On all instances, if one of them cannot connect.
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

    @override
    def means(
        self, name: str, sums: Sequence[Sequence[torch.Tensor]], dtypes: Sequence[np.dtype]
    ) -> Sequence[torch.Tensor]:
        """Return the mean of each buffer. Buffers that travel together become 64-byte-aligned views of one tensor."""
        self._meet(name)
        with torch.no_grad():
            found = [torch.empty(0, dtype=torch_dtype(dtype), device=self._device) for dtype in dtypes]
            nbytes = [of_buffer[0].numel() * dtype.itemsize for of_buffer, dtype in zip(sums, dtypes, strict=True)]
            for numbers in fusion_groups(nbytes, dtypes, FUSED_BYTES):
                for number, mean in zip(numbers, self._parcel(sums, numbers, dtypes[numbers[0]]), strict=True):
                    found[number] = mean
            return found

    @override
    def gather(self, name: str, own: torch.Tensor) -> torch.Tensor:
        self._meet(name)
        with torch.no_grad():
            rows = own.new_empty((self.spread.size, own.numel()))
            if own.numel():
                self._group.all_gather(rows.view(-1), own.contiguous().view(-1))
            return rows

    @override
    def close(self) -> None:
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
        """Return the means of flat tensors, given one for each node of this instance."""
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
    """Concatenate flat tensors, each padded to a multiple of elements; a single tensor stays as it is."""
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
