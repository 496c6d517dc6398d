"""A backward pass in two parts: first the gradients of inputs, then, stage by stage, the gradients of parameters.

Earlier stages wait only for the first part (zero-bubble schedules: Qi et al., 2024).

A node of autograd computes only the gradients that are requested: a layer's input gradient without its weight gradient,
or the reverse. So the first part requests the gradients that enter nodes with parameters below them, and keeps these
gradients; the second part starts from them. Each gradient is computed by the same kernel as in a whole backward pass,
from the same numbers, and terms are added in the same order.

The first part of stage 0 has nothing to do, because no stage needs the gradients of its inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward

from strategies.errors import StrategyError
from strategies.torch.recorded_graph import NOWHERE, Edge, RecordedGraph


@dataclass(frozen=True)
class Entrance:
    """The edges from which one call of autograd computes the gradients of parameters.

    Attributes:
        edges: The edges; the first part has kept the gradients that flow along them.
        leaves: The nodes of the parameters that get gradients; None for all that autograd reaches.
    """

    edges: Sequence[Edge]
    leaves: Sequence[int] | None


@dataclass(frozen=True)
class SplitPlan:
    """The division of a backward pass, for all graphs of one shape. Nodes are given by their numbers.

    Attributes:
        first_part: The nodes that the first part runs.
        aims: For nodes of the first part, the edges along which they send gradients to be kept, by their places.
        kept: The edges whose gradients the first part keeps.
        entrances: The edges at which the second part of each stage begins.
        keeps_root: Whether a second part begins with the gradient of the loss.
    """

    first_part: frozenset[int]
    aims: Mapping[int, Sequence[tuple[int, Edge]]]
    kept: Sequence[Edge]
    entrances: Mapping[int, Sequence[Entrance]]
    keeps_root: bool

    @classmethod
    def of(cls, graph: RecordedGraph) -> SplitPlan:
        """Return the plan for graphs of a shape.

        Raises:
            StrategyError: If several stages use a parameter, because its gradients would be added in another order.
        """
        division = _Division(graph)
        entrances = division.entrances()
        edges = {edge for of_stage in entrances.values() for each in of_stage for edge in each.edges}
        first_part = division.trunk | division.early
        sent = {
            number: [(place, edge) for place, edge in enumerate(graph.edges[number]) if edge in edges]
            for number in first_part
        }
        aims = {number: found for number, found in sent.items() if found}
        return cls(frozenset(first_part), aims, sorted(edges - {graph.root}), entrances, graph.root in edges)


class SplitBackward:
    """The backward pass of one micro-batch.

    Args:
        loss: The loss, a scalar, from which the pass begins.
        graph: The graph of the loss.
        plan: The plan for graphs of its shape.
    """

    def __init__(self, loss: torch.Tensor, graph: RecordedGraph, plan: SplitPlan) -> None:
        self._graph = graph
        self._plan = plan
        self._of_loss = {graph.root: torch.ones_like(loss)}
        self._kept = dict(self._of_loss) if plan.keeps_root else {}

    def of_inputs(self) -> None:
        """Compute the gradients of the inputs, without gradients of parameters (the first part)."""
        if not self._plan.kept:
            return
        nodes, aims = self._graph.nodes, self._plan.aims
        hooks = [nodes[number].register_hook(partial(self._keep, found)) for number, found in aims.items()]
        try:
            self._run(self._of_loss, self._at(self._plan.kept), is_first=True)
        finally:
            for hook in hooks:
                hook.remove()

    def _at(self, edges: Iterable[Edge]) -> tuple[GradientEdge, ...]:
        nodes = self._graph.nodes
        return tuple(GradientEdge(nodes[number], place) for number, place in edges)

    def _keep(self, aims: Sequence[tuple[int, Edge]], found: Sequence[torch.Tensor | None], _: object) -> None:
        """Add the gradients that a node sends along edges, in the order of arrival, as autograd does."""
        for place, edge in aims:
            gradient = found[place]
            if gradient is not None:
                before = self._kept.get(edge)
                self._kept[edge] = gradient if before is None else before + gradient

    def of_weights(self, stage: int) -> None:
        """Run the second part for one stage: its parameters get their gradients."""
        for entrance in self._plan.entrances.get(stage, ()):
            kept = {edge: self._kept.pop(edge) for edge in entrance.edges if edge in self._kept}
            if kept:
                inputs = tuple(self._graph.parameter(leaf) for leaf in entrance.leaves or ())
                self._run(kept, inputs, is_first=False)

    def _run(self, begin: Mapping[Edge, torch.Tensor], inputs: Sequence[object], is_first: bool) -> None:
        """Run autograd without the checks of `torch.autograd`, which take as long as a small layer."""
        keep_graph, create_graph = is_first, False
        _engine_run_backward(
            self._at(begin),
            tuple(begin.values()),
            keep_graph,
            create_graph,
            inputs,
            allow_unreachable=True,
            accumulate_grad=not is_first,
        )


@dataclass
class _EdgeGroup:
    """Nodes that must run together, because they add to the gradients of the same parameters.

    Attributes:
        edges: The edges from the trunk to these nodes.
        users: The nodes of the trunk that these edges leave; None for the loss.
        nodes: The nodes, including those of their parameters.
    """

    edges: set[Edge]
    users: set[int | None]
    nodes: set[int]


class _Division:
    """Autograd's graph: a trunk, along which gradients flow to earlier stages, and branches with parameters.

    Attributes:
        trunk: The nodes from which autograd reaches a node of an earlier stage.
        early: Nodes that several nodes of the trunk in their own stage lead to. Their parameters get sums whose terms
            come in turn from the trunk and from these nodes, so these nodes run with the trunk.
    """

    def __init__(self, graph: RecordedGraph) -> None:
        self._graph = graph
        self._next = [[edge for edge in edges if edge[0] != NOWHERE] for edges in graph.edges]
        self.trunk: set[int] = set()
        self.early: set[int] = set()
        for node in graph.order:
            inner = [following for following, _ in self._next[node] if not graph.is_leaf(following)]
            if any(each in self.trunk or graph.stage(each) < graph.stage(node) for each in inner):
                self.trunk.add(node)

    def entrances(self) -> dict[int, list[Entrance]]:
        """Return the edges at which the second part of each stage begins."""
        return {stage: self._entrances_of(stage, groups) for stage, groups in self._groups().items()}

    def _groups(self) -> dict[int, list[_EdgeGroup]]:
        graph = self._graph
        found: dict[int, list[_EdgeGroup]] = {}
        stages: dict[int, int] = {}
        for edge, user in self._leaving_trunk():
            stage = graph.stage(user if user is not None and graph.is_leaf(edge[0]) else edge[0])
            nodes = graph.reached_from(edge[0])
            for node in nodes:
                if stages.setdefault(node, stage) != stage:  # a parameter: a shared inner node would be in the trunk
                    raise StrategyError(
                        f"a parameter of shape {list(graph.parameter(node).shape)} is used in the stages "
                        f"{stages[node]} and {stage}, but the schedule splits backward passes stage by stage; use it "
                        "in one stage, or use another schedule"
                    )
            groups = found.setdefault(stage, [])
            new = _EdgeGroup({edge}, {user}, nodes)
            for group in [each for each in groups if not each.nodes.isdisjoint(nodes)]:
                groups.remove(group)
                new = _EdgeGroup(group.edges | new.edges, group.users | new.users, group.nodes | new.nodes)
            groups.append(new)
        return found

    def _leaving_trunk(self) -> Iterator[tuple[Edge, int | None]]:
        """Yield the edges that leave the trunk, each with its node in the trunk."""
        root = self._graph.root
        if root[0] not in self.trunk:
            yield root, None
        for node in self.trunk:
            yield from ((edge, node) for edge in self._next[node] if edge[0] not in self.trunk)

    def _entrances_of(self, stage: int, groups: Sequence[_EdgeGroup]) -> list[Entrance]:
        graph = self._graph
        alone: dict[int, list[int]] = {}
        edges: list[Edge] = []
        for group in groups:
            own = [user for user in group.users if user is not None and graph.stage(user) == stage]
            leaves = [node for node in group.nodes if graph.is_leaf(node)]
            if not own:  # only later stages send gradients here, and these arrive first
                edges += group.edges
            elif len(group.users) == 1:  # run the node of the trunk again, now for its parameters
                alone.setdefault(own[0], []).extend(leaves)
            else:
                self.early |= group.nodes - set(leaves)
                edges += [(leaf, 0) for leaf in leaves]
        entrances = [Entrance(self._into(user), of_user) for user, of_user in alone.items()]
        return [*entrances, Entrance(edges, None)] if edges else entrances

    def _into(self, node: int) -> list[Edge]:
        root = self._graph.root
        edges = {edge for user in self.trunk for edge in self._next[user] if edge[0] == node}
        return [*edges, root] if root[0] == node else [*edges]
