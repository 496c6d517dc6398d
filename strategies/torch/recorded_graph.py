"""The graph that autograd has recorded for a loss, with numbered nodes, and a shape to recognise like graphs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.autograd.graph import Node

from strategies.errors import StrategyError

Edge = tuple[int, int]
"""The number of a node of autograd, and the number of its input at which a gradient enters."""

_LEAF, NOWHERE = -1, -2


@dataclass(frozen=True)
class RecordedGraph:
    """The nodes that autograd reaches from a loss.

    Attributes:
        nodes: The nodes in the order in which `recorded` has met them. Node 0 has computed the loss.
        root: The edge at which the gradient of the loss enters.
        shape: A value that is equal for two graphs if nodes with the same number have the same parameter, or were
            recorded in the same stage, have the same edges, and were recorded in the same order.
        parts: For each node that belongs to no parameter, one more than its stage; 0 before the first stage.
        order: The numbers of these nodes in the order of recording: a node comes after all nodes that it leads to.
    """

    nodes: Sequence[Node]
    root: Edge
    shape: tuple[int, ...]
    parts: dict[int, int]
    order: Sequence[int]

    def stage(self, number: int) -> int:
        """Return the stage in which a node was recorded; 0 for a node recorded before the first stage."""
        return max(self.parts[number] - 1, 0)

    def is_leaf(self, number: int) -> bool:
        """Return whether a node adds the gradients of a parameter."""
        return number not in self.parts

    def parameter(self, number: int) -> torch.Tensor:
        """Return the parameter of a leaf."""
        found: torch.Tensor | None = getattr(self.nodes[number], "variable", None)
        assert found is not None, "not a leaf"
        return found

    @cached_property
    def edges(self) -> Sequence[Sequence[Edge]]:
        """The edges that leave each node, one for each gradient that the node sends."""
        numbers: dict[Node | None, int] = {node: number for number, node in enumerate(self.nodes)}
        return [
            [(numbers.get(following, NOWHERE), place) for following, place in node.next_functions]
            for node in self.nodes
        ]

    def reached_from(self, number: int) -> set[int]:
        """Return the numbers of a node and of all nodes that it leads to."""
        seen, waiting = {number}, [number]
        while waiting:
            for following, _ in self.edges[waiting.pop()]:
                if following != NOWHERE and following not in seen:
                    seen.add(following)
                    waiting.append(following)
        return seen


def recorded(loss: torch.Tensor, begins: Sequence[int]) -> RecordedGraph:
    """Return the graph of a loss.

    Args:
        loss: The loss.
        begins: Autograd's sequence numbers at which the stages begin.

    Raises:
        StrategyError: If the loss is a parameter, which no node has computed.
    """
    nodes = [_node_of(loss)]
    numbers, shape = {nodes[0]: 0}, [loss.output_nr]
    sequence: dict[int, int] = {}
    parts: dict[int, int] = {}
    for number, node in enumerate(nodes):  # grows on the way
        parameter = getattr(node, "variable", None)
        if parameter is not None:
            shape += (_LEAF, id(parameter))
            continue
        sequence[number] = recorded_at = node._sequence_nr()
        parts[number] = part = bisect_right(begins, recorded_at)
        edges = node.next_functions
        shape += (part, len(edges))
        for following, place in edges:
            if following is None:
                shape.append(NOWHERE)
                continue
            found = numbers.setdefault(following, len(nodes))
            if found == len(nodes):
                nodes.append(following)
            shape += (found, place)
    order = sorted(sequence, key=sequence.__getitem__)
    return RecordedGraph(nodes, (0, loss.output_nr), (*shape, *order), parts, order)


def _node_of(loss: torch.Tensor) -> Node:
    if loss.grad_fn is None:
        raise StrategyError(
            f"the loss is a parameter of shape {list(loss.shape)}, but a pipeline's stages must compute it; return a "
            "value computed from the parameter, as 1 * loss"
        )
    return loss.grad_fn
