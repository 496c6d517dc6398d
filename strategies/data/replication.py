"""The replicas that run a program, and whether one is being traced."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from strategies.typing import Tree

TRACED: ContextVar[Tree] = ContextVar("program", default=None)
"""The program that is being traced; None outside of one."""


@dataclass(frozen=True)
class Replication:
    """The replicas that run a program.

    Attributes:
        local: Global indices of the replicas of this instance.
        total: Number of replicas of all instances.
    """

    local: range
    total: int

    def __str__(self) -> str:
        if len(self.local) == self.total:
            return f"{self.total} replicas"
        return f"replicas {self.local.start} to {self.local.stop - 1} of {self.total}"


def is_in_program() -> bool:
    """Return whether `strategy.run`, a loss function or a loop is being traced."""
    return TRACED.get() is not None
