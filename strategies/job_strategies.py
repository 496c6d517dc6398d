"""Strategies of instances that a launcher has started: connected by MPI, or by Horovod."""

from __future__ import annotations

from typing import ClassVar, final

import popdist
from collectives import Communicator
from popdist import horovod
from popdist.instance import Instance
from strategies.config.configured import in_force
from strategies.config.launched import join_as_configured
from strategies.replicas.membership import Membership
from strategies.strategy import Strategy


@final
class MpiJob(Membership):
    """The instances that a launcher started, connected by MPI; one alone without a launcher."""

    def join(self) -> tuple[Instance, Communicator]:
        """See `Membership`; calls `popdist.init`."""
        return join_as_configured(in_force(), self._ipus_per_replica), popdist.communicator()

    @property
    def is_chief(self) -> bool:
        """It is none of those who carry on after the chief has come to its end."""
        return self.instance.is_leader and popdist.is_chief()

    @property
    def can_carry_on(self) -> bool:
        """Under poprun --on-failure shrink."""
        return popdist.can_carry_on()

    def join_survivors(self) -> tuple[Instance, Communicator]:
        """See `Membership`."""
        return popdist.carry_on(), popdist.communicator()


@final
class PopDistStrategy(Strategy):
    """The replicas of all instances of the job, connected by MPI; calls `popdist.init`.

    Works without a launcher too, as one instance. Where no launcher has said how many replicas there are, the
    configuration in force (`strategies.config`) does; otherwise there is one for each instance.

    Args:
        add_ipu_cross_replica_reductions: if False, reductions inside functions that `run` compiles leave the values as
            they are (the original's option of the same name).
        ipus_per_replica: devices that each replica spans, for pipelines; None: what `poprun --ipus-per-replica` says.

    Raises:
        TypeError, ValueError: if `ipus_per_replica` is no positive whole number, or not what poprun says.
    """

    def __init__(self, add_ipu_cross_replica_reductions: bool = True, ipus_per_replica: int | None = None) -> None:
        membership = MpiJob(ipus_per_replica)
        super().__init__(membership, popdist.progress(), add_ipu_cross_replica_reductions)


# ---- Horovod


@final
class HorovodJob(Membership):
    """The instances of the job, connected by Horovod; who is lost ends the job of all."""

    adds_in_order: ClassVar[bool] = False
    members: ClassVar[str] = "instances that Horovod connects"

    def join(self) -> tuple[Instance, Communicator]:
        """See `Membership`; calls `popdist.init` and `horovod.init`."""
        return join_as_configured(in_force(), self._ipus_per_replica), horovod.communicator()


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
        membership = HorovodJob(ipus_per_replica)
        super().__init__(membership, popdist.progress(), variables_on_host=variables_on_host)
