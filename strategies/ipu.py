"""The strategy of one process that drives all replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, final

from collectives import Communicator, Settings, connect
from collectives.instruments import Instrument, Instruments
from popdist.instance import Instance
from strategies.argument_checks import positive
from strategies.defaults import Defaults
from strategies.jax.replicas.membership import Membership
from strategies.launched import replicas_of_process
from strategies.strategy import Strategy


@final
class SingleProcess(Membership):
    """One process, with all replicas; nobody else takes part.

    Args:
        num_replicas: R. None: as many as the IPUs of `defaults` are enough for, otherwise one.
        ipus_per_replica: devices that each of them spans. None: as a launcher says, if IPUs are configured.
        attached: instruments that see what the process does.
        defaults: see `Membership`.
    """

    members: ClassVar[str] = "replicas of a single process"

    def __init__(
        self,
        num_replicas: int | None,
        ipus_per_replica: int | None,
        attached: Sequence[Instrument],
        defaults: Defaults | None,
    ) -> None:
        self._num_replicas, self._attached = num_replicas, attached
        super().__init__(ipus_per_replica, defaults)

    def join(self) -> tuple[Instance, Communicator]:
        number, spanned = self._num_replicas, self._ipus_per_replica
        if number is None:
            number, spanned = replicas_of_process(self.defaults, spanned)
        alone = Instance(
            index=0,
            count=1,
            local_replicas=positive("num_replicas", number),
            replica_offset=0,
            total_replicas=number,
            local_index=0,
            ipus_per_replica=spanned or 1,
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
        defaults: see `Strategy.defaults`.

    Raises:
        ValueError: if one of the numbers is not positive, or the configured IPUs are not enough.
        EnvironmentMismatchError: poprun has started this process with other numbers than are configured.
    """

    def __init__(
        self,
        num_replicas: int | None = None,
        ipus_per_replica: int | None = None,
        attached: Sequence[Instrument] = (),
        defaults: Defaults | None = None,
    ) -> None:
        process = SingleProcess(num_replicas, ipus_per_replica, attached, defaults)
        super().__init__(process)
        is_open = num_replicas is None and ipus_per_replica is None and process.instance.ipus_per_replica == 1
        self._divisible = process.defaults.selection if is_open else None
        self._given_defaults = defaults

    def for_stages(self, stages: int) -> IPUStrategy:
        """See `Strategy`; over the same IPUs, if the configuration has counted them and nobody said what one spans."""
        is_enough = positive("stages", stages) <= self.replicas.grid.ipus_per_replica
        if is_enough or self._divisible is None:
            return self
        return IPUStrategy(self._divisible.replicas(stages), stages, defaults=self._given_defaults)
