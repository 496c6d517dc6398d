"""Who takes part, and going on without instances that are lost, with the same bits."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NoReturn, Protocol, TypeVar, final

import numpy as np

from collectives import BrokenError, Communicator, PeerLostError
from popdist.context import is_to_carry_on
from popdist.errors import LifeCycleError
from popdist.instance import Instance
from strategies.data.datasets import DistributedDataset

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Membership(ABC):
    """Who takes part in a job: what this instance is, and what connects it with the others.

    There is one for each way to connect instances, beside the strategy that chooses it. To make one joins the job: a
    collective call of all instances.

    Attributes:
        instance: which replicas this process drives, as the instances are numbered now.
        communicator: connects those that are left.
    """

    def __init__(self) -> None:
        self.instance, self.communicator = self.join()

    @abstractmethod
    def join(self) -> tuple[Instance, Communicator]:
        """Connect with the other instances; called once, before all else."""

    @property
    @abstractmethod
    def is_chief(self) -> bool:
        """Whether this instance prints and writes for all of them; where some are lost it may be another one later."""

    @property
    @abstractmethod
    def can_carry_on(self) -> bool:
        """Whether the job goes on where an instance is lost."""

    @abstractmethod
    def join_survivors(self) -> tuple[Instance, Communicator]:
        """Connect with the instances that are left; a collective call of theirs.

        Returns:
            What this instance is now, and what connects those that are left.

        Raises:
            LifeCycleError: the job cannot go on.
        """

    @final
    def carry_on(self) -> None:
        """Go on with those that are left, see `join_survivors`; where it raises, all is as before."""
        self.instance, self.communicator = self.join_survivors()


def refuse_to_carry_on(kind: str) -> NoReturn:
    """What `Membership.join_survivors` does where nobody can go on.

    Args:
        kind: of the instances, in words, plural.

    Raises:
        LifeCycleError: always.
    """
    raise LifeCycleError(
        f"{kind} cannot go on without one that is lost; use PopDistStrategy under poprun --on-failure shrink, which can"
    )


class Members(Protocol):
    """Who takes part, as those know it who do something together: a strategy."""

    @property
    def communicator(self) -> Communicator:
        """Connects those that are left."""

    @property
    def can_carry_on(self) -> bool:
        """Whether the job goes on where an instance is lost."""

    def carry_on(self) -> None:
        """Go on with those that are left; a collective call of theirs."""


def surviving(members: Members, attempt: Callable[[], T], catch_up: Callable[[], T | None]) -> T:
    """Do something together with the other instances, whichever of them are lost meanwhile.

    Args:
        members: the instances.
        attempt: does it; it may be repeated when it has failed half-way because an instance was lost.
        catch_up: called on all instances that are left, after they have taken over the replicas; returns the result
            where another instance had done it already, and None where it is to be attempted once more.

    Raises:
        PeerLostError: if an instance is lost and the job was not started to go on without it, or if those that are left
            do not find each other, or go on without this one.
    """
    is_behind = False
    while True:
        if is_behind:
            members.carry_on()  # itself begins again for whoever is lost meanwhile; what it raises is final
        try:
            if is_behind:
                done = catch_up()
                if done is not None:
                    return done
            return attempt()
        except (PeerLostError, BrokenError) as error:
            if not members.can_carry_on:
                raise
            logger.info("an instance is lost: %s", error)
            is_behind = True


def warn_of_loss(members: Members, reason: str | None) -> None:
    """Say why the others could not go on without an instance, where the job was started to go on.

    Args:
        members: the instances.
        reason: in words; None where they could.
    """
    if reason and members.can_carry_on and members.communicator.size > 1:
        logger.warning(
            "%s: if one is lost the job ends; to go on from a checkpoint use poprun --on-failure restart", reason
        )


def warn_where_none_goes_on(members: Members) -> None:
    """Say, on one instance, that the job ends with the first one that is lost though it was started to go on.

    Args:
        members: the instances.
    """
    is_to_go_on = is_to_carry_on() and members.communicator.size > 1
    if is_to_go_on and not members.can_carry_on and members.communicator.rank == 0:
        logger.warning(
            "%s cannot go on without an instance, as --on-failure shrink wants it: if one is lost the job ends; "
            "use PopDistStrategy over MPI, or to go on from a checkpoint poprun --on-failure restart",
            type(members).__name__,
        )


def lost_with_an_instance(has_feeds: bool, dataset: DistributedDataset | None) -> str | None:
    """What of a program the other instances do not have, in words; None where they have everything.

    Args:
        has_feeds: whether its loss function has feeds.
        dataset: the one of its batches; None where they are of no data set.
    """
    if has_feeds:
        return "the queues of feeds belong to the replicas that an instance has had from the beginning"
    if dataset is None:
        return "no instance can read another one's part of batches that are of no strategy.distribute_dataset"
    if not dataset.is_random_access:
        return "no instance can read another one's part of a data set that is only read in order"
    return None


def gather_steps(members: Members, step: int) -> np.ndarray:
    """The step that each instance has reached; a collective call.

    Args:
        members: the instances.
        step: the one that this instance has reached.
    """
    return members.communicator.all_gather(np.array(step, np.int64), name="steps that were reached")
