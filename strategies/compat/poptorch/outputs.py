"""The outputs of a module on a replica, its loss, and tensors that a program anchors.

The loss is among the outputs. A call returns the joined outputs of all micro-batches. Anchored tensors are recorded
during training without being outputs of the model.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import reduce
from typing import TypeAlias

import numpy as np
import torch

import strategies.trees as trees
from strategies.compat.poptorch.autocasting import heeded_by
from strategies.compat.poptorch.enums import OutputMode
from strategies.compat.poptorch.operations import losses_marked_by
from strategies.errors import StrategyError
from strategies.typing import Batch, Tree

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
            "the model returns no scalar that depends on its parameters; return the loss, or mark it with "
            "poptorch.identity_loss"
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
    seen: set[object] = set()
    ahead = [last.grad_fn] if wanted else []
    while ahead and not wanted <= seen:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            ahead += [each for each, _ in node.next_functions]
    if not wanted <= seen:
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


@dataclass(frozen=True)
class Anchor:
    """A tensor that the program has anchored: a parameter, its gradient, or its value after an update.

    Attributes:
        name: Name of a parameter, alone or after `GRADIENT` or `UPDATED`.
        mode: Updates of a call whose values are returned; None for the updates whose outputs are returned.
        every: n of `OutputMode.EveryN`, in updates.
    """

    name: str
    mode: OutputMode | None
    every: int = 1

    def following(self, mode: OutputMode, every: int, count: int) -> Anchor:
        """Return the anchor with its own mode, or else with the mode of outputs.

        Args:
            mode: Mode of outputs.
            every: n of `OutputMode.EveryN`, in micro-batches.
            count: Number of micro-batches of an update; if n is smaller, the anchor returns every update.
        """
        if self.mode is not None:
            return self
        return Anchor(self.name, mode, max(1, every // count))

    def of_call(self, seen: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the values after the updates of the mode, stacked along a first axis if there are several."""
        if self.mode in (None, OutputMode.Default, OutputMode.Final):
            return seen[-1]
        if self.mode is OutputMode.Sum:
            return torch.stack(tuple(seen)).sum(0)
        return torch.stack(tuple(seen[self.every - 1 :: self.every]))


def names_of(module: torch.nn.Module) -> list[str]:
    """Return the names of the tensors that can be anchored."""
    names = [name for name, _ in module.named_parameters()]
    return [*names, *(f"{kind}{name}" for kind in (GRADIENT, UPDATED) for name in names)]


def refuse_unknown(anchors: Mapping[str, Anchor], module: torch.nn.Module, is_sharded: bool, iterations: int) -> None:
    """Refuse anchors of tensors that the module lacks or that are sharded.

    Args:
        anchors: Anchors by their short names.
        module: Module that has the tensors.
        is_sharded: Whether this instance has only parts of mean gradients.
        iterations: Number of updates of a call.

    Raises:
        StrategyError: If a tensor does not exist, or this instance has only a part of it.
        ValueError: If n of `OutputMode.EveryN` does not divide the number of updates.
    """
    known = names_of(module)
    for anchor in anchors.values():
        if anchor.name not in known:
            raise StrategyError(
                f"there is no tensor {anchor.name!r} to anchor; anchor a parameter, or {GRADIENT} or {UPDATED} before "
                f"its name: {', '.join(known)}"
            )
        if anchor.mode is OutputMode.EveryN and iterations % anchor.every:
            raise ValueError(
                f"{anchor.name} is anchored with EveryN and n {anchor.every}, which does not divide {iterations} "
                "updates; use a period that divides deviceIterations"
            )
        if is_sharded and anchor.name.startswith(GRADIENT):
            raise StrategyError(
                f"{anchor.name} is anchored, but with a sharded optimizer an instance has only a part of it; anchor "
                f"{UPDATED}{anchor.name.removeprefix(GRADIENT)}, or do not shard"
            )


@dataclass
class Anchored:
    """The recorded values of anchored tensors in the last call of a model.

    Attributes:
        anchors: Anchors by their short names.
        module: Module that has the tensors.
        seen: Values after each update, by short name.
    """

    anchors: Mapping[str, Anchor]
    module: torch.nn.Module
    seen: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def begin(self) -> None:
        """Drop the values of the last call."""
        self.seen = {short: [] for short in self.anchors}

    def look(self) -> None:
        """Record the values after an update."""
        for short, anchor in self.anchors.items():
            tensor: torch.Tensor = self.module.get_parameter(anchor.name.removeprefix(UPDATED).removeprefix(GRADIENT))
            if anchor.name.startswith(GRADIENT):
                tensor = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            self.seen[short].append(tensor.detach().clone())

    def of_call(self, short: str) -> torch.Tensor:
        """Return the values of one of the anchored tensors.

        Raises:
            StrategyError: If it is not anchored, or the model was not called.
        """
        if not self.seen.get(short):
            raise StrategyError(
                f"no value of {short!r} was recorded; anchor it with Options.anchorTensor, and call the training model "
                f"first. Anchored are: {', '.join(self.anchors) or 'none'}"
            )
        return self.anchors[short].of_call(self.seen[short])
