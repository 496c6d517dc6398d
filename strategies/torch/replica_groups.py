"""Parameters of which every group of replicas has its own: the first axis has a row for each group."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from strategies.argument_checks import positive
from strategies.errors import StrategyError

_MARK = "_replica_groups"


@dataclass(frozen=True)
class ReplicaGroups:
    """Groups of replicas that have a row of a parameter in common.

    Attributes:
        size: replicas in a group; None: all of them.
        consecutive: whether replicas beside each other make a group, as 0011; otherwise they are dealt out, as 0101.
        sums: whether gradients are the sum over the group, and not the mean; of losses that are multiplied by the
            number of all replicas.

    Raises:
        ValueError: if the size is not positive.
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
            StrategyError: if the replicas cannot be divided so.
        """
        size = self.size or replicas
        if replicas % size:
            raise StrategyError(
                f"{replicas} replicas are to be divided into groups of {size}; use a size that divides their number"
            )
        return replicas // size

    def row_of(self, replica: int, replicas: int) -> int:
        """Return the group of a replica, which is the number of its row."""
        count = self.count(replicas)
        return replica * count // replicas if self.consecutive else replica % count

    def gain(self, replicas: int) -> float:
        """Return the factor of a gradient whose mean over all replicas is taken with zeros of other groups."""
        return 1.0 if self.sums else float(self.count(replicas))


def group_replicas(parameter: torch.nn.Parameter, groups: ReplicaGroups) -> None:
    """Have every group of replicas train a row of a parameter of its own: in replicas it has one axis less.

    Gradients are averaged over the group. The whole parameter is on every instance, so checkpoints have all rows, and
    nothing is lost with an instance. Call it before the first step.

    Args:
        parameter: with a first axis as long as there are groups.
        groups: which replicas have a row in common.
    """
    setattr(parameter, _MARK, groups)


def groups_of(parameter: torch.Tensor) -> ReplicaGroups | None:
    """Return the groups of a parameter; None where all replicas have the same."""
    groups: ReplicaGroups | None = getattr(parameter, _MARK, None)
    return groups


def summed(parameter: torch.nn.Parameter) -> None:
    """Have the gradients of a parameter be sums over its groups."""
    groups = groups_of(parameter)
    if groups is not None:
        group_replicas(parameter, replace(groups, sums=True))


@dataclass(frozen=True)
class GroupRow:
    """The row of a grouped parameter that a replica has."""

    number: int
    gain: float


def row_of(name: str, parameter: torch.Tensor, replica: int, replicas: int) -> GroupRow | None:
    """Return the row that a replica has of a parameter; None where it has all of it.

    Raises:
        StrategyError: if the parameter has not a row for each group.
    """
    groups = groups_of(parameter)
    if groups is None:
        return None
    count = groups.count(replicas)
    if not parameter.ndim or len(parameter) != count:
        raise StrategyError(
            f"{name} is of shape {list(parameter.shape)}, and {replicas} replicas make {count} groups, each of which "
            f"has a row of it; give it a first axis of {count}"
        )
    return GroupRow(groups.row_of(replica, replicas), groups.gain(replicas))


def part_of(parameter: torch.Tensor, row: GroupRow | None) -> torch.Tensor:
    """Return what a replica sees of a parameter, in the parameter's memory."""
    whole = parameter.detach()
    return whole if row is None else whole[row.number]
