"""The strategy for one process that drives all replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, final

from typing_extensions import override

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
    """The membership of one process that drives all replicas.

    Args:
        num_replicas: The number of replicas, R. None: as many as fit on the IPUs of `defaults`; without IPUs, one.
        ipus_per_replica: The number of devices per replica. None: the launcher's number if IPUs are configured.
        attached: Instruments that observe the process.
        defaults: Default options; None for those of `IPUConfig`, read each time they are used.
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

    @override
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
class LocalStrategy(Strategy):
    """All replicas in threads of this process; the reference for all other strategies.

    Example::

        strategy = strategies.LocalStrategy(num_replicas=8)
        trainer = strategies.Trainer(strategy, loss_fn, optax.adam(1e-3))

    Unlike the original's, its `num_replicas_in_sync` is the number of replicas, and it averages gradients. So a
    program behaves as under `PopDistStrategy`.

    Args:
        num_replicas: The number of replicas, R. None: as many as fit on the configured IPUs (`strategies.config`);
            without a configuration, one.
        ipus_per_replica: The number of devices per replica, for pipelines. None: one; under poprun with a
            configuration in force, poprun's number.
        attached: Instruments that observe the process (`collectives.instruments`).
        defaults: Default options of everything made for this strategy; see `Strategy.defaults`.

    Raises:
        ValueError: If a number is not positive, or the configured IPUs are too few.
        EnvironmentMismatchError: If poprun started this process with other numbers than the configuration has.
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

    @override
    def for_stages(self, stages: int) -> LocalStrategy:
        is_enough = positive("stages", stages) <= self.replicas.grid.ipus_per_replica
        if is_enough or self._divisible is None:
            return self
        return LocalStrategy(self._divisible.replicas(stages), stages, defaults=self._given_defaults)


IPUStrategy = LocalStrategy
"""The name that the original has for a strategy of one process."""
