"""A backward pass in two parts: first the gradients of inputs, then, stage by stage, the gradients of parameters.

Earlier stages wait only for the first part (zero-bubble schedules: Qi et al., 2024).

A node of autograd computes only the gradients that are requested: a layer's input gradient without its weight gradient,
or the reverse. So the first part requests the gradients that enter nodes with parameters below them, and keeps these
gradients; the second part starts from them. Each gradient is computed by the same kernel as in a whole backward pass,
from the same numbers, and terms are added in the same order.

The first part of stage 0 has nothing to do, because no stage needs the gradients of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.autograd.graph import GradientEdge, Node

from strategies.errors import StrategyError

Edge = tuple[Node, int]
"""A node of autograd, and the number of its input at which a gradient enters."""


class SplitBackward:
    """The backward pass of one micro-batch.

    Args:
        loss: The loss, a scalar, from which the pass begins.
        stage_of: Returns the stage that has recorded a node.

    Attributes:
        of_first_part: The nodes that the first part runs.

    Raises:
        StrategyError: If several stages use a parameter, because its gradients would be added in another order.
    """

    def __init__(self, loss: torch.Tensor, stage_of: Callable[[Node], int]) -> None:
        self._loss = loss
        graph = _Graph((node_of(loss), loss.output_nr), stage_of)
        self._entrances = graph.entrances()
        self.of_first_part = graph.trunk | graph.early
        self._edges = {edge for of_stage in self._entrances.values() for each in of_stage for edge in each.edges}
        self._kept: dict[Edge, torch.Tensor] = {}
        if graph.root in self._edges:
            self._kept[graph.root] = torch.ones_like(loss)

    def of_inputs(self) -> None:
        """Compute the gradients of the inputs, without gradients of parameters (the first part)."""
        hooks = []
        for node in self.of_first_part:
            aims = {place: edge for place, edge in enumerate(node.next_functions) if edge in self._edges}
            if aims:
                hooks.append(node.register_hook(partial(self._keep, aims)))
        edges = [GradientEdge(*edge) for edge in self._edges]
        torch.autograd.grad(self._loss, edges, retain_graph=True, allow_unused=True)
        for hook in hooks:
            hook.remove()

    def _keep(self, aims: Mapping[int, Edge], found: Sequence[torch.Tensor | None], _: object) -> None:
        """Add the gradients that a node sends along edges, in the order of arrival, as autograd does."""
        for place, edge in aims.items():
            gradient = found[place]
            if gradient is not None:
                before = self._kept.get(edge)
                self._kept[edge] = gradient if before is None else before + gradient

    def of_weights(self, stage: int) -> None:
        """Run the second part for one stage: its parameters get their gradients."""
        for entrance in self._entrances.pop(stage, ()):
            kept = {edge: self._kept.pop(edge) for edge in entrance.edges if edge in self._kept}
            if kept:
                edges = [GradientEdge(*edge) for edge in kept]
                torch.autograd.backward(edges, list(kept.values()), inputs=entrance.parameters)


@dataclass(frozen=True)
class _Entrance:
    """The edges from which one call of autograd computes the gradients of parameters.

    Attributes:
        edges: The edges; the first part has kept the gradients that flow along them.
        parameters: The parameters that get gradients; None for all that autograd reaches.
    """

    edges: Sequence[Edge]
    parameters: Sequence[torch.Tensor] | None


@dataclass
class _EdgeGroup:
    """Nodes that must run together, because they add to the gradients of the same parameters.

    Attributes:
        edges: The edges from the trunk to these nodes.
        users: The nodes of the trunk that these edges leave; None for the loss.
        nodes: The nodes, including those of their parameters.
    """

    edges: set[Edge]
    users: set[Node | None]
    nodes: set[Node]


class _Graph:
    """Autograd's graph: a trunk, along which gradients flow to earlier stages, and branches with parameters.

    Attributes:
        trunk: The nodes from which autograd reaches a node of an earlier stage.
        early: Nodes that several nodes of the trunk in their own stage lead to. Their parameters get sums whose terms
            come in turn from the trunk and from these nodes, so these nodes run with the trunk.
    """

    def __init__(self, root: Edge, stage_of: Callable[[Node], int]) -> None:
        self.root = root
        computed = (node for node in nodes_from(root[0]) if parameter_of(node) is None)
        nodes = sorted(computed, key=lambda node: node._sequence_nr())
        self._next = {node: [(one, place) for one, place in node.next_functions if one is not None] for node in nodes}
        self._stages = {node: stage_of(node) for node in nodes}
        self.trunk: set[Node] = set()
        self.early: set[Node] = set()
        for node in nodes:  # in the order of recording: a node comes after all nodes that it leads to
            inner = [following for following, _ in self._next[node] if not _is_leaf(following)]
            if any(each in self.trunk or self._stages[each] < self._stages[node] for each in inner):
                self.trunk.add(node)

    def entrances(self) -> dict[int, list[_Entrance]]:
        """Return the edges at which the second part of each stage begins."""
        return {stage: self._entrances_of(stage, groups) for stage, groups in self._groups().items()}

    def _groups(self) -> dict[int, list[_EdgeGroup]]:
        found: dict[int, list[_EdgeGroup]] = {}
        stages: dict[Node, int] = {}
        for edge, user in self._leaving_trunk():
            stage = self._stages[user if user is not None and _is_leaf(edge[0]) else edge[0]]
            nodes = set(nodes_from(edge[0]))
            for node in nodes:
                if stages.setdefault(node, stage) != stage:
                    parameter = parameter_of(node)
                    assert parameter is not None  # a shared inner node would be in the trunk
                    raise StrategyError(
                        f"a parameter of shape {list(parameter.shape)} is used in the stages {stages[node]} and "
                        f"{stage}, but the schedule splits backward passes stage by stage; use it in one stage, or "
                        "use another schedule"
                    )
            groups = found.setdefault(stage, [])
            new = _EdgeGroup({edge}, {user}, nodes)
            for group in [each for each in groups if not each.nodes.isdisjoint(nodes)]:
                groups.remove(group)
                new = _EdgeGroup(group.edges | new.edges, group.users | new.users, group.nodes | new.nodes)
            groups.append(new)
        return found

    def _leaving_trunk(self) -> Iterator[tuple[Edge, Node | None]]:
        """Yield the edges that leave the trunk, each with its node in the trunk."""
        if self.root[0] not in self.trunk:
            yield self.root, None
        for node in self.trunk:
            yield from ((edge, node) for edge in self._next[node] if edge[0] not in self.trunk)

    def _entrances_of(self, stage: int, groups: Sequence[_EdgeGroup]) -> list[_Entrance]:
        alone: dict[Node, list[torch.Tensor]] = {}
        edges: list[Edge] = []
        for group in groups:
            own = [user for user in group.users if user is not None and self._stages[user] == stage]
            if not own:  # only later stages send gradients here, and these arrive first
                edges += group.edges
            elif len(group.users) == 1:  # run the node of the trunk again, now for its parameters
                parameters = map(parameter_of, group.nodes)
                alone.setdefault(own[0], []).extend(one for one in parameters if one is not None)
            else:
                self.early |= {node for node in group.nodes if not _is_leaf(node)}
                edges += [(node, 0) for node in group.nodes if _is_leaf(node)]
        entrances = [_Entrance(self._into(user), of_user) for user, of_user in alone.items()]
        return [*entrances, _Entrance(edges, None)] if edges else entrances

    def _into(self, node: Node) -> list[Edge]:
        edges = {edge for user in self.trunk for edge in self._next[user] if edge[0] is node}
        return [*edges, self.root] if self.root[0] is node else [*edges]


def node_of(loss: torch.Tensor) -> Node:
    """Return the node that has computed a loss.

    Raises:
        StrategyError: If the loss is a parameter, which no node has computed.
    """
    if loss.grad_fn is None:
        raise StrategyError(
            f"the loss is a parameter of shape {list(loss.shape)}, but a pipeline's stages must compute it; return a "
            "value computed from the parameter, as 1 * loss"
        )
    return loss.grad_fn


def nodes_from(root: Node) -> Iterator[Node]:
    """Yield a node of autograd's graph and all nodes that it leads to, including those of parameters."""
    seen, waiting = {root}, [root]
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def parameter_of(node: Node | None) -> torch.Tensor | None:
    """Return the parameter to which a node adds gradients; None for other nodes."""
    return getattr(node, "variable", None)


def _is_leaf(node: Node) -> bool:
    return parameter_of(node) is not None
