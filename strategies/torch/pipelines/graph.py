"""The graph that autograd has recorded for a loss, and the nodes at which the backward passes of stages begin."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import Node

from strategies.errors import StrategyError
from strategies.torch.pipelines.stages import MetStages

_LEAF, _NOWHERE = -1, -2
_MOST_SHAPES = 64


@dataclass(frozen=True)
class RecordedGraph:
    """The nodes that autograd reaches from a loss, numbered.

    Attributes:
        nodes: The nodes in the order in which `recorded` has met them. Node 0 has computed the loss.
        shape: A value that is equal for two graphs if nodes with the same number have the same parameter, or were
            recorded in the same stage, have the same edges, and were recorded in the same order.
        parts: For each node that belongs to no parameter, one more than its stage; 0 before the first stage.
        order: The numbers of these nodes in the order of recording: a node comes after all nodes that it leads to.
    """

    nodes: Sequence[Node]
    shape: tuple[int, ...]
    parts: Mapping[int, int]
    order: Sequence[int]

    def stage(self, number: int) -> int:
        """Return the stage in which a node was recorded; 0 for a node recorded before the first stage."""
        return max(self.parts[number] - 1, 0)

    @property
    def firsts(self) -> Mapping[int, int]:
        """The number of the first node that autograd reaches in each stage: the one that was recorded last."""
        return {self.stage(number): number for number in self.order if self.parts[number]}

    def record_uses(self, stages: MetStages) -> None:
        """Record which stages use a parameter.

        Raises:
            StrategyError: If stages share a parameter that they cannot share.
        """
        for number in reversed(self.order):
            for following, _ in self.nodes[number].next_functions:
                parameter = getattr(following, "variable", None)
                if parameter is not None:
                    stages.use(parameter, self.stage(number))


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
                shape.append(_NOWHERE)
                continue
            found = numbers.setdefault(following, len(nodes))
            if found == len(nodes):
                nodes.append(following)
            shape += (found, place)
    order = sorted(sequence, key=sequence.__getitem__)
    return RecordedGraph(nodes, (*shape, *order), parts, order)


def _node_of(loss: torch.Tensor) -> Node:
    if loss.grad_fn is None:
        raise StrategyError(
            f"the loss is a parameter of shape {list(loss.shape)}, but a pipeline's stages must compute it; return a "
            "value computed from the parameter, as 1 * loss"
        )
    return loss.grad_fn


class StageEntries:
    """The entries of stages in backward passes, for the shapes of graphs met so far. Threads may share it.

    Args:
        stages: The stages, to record the parameters that they use.
    """

    def __init__(self, stages: MetStages) -> None:
        self._stages = stages
        self._found: dict[tuple[int, ...], Mapping[int, int]] = {}

    def of(self, graph: RecordedGraph) -> Mapping[int, int]:
        """Return, for each stage, the number of the first node that autograd reaches in it.

        Raises:
            StrategyError: If stages share a parameter that they cannot share.
        """
        found = self._found.get(graph.shape)
        if found is None:
            found = graph.firsts
            graph.record_uses(self._stages)
            if len(self._found) >= _MOST_SHAPES:  # each graph has another shape: forget those met before
                self._found.clear()
            self._found[graph.shape] = found
        return found
