"""Parameters of a model as PopTorch's programs see them: `model.table.replicaGrouping(...)`."""

from __future__ import annotations

import torch

from strategies.errors import StrategyError
from strategies.torch.poptorch.enums import CommGroupType, VariableRetrievalMode
from strategies.torch.replica_groups import ReplicaGroups, group_replicas


class GroupableParameter(torch.nn.Parameter):
    """A parameter of which groups of replicas may have rows of their own."""

    def replicaGrouping(
        self,
        comm_group_type: CommGroupType,
        shards: int = 0,
        variable_retrieval_mode: VariableRetrievalMode = VariableRetrievalMode.OnePerGroup,
    ) -> None:
        """Have every group of replicas train a row of this parameter; see `strategies.torch.group_replicas`.

        Args:
            comm_group_type: how groups are made.
            shards: replicas in a group, of Consecutive and Orthogonal ones.
            variable_retrieval_mode: OnePerGroup: the module has a row for each group.

        Raises:
            StrategyError: for another mode.
            ValueError: if groups have no size.
        """
        if VariableRetrievalMode(variable_retrieval_mode) is not VariableRetrievalMode.OnePerGroup:
            raise StrategyError(
                "the replicas of a group have the same bits, and the module has one row for each group; use "
                "VariableRetrievalMode.OnePerGroup"
            )
        kind = CommGroupType(comm_group_type)
        sizes = {CommGroupType.All: None, CommGroupType.NoGrouping: 1}
        size = sizes.get(kind, shards)
        group_replicas(self, ReplicaGroups(size, consecutive=kind is not CommGroupType.Orthogonal))


def make_groupable(module: torch.nn.Module) -> None:
    """Give the parameters of a module the method `replicaGrouping`."""
    for parameter in module.parameters():
        if type(parameter) is torch.nn.Parameter:
            parameter.__class__ = GroupableParameter
