"""The state of a module between calls: modes, buffers that an inference model writes, and parameters."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from strategies.compat.poptorch.enums import CommGroupType, VariableRetrievalMode
from strategies.errors import StrategyError
from strategies.jax.replicas.replicas import Replicas
from strategies.torch.replicas.groups import ReplicaGroups, group_replicas
from strategies.torch.replicas.module_parts import slots_of

logger = logging.getLogger("strategies.torch.poptorch")


class Modes:
    """The `training` mode of each submodule at the first call, or as the executor's `train` or `eval` set it last.

    In PopTorch a program may call `model.eval()` before an inference, and the training model, already compiled, keeps
    dropout on.

    Args:
        module: Module whose modes are kept.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._taken: dict[torch.nn.Module, bool] = {}
        self._has_told = False

    def take(self) -> None:
        """Keep the current modes."""
        self._taken = {each: each.training for each in self._module.modules()}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Give the submodules the kept modes for a while, and afterwards the program's modes again."""
        if not self._taken:
            self.take()
            if not self._module.training:
                logger.warning(
                    "the module of a training model is in evaluation mode at the first call, so dropout is off and "
                    "statistics do not change; if this is not intended, call model.train() before the first call"
                )
        now = {each: each.training for each in self._module.modules()}
        others = {each: mode for each, mode in now.items() if mode is not self._taken.get(each, mode)}
        if others and not self._has_told and self._module not in others:
            self._has_told = True
            logger.warning(
                "the mode of %s has changed, but a training model keeps the modes of its first call; call train() or "
                "eval() of the training model to change them",
                type(next(iter(others))).__name__,
            )
        for each in others:
            each.training = self._taken[each]
        try:
            yield
        finally:
            for each, mode in others.items():
                each.training = mode


class WrittenBuffers:
    """Buffers of an inference model that `forward` writes.

    A single replica writes the module's buffers. Each of several replicas keeps its own values, as in PopTorch, and the
    module keeps those that it had.

    Args:
        module: Module that has the buffers.
        replicas: Replicas that run the module.

    Attributes:
        own: For each local replica, the buffers that differ from those of the module, by the number of the slot.
    """

    def __init__(self, module: torch.nn.Module, replicas: Replicas) -> None:
        self._module, self._is_single = module, replicas.num_replicas_in_sync == 1
        self.own: list[dict[int, torch.Tensor]] = [{} for _ in replicas.local_replicas]

    def keep(self, written: Sequence[Mapping[int, torch.Tensor]]) -> None:
        """Keep the buffers that each local replica wrote in a call, for the next call."""
        if not any(written):
            return
        if self._is_single:
            slots = slots_of(self._module)
            with torch.no_grad():
                for number, tensor in written[0].items():
                    slots[number].put(tensor)
            return
        if not any(self.own):
            logger.info("an inference writes buffers of its module: each replica keeps its own copy")
        for own, new in zip(self.own, written, strict=True):
            own.update(new)


class GroupableParameter(torch.nn.Parameter):
    """A parameter that can have a row for each group of replicas."""

    def replicaGrouping(
        self,
        comm_group_type: CommGroupType,
        shards: int = 0,
        variable_retrieval_mode: VariableRetrievalMode = VariableRetrievalMode.OnePerGroup,
    ) -> None:
        """Give each group of replicas a row of this parameter to train; see `strategies.torch.group_replicas`.

        Args:
            comm_group_type: Kind of groups.
            shards: Number of replicas in a group, for Consecutive and Orthogonal groups.
            variable_retrieval_mode: OnePerGroup, which gives the module a row for each group.

        Raises:
            StrategyError: For another mode.
            ValueError: If groups have no size.
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
