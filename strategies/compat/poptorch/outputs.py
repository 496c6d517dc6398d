"""The outputs of a module on a replica, and tensors of a training that a program looks at besides.

The loss is among the outputs, and what a call returns is put together of all micro-batches. Anchored tensors are
looked at without being returned from the model.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import reduce
from typing import TypeAlias

import jax
import numpy as np
import torch

from strategies.compat.poptorch.autocasting import heeded_by
from strategies.compat.poptorch.enums import OutputMode
from strategies.compat.poptorch.operations import losses_marked_by
from strategies.errors import StrategyError
from strategies.typing import Batch, Tree

LossAndOutputs: TypeAlias = tuple[torch.Tensor, dict[str, torch.Tensor], Tree]
"""A loss, further metrics, and the outputs of the module."""

Rounds = Sequence[Sequence[Tree]]
"""For each micro-batch of a call, one after another, the outputs of the local replicas in their order."""

GRADIENT, UPDATED = "Gradient___", "UpdatedVar___"
"""Before the name of a parameter: its mean gradient over micro-batches and replicas, and its value after an update."""


def outputs_and_losses(module: torch.nn.Module, batch: Batch) -> tuple[Tree, list[torch.Tensor]]:
    """Call the module, and return its outputs and the losses that it has marked.

    Raises:
        TypeError: if tensors are in something that is not looked into: those of other replicas would be lost.
    """
    args, kwargs = batch
    outputs, marked = losses_marked_by(lambda: module(*args, **kwargs))
    for leaf in jax.tree.leaves(outputs):
        if is_dataclass(leaf) or isinstance(leaf, Mapping | np.ndarray):
            raise TypeError(
                f"the model returns a {type(leaf).__name__}, of which replicas' rows are not put together; return "
                "tensors, in tuples, lists or dictionaries"
            )
    return outputs, marked


def loss_function(factor: int, autocasts: bool) -> Callable[[torch.nn.Module, Batch], LossAndOutputs]:
    """Return a loss function of `Trainer`: the module's loss with its gradient times `factor`, and all outputs.

    Args:
        factor: R, where gradients are to be summed over replicas, of which `Trainer` takes the mean.
        autocasts: whether `poptorch.autocast` is heeded inside of the module.
    """

    def loss_fn(module: torch.nn.Module, batch: Batch) -> LossAndOutputs:
        outputs, marked = outputs_and_losses(module, batch)
        loss = loss_of(outputs, marked)
        if factor != 1:
            loss = loss.detach() + factor * (loss - loss.detach())  # the value that metrics tell stays
        return loss, {}, outputs

    return heeded_by(loss_fn, autocasts)


def loss_of(outputs: Tree, marked: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the loss among the outputs of a training model.

    Raises:
        StrategyError: if there is none, or it is not known which of several is meant.
    """
    if marked:
        return last_of(marked)
    tensors = [leaf for leaf in jax.tree.leaves(outputs) if isinstance(leaf, torch.Tensor)]
    scalars = [one for one in tensors if not one.ndim and one.is_floating_point() and one.requires_grad]
    if not scalars:
        raise StrategyError(
            "the model returns no scalar that depends on its parameters; return the loss, or mark it with "
            "poptorch.identity_loss"
        )
    if len({id(one) for one in scalars}) > 1:
        raise StrategyError(
            f"the model returns {len(scalars)} scalars that depend on its parameters, and each could be the loss; mark "
            "the loss with poptorch.identity_loss(loss, 'none'), and detach() the others"
        )
    return scalars[0]


def last_of(marked: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the marked loss of which all other ones are parts.

    Raises:
        StrategyError: if one of them is no part of the last.
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
            f"{len(marked)} losses are marked; add them up, and mark the sum with poptorch.identity_loss"
        )
    return last


def put_together(rounds: Rounds, mode: OutputMode, every: int) -> Tree:
    """Return the outputs of a call.

    Tensors are joined along their first axis: one micro-batch after another, in each the replicas in their order, as
    the rows of the batch were dealt out. Scalars become one axis, if there are several.

    Args:
        rounds: all outputs.
        mode: which of them.
        every: n of `OutputMode.EveryN`.

    Raises:
        ValueError: if n does not divide the number of micro-batches.
    """
    if mode is OutputMode.Sum:
        return joined([_sum(of_replica) for of_replica in zip(*rounds, strict=True)])
    if mode is OutputMode.Final:
        return joined(rounds[-1])
    if mode is OutputMode.EveryN:
        if len(rounds) % every:
            raise ValueError(
                f"every {every}th of {len(rounds)} micro-batches is to be returned; use a period that divides "
                "deviceIterations x gradientAccumulation"
            )
        rounds = rounds[every - 1 :: every]
    return joined([each for of_replicas in rounds for each in of_replicas])


def joined(trees: Sequence[Tree]) -> Tree:
    """Join the tensors of several trees along their first axis, and scalars along a new one."""
    return jax.tree.map(lambda *leaves: _join(leaves), *trees) if len(trees) > 1 else trees[0]


def _join(leaves: Sequence[Tree]) -> Tree:
    if not isinstance(leaves[0], torch.Tensor):
        return leaves[-1]
    return torch.cat(tuple(leaves)) if leaves[0].ndim else torch.stack(tuple(leaves))


def _sum(trees: Sequence[Tree]) -> Tree:
    return jax.tree.map(lambda *leaves: reduce(operator.add, leaves), *trees)


@dataclass(frozen=True)
class Anchor:
    """A tensor that the program has anchored: a parameter, its gradient, or its value after an update.

    Attributes:
        name: of a parameter, or one of these with `GRADIENT` or `UPDATED` before it.
        mode: of which updates of a call it is returned; None: of those whose outputs are.
        every: n of `OutputMode.EveryN`.
    """

    name: str
    mode: OutputMode | None
    every: int = 1

    def following(self, mode: OutputMode, every: int, count: int) -> Anchor:
        """Return the anchor with a mode: its own, or that of outputs.

        Args:
            mode: of outputs.
            every: of how many micro-batches one is returned, with `OutputMode.EveryN`.
            count: micro-batches of an update; of a period that is shorter every update is returned.
        """
        if self.mode is not None:
            return self
        return Anchor(self.name, mode, max(1, every // count))

    def of_call(self, seen: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the values after the updates that the mode chooses; several of them along a first axis."""
        if self.mode in (None, OutputMode.Default, OutputMode.Final):
            return seen[-1]
        if self.mode is OutputMode.Sum:
            return torch.stack(tuple(seen)).sum(0)
        return torch.stack(tuple(seen[self.every - 1 :: self.every]))


def names_of(module: torch.nn.Module) -> list[str]:
    """Return the names of tensors that can be anchored."""
    names = [name for name, _ in module.named_parameters()]
    return [*names, *(f"{kind}{name}" for kind in (GRADIENT, UPDATED) for name in names)]


def refuse_unknown(anchors: Mapping[str, Anchor], module: torch.nn.Module, is_sharded: bool, iterations: int) -> None:
    """Look for the tensors in a module.

    Args:
        anchors: by their short names.
        module: of which they are.
        is_sharded: whether this instance has parts only of mean gradients.
        iterations: updates of a call.

    Raises:
        StrategyError: if there is none of a name, or not the whole of it.
        ValueError: if every n-th update is wanted of a number that n does not divide.
    """
    known = names_of(module)
    for anchor in anchors.values():
        if anchor.name not in known:
            raise StrategyError(
                f"there is no tensor {anchor.name!r} to anchor; there are parameters, and {GRADIENT} and {UPDATED} of "
                f"them: {', '.join(known)}"
            )
        if anchor.mode is OutputMode.EveryN and iterations % anchor.every:
            raise ValueError(
                f"{anchor.name} is anchored in every {anchor.every}th of {iterations} updates; use a period that "
                "divides deviceIterations"
            )
        if is_sharded and anchor.name.startswith(GRADIENT):
            raise StrategyError(
                f"{anchor.name} is anchored, and with a sharded optimizer an instance has a part of it only; anchor "
                f"{UPDATED}{anchor.name.removeprefix(GRADIENT)}, or do not shard"
            )


@dataclass
class Anchored:
    """The tensors of the last call of a model.

    Attributes:
        anchors: by their short names.
        module: of which they are.
        seen: by the short names, after each update.
    """

    anchors: Mapping[str, Anchor]
    module: torch.nn.Module
    seen: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def begin(self) -> None:
        """Forget the values of the call before."""
        self.seen = {short: [] for short in self.anchors}

    def look(self) -> None:
        """Keep the values after an update."""
        for short, anchor in self.anchors.items():
            tensor: torch.Tensor = self.module.get_parameter(anchor.name.removeprefix(UPDATED).removeprefix(GRADIENT))
            if anchor.name.startswith(GRADIENT):
                tensor = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            self.seen[short].append(tensor.detach().clone())

    def of_call(self, short: str) -> torch.Tensor:
        """Return the values of one of the anchored tensors.

        Raises:
            StrategyError: if there is none, or there was no call.
        """
        if not self.seen.get(short):
            raise StrategyError(
                f"nothing was seen of {short!r}; anchor it with Options.anchorTensor, and call the training model "
                f"first. Anchored are: {', '.join(self.anchors) or 'none'}"
            )
        return self.anchors[short].of_call(self.seen[short])
