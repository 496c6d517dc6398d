"""A module in PopTorch's models: its outputs and loss, anchored tensors, and its state between calls.

The loss is among the outputs. A call returns the joined outputs of all micro-batches. Anchored tensors are recorded
during training without being outputs of the model.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import reduce
from typing import TypeAlias

import numpy as np
import torch

import strategies.trees as trees
from strategies.compat.poptorch.names import Anchor, CommGroupType, OutputMode, VariableRetrievalMode
from strategies.compat.poptorch.operations import heeded_by, losses_marked_by
from strategies.compat.poptorch.options import Options
from strategies.errors import StrategyError
from strategies.torch.replicas.gradient_map import ReplicaGroups, group_replicas
from strategies.torch.replicas.module_parts import slots_of
from strategies.torch.tensors import nodes_behind
from strategies.typing import Batch, Tree

logger = logging.getLogger("strategies.torch.poptorch")

LossAndOutputs: TypeAlias = tuple[torch.Tensor, dict[str, torch.Tensor], Tree]
"""A loss, further metrics, and the outputs of the module."""

Rounds = Sequence[Sequence[Tree]]
"""Outputs of the local replicas in their order, by micro-batch of a call."""

GRADIENT, UPDATED = "Gradient___", "UpdatedVar___"
"""Prefixes of a parameter's name: for its mean gradient over micro-batches and replicas, and its updated value."""


def outputs_and_losses(module: torch.nn.Module, batch: Batch) -> tuple[Tree, list[torch.Tensor]]:
    """Call the module; return its outputs and the losses that it marked.

    Raises:
        TypeError: If an output is a container whose tensors cannot be joined over replicas.
    """
    args, kwargs = batch
    outputs, marked = losses_marked_by(lambda: module(*args, **kwargs))
    for leaf in trees.leaves(outputs):
        if is_dataclass(leaf) or isinstance(leaf, Mapping | np.ndarray):
            raise TypeError(
                f"the model returns a {type(leaf).__name__}, whose tensors cannot be joined over replicas; return "
                "tensors, in tuples, lists or dictionaries"
            )
    return outputs, marked


def loss_function(factor: int, autocasts: bool) -> Callable[[torch.nn.Module, Batch], LossAndOutputs]:
    """Return a loss function for `Trainer` that multiplies the gradient of the module's loss by `factor`.

    Args:
        factor: R to sum gradients over replicas, because `Trainer` takes their mean; otherwise 1.
        autocasts: Whether `poptorch.autocast` has an effect inside the module.
    """

    def loss_fn(module: torch.nn.Module, batch: Batch) -> LossAndOutputs:
        outputs, marked = outputs_and_losses(module, batch)
        loss = loss_of(outputs, marked)
        if factor != 1:
            loss = loss.detach() + factor * (loss - loss.detach())  # metrics show the unchanged value
        return loss, {}, outputs

    return heeded_by(loss_fn, autocasts)


def loss_of(outputs: Tree, marked: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the loss of a training model: the last marked one, or the only scalar output with a gradient.

    Raises:
        StrategyError: If no output can be the loss, or several can.
    """
    if marked:
        return last_of(marked)
    tensors = [leaf for leaf in trees.leaves(outputs) if isinstance(leaf, torch.Tensor)]
    scalars = [one for one in tensors if not one.ndim and one.is_floating_point() and one.requires_grad]
    if not scalars:
        raise StrategyError(
            "the model returns no scalar that depends on its parameters; return the loss, or use poptorch.identity_loss"
        )
    if len({id(one) for one in scalars}) > 1:
        raise StrategyError(
            f"the model returns {len(scalars)} scalars that depend on its parameters, and any could be the loss; mark "
            "the loss with poptorch.identity_loss(loss, 'none'), and detach() the others"
        )
    return scalars[0]


def last_of(marked: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the last marked loss, of which all other marked losses must be parts.

    Raises:
        StrategyError: If another marked loss is not part of it.
    """
    *parts, last = marked
    wanted = {part.grad_fn for part in parts} - {last.grad_fn, None}
    if wanted and not wanted <= set(nodes_behind(last)):
        raise StrategyError(
            f"{len(marked)} losses are marked; add them up, and mark only the sum with poptorch.identity_loss"
        )
    return last


def put_together(rounds: Rounds, mode: OutputMode, every: int) -> Tree:
    """Return the outputs of a call, joined over micro-batches and replicas.

    Tensors are joined along their first axis, in the order of the rows of the batch: by micro-batch, and inside a
    micro-batch by replica. Several scalars are stacked along a new axis.

    Args:
        rounds: Outputs of all micro-batches and local replicas.
        mode: Choice of micro-batches.
        every: n of `OutputMode.EveryN`.

    Raises:
        ValueError: If n does not divide the number of micro-batches.
    """
    if mode is OutputMode.Sum:
        return joined([_sum(of_replica) for of_replica in zip(*rounds, strict=True)])
    if mode is OutputMode.Final:
        return joined(rounds[-1])
    if mode is OutputMode.EveryN:
        if len(rounds) % every:
            raise ValueError(
                f"EveryN with n {every} does not fit {len(rounds)} micro-batches; use a period that divides "
                "deviceIterations x gradientAccumulation"
            )
        rounds = rounds[every - 1 :: every]
    return joined([each for of_replicas in rounds for each in of_replicas])


def joined(outputs: Sequence[Tree]) -> Tree:
    """Join the tensors of several trees along their first axis; stack scalars along a new one."""
    return trees.map(lambda *leaves: _join(leaves), *outputs) if len(outputs) > 1 else outputs[0]


def _join(leaves: Sequence[Tree]) -> Tree:
    if not isinstance(leaves[0], torch.Tensor):
        return leaves[-1]
    return torch.cat(tuple(leaves)) if leaves[0].ndim else torch.stack(tuple(leaves))


def _sum(outputs: Sequence[Tree]) -> Tree:
    return trees.map(lambda *leaves: reduce(operator.add, leaves), *outputs)


def names_of(module: torch.nn.Module) -> list[str]:
    """Return the names of the tensors that can be anchored."""
    names = [name for name, _ in module.named_parameters()]
    return [*names, *(f"{kind}{name}" for kind in (GRADIENT, UPDATED) for name in names)]


class Anchored:
    """The values of anchored tensors in the last call of a model.

    Args:
        options: Options that have the anchors.
        module: Module that has the tensors.
        mode: Mode of outputs, for anchors that have none.
        is_sharded: Whether this instance has only parts of mean gradients.

    Raises:
        StrategyError: If a tensor does not exist, or this instance has only a part of it.
        ValueError: If n of `OutputMode.EveryN` does not divide the number of updates.
    """

    def __init__(self, options: Options, module: torch.nn.Module, mode: OutputMode, is_sharded: bool) -> None:
        self._module = module
        self._anchors: dict[str, Anchor] = {}
        self._seen: dict[str, list[torch.Tensor]] = {}
        known = names_of(module) if options.anchors else []
        every = max(1, options.output_every // options.Training.gradient_accumulation)
        for short, anchor in options.anchors.items():
            if anchor.name not in known:
                raise StrategyError(
                    f"there is no tensor {anchor.name!r} to anchor; anchor a parameter, or {GRADIENT} or {UPDATED} "
                    f"before its name: {', '.join(known)}"
                )
            if anchor.mode is OutputMode.EveryN and options.device_iterations % anchor.every:
                raise ValueError(
                    f"{anchor.name} is anchored with EveryN and n {anchor.every}, which does not divide "
                    f"{options.device_iterations} updates; use a period that divides deviceIterations"
                )
            if is_sharded and anchor.name.startswith(GRADIENT):
                raise StrategyError(
                    f"{anchor.name} is anchored, but with a sharded optimizer an instance has only a part of it; "
                    f"anchor {UPDATED}{anchor.name.removeprefix(GRADIENT)}, or do not shard"
                )
            self._anchors[short] = anchor if anchor.mode is not None else Anchor(anchor.name, mode, every)

    def begin(self) -> None:
        """Drop the values of the last call."""
        self._seen = {short: [] for short in self._anchors}

    def look(self) -> None:
        """Record the values after an update."""
        for short, anchor in self._anchors.items():
            tensor: torch.Tensor = self._module.get_parameter(anchor.name.removeprefix(UPDATED).removeprefix(GRADIENT))
            if anchor.name.startswith(GRADIENT):
                tensor = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            self._seen[short].append(tensor.detach().clone())

    def of_call(self, short: str) -> torch.Tensor:
        """Return an anchored tensor after the updates of its mode, stacked along a first axis if there are several.

        Raises:
            StrategyError: If it is not anchored, or the model was not called.
        """
        seen = self._seen.get(short)
        if not seen:
            raise StrategyError(
                f"no value of {short!r} was recorded; anchor it with Options.anchorTensor, and call the training model "
                f"first. Anchored are: {', '.join(self._anchors) or 'none'}"
            )
        anchor = self._anchors[short]
        if anchor.mode in (OutputMode.Default, OutputMode.Final):
            return seen[-1]
        if anchor.mode is OutputMode.Sum:
            return torch.stack(tuple(seen)).sum(0)
        return torch.stack(tuple(seen[anchor.every - 1 :: anchor.every]))


# ---- the state of a module between calls


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
        self._has_logged = False

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
        if others and not self._has_logged and self._module not in others:
            self._has_logged = True
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


def keep_buffers(
    module: torch.nn.Module,
    own: Sequence[dict[int, torch.Tensor]] | None,
    written: Sequence[Mapping[int, torch.Tensor]],
) -> None:
    """Keep the buffers that `forward` has written in a call of an inference model, for the next call.

    A single replica writes the module's buffers. Each of several replicas keeps its own values, as in PopTorch, and the
    module keeps those that it had.

    Args:
        module: Module that has the buffers.
        own: For each local replica, the buffers that differ from those of the module, by the number of the slot; None
            for a single replica. They change.
        written: For each local replica, the buffers that it wrote.
    """
    if not any(written):
        return
    if own is None:
        slots = slots_of(module)
        with torch.no_grad():
            for number, tensor in written[0].items():
                slots[number].put(tensor)
        return
    if not any(own):
        logger.info("an inference writes buffers of its module: each replica keeps its own copy")
    for of_replica, new in zip(own, written, strict=True):
        of_replica.update(new)


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
