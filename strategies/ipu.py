"""The strategy of one process that drives all replicas."""

from __future__ import annotations

from typing import final

from collectives import Communicator, connect
from popdist.instance import Instance
from strategies.numbers import positive
from strategies.replicas.membership import Membership, refuse_to_carry_on
from strategies.strategy import Strategy


@final
class Single(Membership):
    """One process, with all replicas; nobody else takes part.

    Args:
        num_replicas: R.
        ipus_per_replica: devices that each of them spans.
    """

    def __init__(self, num_replicas: int, ipus_per_replica: int = 1) -> None:
        self._num_replicas = num_replicas
        super().__init__(ipus_per_replica)

    def join(self) -> tuple[Instance, Communicator]:
        """See `Membership`."""
        alone = Instance(
            index=0,
            count=1,
            local_replicas=self._num_replicas,
            replica_offset=0,
            total_replicas=self._num_replicas,
            local_index=0,
        )
        return alone, connect("single")

    @property
    def is_chief(self) -> bool:
        """It is."""
        return True

    @property
    def can_carry_on(self) -> bool:
        """There are no others who could."""
        return False

    def join_survivors(self) -> tuple[Instance, Communicator]:
        """See `Membership`."""
        refuse_to_carry_on("replicas of a single process")


@final
class IPUStrategy(Strategy):
    """All replicas in this process, in threads; the reference for all other strategies.

    Unlike the original's, its `num_replicas_in_sync` is the number of replicas, and gradients are averaged, so that
    a program behaves as under `PopDistStrategy`.

    Args:
        num_replicas: R.
        ipus_per_replica: devices that each of them spans, for pipelines.

    Raises:
        ValueError: if one of the numbers is not positive.
    """

    def __init__(self, num_replicas: int = 1, ipus_per_replica: int = 1) -> None:
        positive("num_replicas", num_replicas)
        positive("ipus_per_replica", ipus_per_replica)
        super().__init__(Single(num_replicas, ipus_per_replica))
