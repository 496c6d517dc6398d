"""The attributes of `strategy.extended` that programs written for the original use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from strategies.typing import Tree


@dataclass(frozen=True)
class StrategyExtended:
    """The role of this instance, and other names of `Strategy.reduce`.

    Attributes:
        experimental_between_graph: every instance runs the program.
        experimental_should_init: every instance makes its variables.
        should_checkpoint: whether this is the instance that writes checkpoints.
        should_save_summary: whether this is the instance that writes summaries.
    """

    should_checkpoint: bool
    should_save_summary: bool
    _reduce: Callable[[str, Tree], Tree] = field(repr=False, compare=False)
    experimental_between_graph: bool = True
    experimental_should_init: bool = True

    def reduce_to(self, reduce_op: str, value: Tree, destinations: object = None, options: object = None) -> Tree:
        """`strategy.reduce(reduce_op, value)`: all instances get the result, whatever the destinations.

        Args:
            reduce_op: see `Strategy.reduce`.
            value: likewise.
            destinations: changes nothing, as in the original.
            options: likewise.
        """
        return self._reduce(reduce_op, value)

    def batch_reduce_to(
        self, reduce_op: str, value_destination_pairs: Iterable[tuple[Tree, object]], options: object = None
    ) -> list[Tree]:
        """`reduce_to` of the value of each pair, one after another.

        Args:
            reduce_op: see `Strategy.reduce`.
            value_destination_pairs: values, each with its destinations.
            options: changes nothing, as in the original.
        """
        return [self.reduce_to(reduce_op, value, destinations) for value, destinations in value_destination_pairs]
