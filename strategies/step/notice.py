"""Word that reaches all instances at the same step, whichever of them had it first."""

from __future__ import annotations


class Notice:
    """A flag that is given to any instance and taken note of by all at the end of the same step.

    `Trainer` sends it along with the metrics, so it costs no message of its own. What is given while a step is
    computed travels with the next one.

    Attributes:
        number: what was given to this instance, such as the number of a signal; 0 before.
        is_agreed: whether an instance had been given one when it began the last step; the same on all instances.
    """

    def __init__(self) -> None:
        self.number = 0
        self.is_agreed = False

    @property
    def is_given(self) -> bool:
        """Whether this instance was given one."""
        return self.number != 0

    def give(self, number: int) -> None:
        """Give it to this instance; may be called by a signal handler."""
        self.number = number

    def agree(self, replicas: float) -> None:
        """Take note of what came with the last step: the share of the replicas to whose instance it was given."""
        self.is_agreed = replicas > 0
