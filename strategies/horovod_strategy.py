"""The strategy of instances that Horovod connects."""

from __future__ import annotations

from typing import ClassVar, final

import popdist
from collectives import Communicator
from popdist import horovod
from popdist.instance import Instance
from strategies.config.configured import in_force
from strategies.config.launched import join_as_configured
from strategies.replicas.membership import Membership, refuse_to_carry_on
from strategies.strategy import Strategy


@final
class Horovod(Membership):
    """The instances of the job, connected by Horovod; who is lost ends the job of all."""

    adds_in_order: ClassVar[bool] = False

    def join(self) -> tuple[Instance, Communicator]:
        """See `Membership`; calls `popdist.init` and `horovod.init`."""
        return join_as_configured(in_force(), self._ipus_per_replica), horovod.communicator()

    @property
    def is_chief(self) -> bool:
        """Instance 0 is."""
        return self.instance.is_leader

    @property
    def can_carry_on(self) -> bool:
        """The others cannot."""
        return False

    def join_survivors(self) -> tuple[Instance, Communicator]:
        """See `Membership`."""
        refuse_to_carry_on("instances that Horovod connects")


@final
class IPUHorovodStrategy(Strategy):
    """The replicas of all instances of the job, connected by Horovod; calls `popdist.init` and `horovod.init`.

    Works under poprun, under mpirun and, as one instance, without a launcher. The gradients of an instance's replicas
    are added in their order, and the sums of the instances by Horovod, in the order that MPI chooses: the variables
    are the same to the last bit on all instances, and close to those of `PopDistStrategy` (docs/horovod.md). With
    `variables_on_host`, `Trainer` streams gradients: what the backward pass has finished travels while the rest of it
    still runs.

    Semantics: the original's `IPUHorovodStrategyV1`, with several replicas per instance.

    Args:
        variables_on_host: keep variables and optimizer state once per instance in host memory.
        ipus_per_replica: devices that each replica spans, for pipelines; None: what `poprun --ipus-per-replica` says.

    Raises:
        TypeError, ValueError: if `ipus_per_replica` is no positive whole number, or not what poprun says.
        MissingBackendError: Horovod is not installed; the message names the script that builds it.
        LifeCycleError: Horovod and the launcher disagree about who is there.
    """

    def __init__(self, variables_on_host: bool = False, ipus_per_replica: int | None = None) -> None:
        membership = Horovod(ipus_per_replica)
        super().__init__(membership, popdist.progress(), variables_on_host=variables_on_host)
