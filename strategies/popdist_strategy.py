"""The strategy of the instances that poprun or mpirun started."""

from __future__ import annotations

import popdist
from collectives import Communicator
from popdist.instance import Instance
from strategies.strategy import Strategy


class PopDistStrategy(Strategy):
    """The replicas of all instances of the job, connected by MPI; calls `popdist.init`.

    Works without a launcher too, as one instance.

    Args:
        add_ipu_cross_replica_reductions: if False, reductions inside functions that `run` compiles leave the values as
            they are (the original's option of the same name).
    """

    def __init__(self, add_ipu_cross_replica_reductions: bool = True) -> None:
        popdist.init()
        super().__init__(
            popdist.instance(), popdist.communicator(), popdist.progress(), add_ipu_cross_replica_reductions
        )

    @property
    def is_chief(self) -> bool:
        """See `Strategy.is_chief`."""
        return super().is_chief and popdist.is_chief()

    @property
    def can_carry_on(self) -> bool:
        """Whether the other instances can go on when one is lost: under poprun --on-failure shrink."""
        return popdist.can_carry_on()

    def _join_survivors(self) -> tuple[Instance, Communicator]:
        return popdist.carry_on(), popdist.communicator()
