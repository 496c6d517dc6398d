"""The membership of an instance in a job."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import ClassVar, final

from collectives import Communicator
from popdist.errors import LifeCycleError
from popdist.instance import Instance
from strategies.argument_checks import positive
from strategies.defaults import Defaults, in_force
from strategies.exchange.choice import MPI


class Membership(ABC):
    """The membership of this instance in a job: its identity, and its connection with the others.

    There is one for each way to connect instances, beside the strategy that chooses it. To make one joins the job: a
    collective call of all instances.

    Args:
        ipus_per_replica: the devices that a replica spans; None: as the launcher says.
        defaults: of the strategy; None: those of `IPUConfig`, as they are whenever something is made for the strategy.

    Attributes:
        instance: which replicas this process drives, as the instances are numbered now.
        communicator: connects those that are left.
        adds_in_order: whether sums over replicas have the same bits however these are spread.
        members: the instances in words, plural, for messages.
        transport: that connects them, one of `MPI`, `GRPC` and `HOROVOD` of `strategies.exchange.choice`.

    Raises:
        TypeError, ValueError: if `ipus_per_replica` is no positive whole number, or not what poprun says.
    """

    adds_in_order: ClassVar[bool] = True
    members: ClassVar[str] = "these instances"
    transport: ClassVar[str] = MPI

    def __init__(self, ipus_per_replica: int | None = None, defaults: Defaults | None = None) -> None:
        self._given_defaults = defaults
        self._ipus_per_replica = None if ipus_per_replica is None else positive("ipus_per_replica", ipus_per_replica)
        instance, self.communicator = self.join()
        self.instance = self._spanning(instance)

    @abstractmethod
    def join(self) -> tuple[Instance, Communicator]:
        """Connect with the other instances; called once, before all else."""

    @final
    @property
    def defaults(self) -> Defaults:
        """See `Strategy.defaults`."""
        return in_force() if self._given_defaults is None else self._given_defaults

    @property
    def is_chief(self) -> bool:
        """Whether this instance prints and writes for all of them; where some are lost it may be another one later."""
        return self.instance.is_leader

    @property
    def can_carry_on(self) -> bool:
        """Whether the job goes on where an instance is lost."""
        return False

    def join_survivors(self) -> tuple[Instance, Communicator]:
        """Connect with the instances that are left; a collective call of theirs.

        Returns:
            What this instance is now, and what connects those that are left.

        Raises:
            LifeCycleError: the job cannot go on.
        """
        raise LifeCycleError(
            f"{self.members} cannot go on without one that is lost; use PopDistStrategy under poprun --on-failure "
            "shrink, which can"
        )

    @final
    def carry_on(self) -> None:
        """Go on with those that are left, see `join_survivors`; where it raises, all is as before."""
        instance, self.communicator = self.join_survivors()
        self.instance = self._spanning(instance)

    def _spanning(self, instance: Instance) -> Instance:
        """Return an instance whose replicas span the devices that the program asks for."""
        wanted = self._ipus_per_replica
        if wanted is None:
            return instance
        if instance.ipus_per_replica not in (1, wanted):
            raise ValueError(
                f"ipus_per_replica is {wanted}, and {instance.launcher} says {instance.ipus_per_replica}; leave it "
                f"out, or start the job with --ipus-per-replica {wanted}"
            )
        return replace(instance, ipus_per_replica=wanted)
