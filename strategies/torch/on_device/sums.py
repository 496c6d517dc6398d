"""The sums of replicas that compute in turn, by the nodes of the tree."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from collectives.tree import TreeNode, node_of_halves
from strategies.exchange.on_device import DevicePath
from strategies.torch.on_device.arithmetic import TorchArithmetic

FlatBuffers = Sequence[torch.Tensor]
"""Flat tensors on a device: the buffers of a bucket."""


class TreeSums:
    """The sums of an instance's replicas. Two neighbours are added as soon as both are there.

    So at most log2(local replicas) + 1 sums exist at a time.

    Args:
        path: The path that takes the sums of its nodes.
        arithmetic: The arithmetic of the sums.
    """

    def __init__(self, path: DevicePath, arithmetic: TorchArithmetic) -> None:
        self._path = path
        self._arithmetic = arithmetic
        self._nodes: list[TreeNode] = []
        self._sums: list[FlatBuffers] = []

    def clear(self) -> None:
        """Drop the sums of a step that was given up."""
        self._nodes.clear()
        self._sums.clear()

    def add(self, replica: int, buffers: FlatBuffers) -> None:
        """Add the buffers of a replica, which may be overwritten. Replicas must come in their order."""
        self._nodes.append(TreeNode(replica, replica + 1))
        self._sums.append(buffers)
        while (found := self._parent()) is not None:
            pairs = zip(*self._sums[-2:], strict=True)
            total = [self._arithmetic.total(self._nodes[-2:], pair) for pair in pairs]
            self._nodes[-2:], self._sums[-2:] = [found], [total]

    def _parent(self) -> TreeNode | None:
        """Return the parent node of the last two sums if a node of the path covers it; otherwise None."""
        if len(self._nodes) < 2:
            return None
        left, right = self._nodes[-2:]
        parent = node_of_halves(left, right, self._path.spread.replicas)
        is_taken = parent is not None and any(node.covers(parent) for node in self._path.nodes)
        return parent if is_taken else None

    def take(self) -> list[list[torch.Tensor]]:
        """Return, for each buffer, the sums of the remaining nodes in order, and clear this object."""
        found = [list(of_buffer) for of_buffer in zip(*self._sums, strict=True)]
        self.clear()
        return found
