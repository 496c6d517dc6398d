"""The gradients of the local replicas, computed and added on their devices without waiting for them."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from collectives.tree import TreeNode, node_of_halves
from strategies.jax.gradients.gradient_programs import JaxGradientPlan
from strategies.jax.on_device.arithmetic import JaxArithmetic
from strategies.jax.replicas.devices import ReplicaDevices
from strategies.typing import Leaf, Tree, Variables


class DeviceGradients:
    """The gradients of the local replicas, computed one after another on each device, and their sums.

    Two sums are added as soon as both exist. So at most one sum per level of the tree is alive, and one more. A sum
    lies on the device of its first replica.

    Args:
        devices: Devices of the local replicas.
        plan: Program of a replica, in one segment, which makes its buffers.
        nodes: Nodes of the tree that are added here; together they are the local replicas.
        replicas: R.
    """

    def __init__(
        self, devices: ReplicaDevices, plan: JaxGradientPlan, nodes: Sequence[TreeNode], replicas: int
    ) -> None:
        self._devices = devices
        self._plan = plan
        self._nodes = nodes
        self._replicas = replicas
        self._arithmetic = JaxArithmetic()

    def sums(
        self, variables: Variables, of_replicas: Sequence[Sequence[Tree]], others: Tree = None
    ) -> tuple[list[list[jax.Array]], list[list[jax.Array]]]:
        """Begin to compute the sums of the nodes, without waiting for the devices.

        Args:
            variables: Variables, as in `ReplicaGradients.dispatch`.
            of_replicas: Arguments of each local replica, as in `ReplicaGradients.dispatch`.
            others: Shared arguments, as in `ReplicaGradients.dispatch`.

        Returns:
            The sums of the nodes on the first device, for each buffer; and the values that each local replica keeps.
        """
        shared = [[jax.tree.leaves(tree) for tree in trees] for trees in self._devices.share((variables, others))]
        sums: list[tuple[TreeNode, list[jax.Array]]] = []
        kept = []
        count = len(self._plan.layouts[0].buffers)
        for position, replica in enumerate(self._devices.replicas):
            first, last = shared[position % len(shared)]
            device = self._devices.device_of(position)
            (program,) = self._plan.compiled(device)
            results = program(*first, *self._moved(jax.tree.leaves(of_replicas[position]), device), *last)
            sums.append((TreeNode(replica, replica + 1), list(results[:count])))
            kept.append(list(results[count:]))
            self._add(sums)
        home = self._devices.devices[0]
        on_first = [self._moved(buffers, home) for _, buffers in sums]
        return [list(of_buffer) for of_buffer in zip(*on_first, strict=True)], kept

    def _add(self, sums: list[tuple[TreeNode, list[jax.Array]]]) -> None:
        """Add the last two sums, and again their result, while they are the halves of a node of this instance."""
        while len(sums) > 1:
            (left, own), (right, theirs) = sums[-2:]
            parent = node_of_halves(left, right, self._replicas)
            if parent is None or not any(node.covers(parent) for node in self._nodes):
                return
            buffers = [own, self._moved(theirs, next(iter(own[0].devices())))]
            sums[-2:] = [(parent, self._arithmetic.totals((left, right), buffers))]

    def _moved(self, buffers: list[Leaf], device: jax.Device) -> list[Leaf]:
        return buffers if len(set(self._devices.devices)) == 1 else jax.device_put(buffers, device)
