"""The strategy of one process that drives all replicas."""

from __future__ import annotations

from collectives import connect
from popdist.instance import Instance
from strategies.numbers import positive
from strategies.strategy import Strategy


class IPUStrategy(Strategy):
    """All replicas in this process, in threads; the reference for all other strategies.

    Unlike the original's, its `num_replicas_in_sync` is the number of replicas, and gradients are averaged, so that
    a program behaves as under `PopDistStrategy`.

    Args:
        num_replicas: R.

    Raises:
        ValueError: if `num_replicas` is not positive.
    """

    def __init__(self, num_replicas: int = 1) -> None:
        positive("num_replicas", num_replicas)
        alone = Instance(
            index=0,
            count=1,
            local_replicas=num_replicas,
            replica_offset=0,
            total_replicas=num_replicas,
            local_index=0,
        )
        super().__init__(alone, connect("single"))
