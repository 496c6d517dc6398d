"""Changes of gradients on each replica: `map_gradient`, zeros for the weight 0, and rows of grouped parameters."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.autograd.graph import get_gradient_edge

from strategies.argument_checks import positive
from strategies.errors import StrategyError

_MARK = "_replica_groups"


@dataclass(frozen=True)
class ReplicaGroups:
    """Groups of replicas. The replicas of a group share a row of a parameter.

    Attributes:
        size: Number of replicas in a group; None for all of them.
        consecutive: Whether neighbouring replicas make a group, as 0011; otherwise they are dealt out, as 0101.
        sums: Whether gradients are summed over the group instead of averaged; the losses are multiplied by the number
            of all replicas then.

    Raises:
        ValueError: If the size is not positive.
    """

    size: int | None = 1
    consecutive: bool = True
    sums: bool = False

    def __post_init__(self) -> None:
        if self.size is not None:
            positive("size of a group of replicas", self.size)

    def count(self, replicas: int) -> int:
        """Return the number of groups.

        Raises:
            StrategyError: If the replicas cannot be divided evenly.
        """
        size = self.size or replicas
        if replicas % size:
            raise StrategyError(
                f"{replicas} replicas cannot be divided into groups of {size}; use a size that divides their number"
            )
        return replicas // size

    def row_of(self, replica: int, replicas: int) -> int:
        """Return the group of a replica, which is the number of its row."""
        count = self.count(replicas)
        return replica * count // replicas if self.consecutive else replica % count

    def gain(self, replicas: int) -> float:
        """Return the factor that corrects for the zeros of other groups in the mean over all replicas."""
        return 1.0 if self.sums else float(self.count(replicas))


def group_replicas(parameter: torch.nn.Parameter, groups: ReplicaGroups) -> None:
    """Give every group of replicas its own row of a parameter; in a replica the parameter has one axis less.

    Gradients are averaged over the group. Every instance has the whole parameter, so checkpoints have all rows, and the
    loss of an instance loses no row. Call this before the first step.

        weight = torch.nn.Parameter(torch.zeros(num_replicas // 2, 10))
        strategies.torch.group_replicas(weight, strategies.torch.ReplicaGroups(size=2))

    Args:
        parameter: A parameter whose first axis is as long as the number of groups.
        groups: The groups of replicas.
    """
    setattr(parameter, _MARK, groups)


def groups_of(parameter: torch.Tensor) -> ReplicaGroups | None:
    """Return the groups of a parameter; None if all replicas share the whole parameter."""
    groups: ReplicaGroups | None = getattr(parameter, _MARK, None)
    return groups


def summed(parameter: torch.nn.Parameter) -> None:
    """Make the gradients of a grouped parameter sums over its groups."""
    if (groups := groups_of(parameter)) is not None:
        group_replicas(parameter, replace(groups, sums=True))


@dataclass(frozen=True)
class GroupRow:
    """A replica's row of a grouped parameter."""

    number: int
    gain: float


def row_of(name: str, parameter: torch.Tensor, replica: int, replicas: int) -> GroupRow | None:
    """Return a replica's row of a parameter; None if the replica has the whole parameter.

    Raises:
        StrategyError: If the parameter does not have one row for each group.
    """
    if (groups := groups_of(parameter)) is None:
        return None
    count = groups.count(replicas)
    if not parameter.ndim or len(parameter) != count:
        raise StrategyError(
            f"{name} is of shape {list(parameter.shape)}, but {replicas} replicas make {count} groups, each of which "
            f"has a row of it; give it a first axis of {count}"
        )
    return GroupRow(groups.row_of(replica, replicas), groups.gain(replicas))


class ReplicaRows:
    """The rows of grouped parameters that a replica has in place of the whole parameters.

    Args:
        module: The module.
        replica: The global index of the replica.
        replicas: The number of all replicas.

    Attributes:
        of_trained: The replica's rows, by the numbers of the trained parameters.
    """

    def __init__(self, module: torch.nn.Module, replica: int, replicas: int) -> None:
        named = list(module.named_parameters())
        found = [row_of(name, one, replica, replicas) for name, one in named]
        pairs = list(zip(named, found, strict=True))
        trained = enumerate(row for (_, one), row in pairs if one.requires_grad)
        self.of_trained: dict[int, GroupRow] = {number: row for number, row in trained if row is not None}
        self._rows = {id(one): row for (_, one), row in pairs if row is not None}
        self._wholes: Mapping[int, torch.Tensor] = {id(one): one for _, one in named if id(one) in self._rows}
        self._places = [
            (inner, key, id(one))
            for inner in (module.modules() if self._rows else ())
            for key, one in inner._parameters.items()
            if id(one) in self._rows
        ]

    @contextmanager
    def put(self) -> Iterator[Mapping[int, torch.Tensor]]:
        """Put the rows into the module, and yield them by the ids of the whole parameters."""
        rows: dict[int, torch.Tensor] = {
            number: torch.nn.Parameter(whole.detach()[self._rows[number].number], whole.requires_grad)
            for number, whole in self._wholes.items()
        }
        self.give(rows)
        try:
            yield rows
        finally:
            self.give(self._wholes)

    def give(self, parameters: Mapping[int, torch.Tensor]) -> None:
        """Put these parameters into the module, by the ids of the whole parameters."""
        for inner, key, number in self._places:
            setattr(inner, key, parameters[number])


# ---- maps

MapGradient = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(gradient, parameter) -> gradient."""


class GradientMap:
    """The map of one replica's gradients, applied before they are summed.

    The function gets gradients without the loss scale and the weight of the loss, not yet divided by the number of
    micro-batches. If the weight is 0, gradients become zeros, even those that are not finite.

    Args:
        function: The function `map_gradient` of the options; None to change only gradients of the weight 0.
        keeps_bad: Whether elements that are not finite stay so, for a later check.
        at_once: Number of micro-batches whose backward passes run at the same time, in a pipeline.

    Attributes:
        is_attached: Whether gradients are mapped now.
    """

    def __init__(self, function: MapGradient | None, keeps_bad: bool = False, at_once: int = 1) -> None:
        self._function = function
        self._keeps_bad = keeps_bad
        self._at_once = at_once
        self._scale, self._divisor = 1.0, 1
        self._weight: float | None = None
        self._weights: dict[int, float | None] = {}  # of micro-batches that run at the same time, by their threads
        self.is_attached = False
        self._calls: Counter[int] = Counter()

    @contextmanager
    def attached(self, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        """Map the gradients added to the `grad` of a replica's parameters, but not results of `autograd.grad`."""
        nodes = [get_gradient_edge(one).node for one in parameters]  # PyTorch drops a node without references
        with ExitStack() as hooks:
            for node, parameter in zip(nodes, parameters, strict=True):
                hooks.enter_context(node.register_prehook(partial(_mapped, self, parameter)))
            self.is_attached = True
            try:
                yield
            finally:
                self.is_attached = False

    def begin(self, number: int, scale: float, divisor: int, weight: float | None = None) -> None:
        """Set the scale of a micro-batch's loss, and the divisor and weight that the map applies to its gradients.

        The thread that calls this runs the micro-batch's backward pass.
        """
        self._scale, self._divisor = scale, divisor
        self._weight = self._weights[threading.get_ident()] = weight
        if self._at_once == 1 or number == 0:
            self._calls.clear()

    def __call__(self, gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """Return the gradient to be added, in memory of its own.

        Raises:
            TypeError: If the function returns no tensor.
            ValueError: If the function returns another shape.
            StrategyError: If the function writes to the gradient, or gets parts of it one after another.
        """
        weight = self._weight if self._at_once == 1 else self._weights[threading.get_ident()]
        if weight == 0:
            return torch.zeros_like(gradient)
        if self._function is None:
            return gradient
        self._calls[id(parameter)] += 1
        if self._calls[id(parameter)] > self._at_once:
            raise StrategyError(
                f"map_gradient needs the whole gradient of a micro-batch, but the gradient of a parameter of shape "
                f"{list(parameter.shape)} comes in parts, as it does if several reentrant checkpoints use it; use "
                "checkpoint(..., use_reentrant=False)"
            )
        plain = gradient
        if self._scale != 1:
            plain = gradient.to(torch.promote_types(gradient.dtype, torch.float32)) / self._scale
        version = plain._version
        new = self._function(plain, parameter)
        if not isinstance(new, torch.Tensor):
            raise TypeError(f"map_gradient returns a {type(new).__name__}; it must return the gradient, a tensor")
        if new.shape != plain.shape:
            raise ValueError(
                f"map_gradient returns shape {list(new.shape)} for a gradient of {list(plain.shape)}; keep the shape"
            )
        if plain._version != version:
            raise StrategyError(
                "map_gradient writes to the gradient that it gets, which autograd may use elsewhere; return a new "
                "tensor, as gradient.clamp(-1, 1) in place of gradient.clamp_(-1, 1)"
            )
        new = new.to(plain.dtype)
        if self._keeps_bad:
            new = torch.where(plain.isfinite(), new, plain)
        return (new * self._scale / self._divisor * (1.0 if weight is None else weight)).to(gradient.dtype)


def multiplied(function: MapGradient, factor: int) -> MapGradient:
    """Return a function whose results are `factor` times as large."""
    return function if factor == 1 else lambda gradient, parameter: factor * function(gradient, parameter)


def _mapped(
    own: GradientMap, parameter: torch.Tensor, gradients: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor | None, ...]:
    """Map a gradient. Autograd calls this."""
    return tuple(None if gradient is None else own(gradient, parameter) for gradient in gradients)
