"""Tensors of a training that a program looks at without returning them from its model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from strategies.errors import StrategyError
from strategies.torch.poptorch.enums import OutputMode

GRADIENT, UPDATED = "Gradient___", "UpdatedVar___"
"""Before the name of a parameter: its mean gradient over micro-batches and replicas, and its value after an update."""


@dataclass(frozen=True)
class Anchor:
    """One that is looked at.

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
        for short, tensor in self._tensors():
            self.seen[short].append(tensor.detach().clone())

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for short, anchor in self.anchors.items():
            name = anchor.name.removeprefix(UPDATED).removeprefix(GRADIENT)
            parameter = self.module.get_parameter(name)
            is_gradient = anchor.name.startswith(GRADIENT)
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            yield short, gradient if is_gradient else parameter

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
