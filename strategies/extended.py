"""The attributes of `strategy.extended`, for programs written for the original."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from strategies.typing import Tree


@dataclass(frozen=True)
class StrategyExtended:
    """The role of this instance, and the original's names for `Strategy.reduce`.

    Attributes:
        experimental_between_graph: True: every instance runs the program.
        experimental_should_init: True: every instance creates its variables.
        should_checkpoint: Whether this instance writes checkpoints.
        should_save_summary: Whether this instance writes summaries.
    """

    should_checkpoint: bool
    should_save_summary: bool
    _reduce: Callable[[str, Tree], Tree] = field(repr=False, compare=False)
    experimental_between_graph: bool = True
    experimental_should_init: bool = True

    def reduce_to(self, reduce_op: str, value: Tree, destinations: object = None, options: object = None) -> Tree:
        """Return `strategy.reduce(reduce_op, value)`; all instances get the result, whatever the destinations.

        Args:
            reduce_op: "sum", "mean", "min" or "max".
            value: A value per replica, as `Strategy.reduce` takes it.
            destinations: Ignored, as in the original.
            options: Ignored, as in the original.
        """
        return self._reduce(reduce_op, value)

    def batch_reduce_to(
        self, reduce_op: str, value_destination_pairs: Iterable[tuple[Tree, object]], options: object = None
    ) -> list[Tree]:
        """Return `reduce_to` of the value of each pair, in order.

        Args:
            reduce_op: "sum", "mean", "min" or "max".
            value_destination_pairs: Pairs of a value and its destinations.
            options: Ignored, as in the original.
        """
        return [self.reduce_to(reduce_op, value, destinations) for value, destinations in value_destination_pairs]
