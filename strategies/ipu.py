"""The strategy of one process that drives all replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, final

from collectives import Communicator, Settings, connect
from collectives.instruments import Instrument, Instruments
from popdist.instance import Instance
from strategies.argument_checks import positive
from strategies.config.configured import Selection, in_force
from strategies.config.launched import replicas_of_process
from strategies.replicas.membership import Membership
from strategies.strategy import Strategy


@final
class SingleProcess(Membership):
    """One process, with all replicas; nobody else takes part.

    Args:
        num_replicas: R.
        ipus_per_replica: devices that each of them spans.
        attached: instruments that see what the process does.
    """

    members: ClassVar[str] = "replicas of a single process"

    def __init__(self, num_replicas: int, ipus_per_replica: int = 1, attached: Sequence[Instrument] = ()) -> None:
        self._num_replicas, self._attached = num_replicas, attached
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
        return alone, connect("single", Settings(progress=Instruments(*self._attached)))


@final
class IPUStrategy(Strategy):
    """All replicas in this process, in threads; the reference for all other strategies.

    Unlike the original's, its `num_replicas_in_sync` is the number of replicas, and gradients are averaged, so that
    a program behaves as under `PopDistStrategy`.

    Args:
        num_replicas: R. None: as many as the IPUs of the configuration in force (`strategies.config`) are enough for;
            one where there is none.
        ipus_per_replica: devices that each of them spans, for pipelines. None: one; under poprun, with a configuration
            in force, as many as it says.
        attached: instruments that see what the process does (`collectives.instruments`).

    Raises:
        ValueError: if one of the numbers is not positive, or the configured IPUs are not enough.
        EnvironmentMismatchError: poprun has started this process with other numbers than are configured.
    """

    def __init__(
        self,
        num_replicas: int | None = None,
        ipus_per_replica: int | None = None,
        attached: Sequence[Instrument] = (),
    ) -> None:
        if ipus_per_replica is not None:
            positive("ipus_per_replica", ipus_per_replica)
        self._divisible: Selection | None = None
        if num_replicas is None:
            named = ipus_per_replica
            num_replicas, ipus_per_replica = replicas_of_process(in_force(), named)
            self._divisible = in_force().selection if named is None and ipus_per_replica == 1 else None
        positive("num_replicas", num_replicas)
        super().__init__(SingleProcess(num_replicas, ipus_per_replica or 1, attached))

    def for_stages(self, stages: int) -> IPUStrategy:
        """See `Strategy`; over the same IPUs, if the configuration has counted them and nobody said what one spans."""
        is_enough = positive("stages", stages) <= self.replicas.grid.ipus_per_replica
        return self if is_enough or self._divisible is None else IPUStrategy(self._divisible.replicas(stages), stages)
