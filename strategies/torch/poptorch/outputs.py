"""Which outputs of a call come back, and how those of micro-batches and replicas are put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch

from strategies.roles import Tree
from strategies.torch.poptorch.enums import OutputMode

Rounds = Sequence[Sequence[Tree]]
"""For each micro-batch of a call, one after another, the outputs of the local replicas in their order."""


def put_together(rounds: Rounds, mode: OutputMode, every: int) -> Tree:
    """What a call returns.

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
        return _joined([_sum(of_replica) for of_replica in zip(*rounds, strict=True)])
    if mode is OutputMode.Final:
        return _joined(rounds[-1])
    if mode is OutputMode.EveryN:
        if len(rounds) % every:
            raise ValueError(
                f"every {every}th of {len(rounds)} micro-batches is to be returned; use a period that divides "
                "deviceIterations x gradientAccumulation"
            )
        rounds = rounds[every - 1 :: every]
    return _joined([each for of_replicas in rounds for each in of_replicas])


def _joined(trees: Sequence[Tree]) -> Tree:
    return jax.tree.map(lambda *leaves: _join(leaves), *trees) if len(trees) > 1 else trees[0]


def _join(leaves: Sequence[Any]) -> Any:
    if not isinstance(leaves[0], torch.Tensor):
        return leaves[-1]
    return torch.cat(tuple(leaves)) if leaves[0].ndim else torch.stack(tuple(leaves))


def _sum(trees: Sequence[Tree]) -> Tree:
    def add(*leaves: Any) -> Any:
        total = leaves[0]
        for leaf in leaves[1:]:
            total = total + leaf
        return total

    return jax.tree.map(add, *trees)
