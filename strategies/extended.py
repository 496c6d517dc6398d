"""What programs written for the original ask of `strategy.extended`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Extended:
    """The role of this instance.

    Attributes:
        experimental_between_graph: every instance runs the program.
        experimental_should_init: every instance makes its variables.
        should_checkpoint: whether this is the instance that writes checkpoints.
        should_save_summary: whether this is the instance that writes summaries.
    """

    should_checkpoint: bool
    should_save_summary: bool
    experimental_between_graph: bool = True
    experimental_should_init: bool = True
