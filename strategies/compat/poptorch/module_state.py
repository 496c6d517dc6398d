"""The state of a module between calls: its modes, the buffers that an inference writes, and its parameters."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from strategies.compat.poptorch.enums import CommGroupType, VariableRetrievalMode
from strategies.errors import StrategyError
from strategies.jax.replicas.replicas import Replicas
from strategies.torch.module_parts import slots_of
from strategies.torch.replica_groups import ReplicaGroups, group_replicas

logger = logging.getLogger("strategies.torch.poptorch")


class Modes:
    """The `training` of each submodule, as it was at the first call or was set by the executor.

    A program of PopTorch calls `model.eval()` before an inference, and its training model, which was compiled before,
    goes on with dropout.

    Args:
        module: whose modes they are.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._taken: dict[torch.nn.Module, bool] = {}
        self._has_told = False

    def take(self) -> None:
        """Keep the modes as they are now."""
        self._taken = {each: each.training for each in self._module.modules()}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Have the modules in the modes that were taken, and afterwards in those that the program has set."""
        if not self._taken:
            self.take()
            if not self._module.training:
                logger.warning(
                    "a training model is called for the first time with its module in evaluation mode, so dropout is "
                    "off and statistics stay; call model.train() before, unless that is meant"
                )
        now = {each: each.training for each in self._module.modules()}
        others = {each: mode for each, mode in now.items() if mode is not self._taken.get(each, mode)}
        if others and not self._has_told and self._module not in others:
            self._has_told = True
            logger.warning(
                "the mode of %s has changed, and a training model keeps that of its first call; call train() or eval() "
                "of the training model to have it take the modes as they are then",
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
    """Buffers of an inference model that `forward` has written: a single replica writes those of the module.

    Several replicas have some of their own each, as in PopTorch; the module keeps what it has.

    Args:
        module: of which they are.
        replicas: on which it runs.
    """

    def __init__(self, module: torch.nn.Module, replicas: Replicas) -> None:
        self._module, self._is_single = module, replicas.num_replicas_in_sync == 1
        self._own: list[dict[int, torch.Tensor]] = [{} for _ in replicas.local_replicas]

    @property
    def masters(self) -> Sequence[Sequence[torch.Tensor]] | None:
        """The buffers with which each local replica begins; None for those of the module."""
        if not any(self._own):
            return None
        of_module = [slot.tensor for slot in slots_of(self._module)]
        return [[own.get(number, tensor) for number, tensor in enumerate(of_module)] for own in self._own]

    def keep(self, written: Sequence[Mapping[int, torch.Tensor]]) -> None:
        """Go on with what a call has written, for each local replica."""
        if not any(written):
            return
        if self._is_single:
            slots = slots_of(self._module)
            with torch.no_grad():
                for number, tensor in written[0].items():
                    slots[number].put(tensor)
            return
        if not any(self._own):
            logger.info("an inference writes buffers of its module: each replica goes on with its own")
        for own, new in zip(self._own, written, strict=True):
            own.update({number: tensor.clone() for number, tensor in new.items()})


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
