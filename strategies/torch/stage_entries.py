"""The nodes of autograd at which the backward passes of a pipeline's stages begin, known for graphs of one shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from strategies.torch.recorded_graph import NOWHERE, RecordedGraph
from strategies.torch.split_backward import SplitPlan
from strategies.torch.stages import MetStages

_MOST_SHAPES = 64


@dataclass(frozen=True)
class StageEntries:
    """The entries of stages in the backward pass, for all graphs of one shape.

    Attributes:
        firsts: For each stage, the number of the first node that autograd reaches in it.
        split: The division of the backward pass into two parts; None if it is not divided.
    """

    firsts: Mapping[int, int]
    split: SplitPlan | None

    @classmethod
    def of(cls, graph: RecordedGraph, splits: bool) -> StageEntries:
        """Return the entries for graphs of a shape.

        Raises:
            StrategyError: If the pass is divided, and several stages use a parameter.
        """
        split = SplitPlan.of(graph) if splits else None
        run = [number for number in graph.order if graph.parts[number] and (not split or number in split.first_part)]
        return cls({graph.stage(number): number for number in run}, split)  # autograd begins with the latest


class KnownEntries:
    """The entries for the shapes of graphs met so far. Threads may share it.

    Args:
        stages: The stages, to record the parameters that they use.
    """

    def __init__(self, stages: MetStages) -> None:
        self._stages = stages
        self._found: dict[tuple[bool, tuple[int, ...]], StageEntries] = {}

    def of(self, graph: RecordedGraph, splits: bool) -> StageEntries:
        """Return the entries for a graph.

        Raises:
            StrategyError: If stages share a parameter that they cannot share.
        """
        key = (splits, graph.shape)
        found = self._found.get(key)
        if found is None:
            found = StageEntries.of(graph, splits)
            self._record_uses(graph)
            if len(self._found) >= _MOST_SHAPES:  # each graph has another shape: forget those met before
                self._found.clear()
            self._found[key] = found
        return found

    def _record_uses(self, graph: RecordedGraph) -> None:
        for number in reversed(graph.order):
            for following, _ in graph.edges[number]:
                if following != NOWHERE and graph.is_leaf(following):
                    self._stages.use(graph.parameter(following), graph.stage(number))
