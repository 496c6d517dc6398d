"""The membership of an instance in a job."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import ClassVar, final

from collectives import Communicator
from popdist.errors import LifeCycleError
from popdist.instance import Instance
from strategies.argument_checks import positive
from strategies.core.journal import JournalMember, NoJournal
from strategies.defaults import Defaults, in_force
from strategies.exchange.choice import MPI


class Membership(ABC):
    """The membership of this instance in a job: its identity, and its connection with the other instances.

    There is one subclass for each way to connect instances, beside the strategy that chooses it. Making an object joins
    the job, in a collective call of all instances. After a loss `Replicas` calls `carry_on`, on all survivors.

    Args:
        ipus_per_replica: Number of devices that a replica spans; None: the launcher's number.
        defaults: Defaults of the strategy; None: the defaults of `IPUConfig`, read when something is made for it.

    Attributes:
        instance: Identity of this process and its replicas, by the present numbers of the instances.
        communicator: Communicator of the instances that are left.
        adds_in_order: Whether sums over replicas have the same bits however the replicas are spread.
        members: Name of the instances in messages, plural.
        transport: Transport between them: `MPI`, `GRPC` or `HOROVOD` of `strategies.exchange.choice`.

    Raises:
        TypeError, ValueError: `ipus_per_replica` is not a positive integer, or not poprun's number.
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
        """Connect with the other instances. Called once, before any other method."""

    @final
    @property
    def defaults(self) -> Defaults:
        """The defaults for objects made for the strategy, see `Strategy.defaults`."""
        return in_force() if self._given_defaults is None else self._given_defaults

    @property
    def is_chief(self) -> bool:
        """Whether this instance prints and writes for all; after a loss another instance may become the chief."""
        return self.instance.is_leader

    @property
    def can_carry_on(self) -> bool:
        """Whether the job goes on if an instance is lost."""
        return False

    @property
    def journal_member(self) -> JournalMember:
        """The part of this instance in the journal for instances that join later; by default there is no journal."""
        return NoJournal()

    def join_survivors(self) -> tuple[Instance, Communicator]:
        """Connect with the instances that are left. Collective among them. If it raises, this object is unchanged.

        Returns:
            The new identity of this instance, and the communicator of the instances that are left.

        Raises:
            LifeCycleError: The job cannot go on.
        """
        raise LifeCycleError(
            f"{self.members} cannot go on without a lost instance; use PopDistStrategy under poprun --on-failure "
            "shrink, which can"
        )

    @final
    def carry_on(self) -> None:
        """Go on with the instances that are left, see `join_survivors`. If it raises, this object is unchanged."""
        instance, self.communicator = self.join_survivors()
        self.instance = self._spanning(instance)

    def _spanning(self, instance: Instance) -> Instance:
        """Return an instance with the number of devices per replica that the program wants."""
        wanted = self._ipus_per_replica
        if wanted is None:
            return instance
        if instance.ipus_per_replica not in (1, wanted):
            raise ValueError(
                f"ipus_per_replica is {wanted}, but {instance.launcher} says {instance.ipus_per_replica}; leave it "
                f"out, or start the job with --ipus-per-replica {wanted}"
            )
        return replace(instance, ipus_per_replica=wanted)
