"""Parameters with a row for each group of replicas, along the first axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

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
    groups = groups_of(parameter)
    if groups is not None:
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
    groups = groups_of(parameter)
    if groups is None:
        return None
    count = groups.count(replicas)
    if not parameter.ndim or len(parameter) != count:
        raise StrategyError(
            f"{name} is of shape {list(parameter.shape)}, but {replicas} replicas make {count} groups, each of which "
            f"has a row of it; give it a first axis of {count}"
        )
    return GroupRow(groups.row_of(replica, replicas), groups.gain(replicas))


def part_of(parameter: torch.Tensor, row: GroupRow | None) -> torch.Tensor:
    """Return a replica's part of a parameter, in the parameter's memory."""
    whole = parameter.detach()
    return whole if row is None else whole[row.number]


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
            number: torch.nn.Parameter(part_of(whole, self._rows[number]), whole.requires_grad)
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
