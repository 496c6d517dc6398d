"""Carrying on without the instances that are lost, with the same bits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from collectives import BrokenError, PeerLostError
from collectives.instruments import RECOVERY
from popdist.leaving import is_to_carry_on
from strategies.core.members import Members

if TYPE_CHECKING:
    from strategies.data.datasets import DistributedDataset

T = TypeVar("T")

LOSSES = (PeerLostError, BrokenError)
"""The errors that are raised where another instance is lost."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SurvivorMeeting:
    """The progress of all instances that are left after a loss, as they have told each other.

    Attributes:
        is_late: whether others have done what this one is about to do.
        newest: the rank of one that has done most.
        passes: for each rank its `InstanceProgress.passes`, int64.
        batches: for each rank its `InstanceProgress.batches`, int64.
    """

    is_late: bool
    newest: int
    passes: np.ndarray
    batches: np.ndarray


def surviving(
    members: Members,
    attempt: Callable[[], T],
    catch_up: Callable[[], T | None],
    share: Callable[[T, int], object] | None = None,
) -> T:
    """Do something together with the other instances, whichever of them are lost meanwhile.

    Args:
        members: the instances.
        attempt: does it; it may be repeated when it has failed half-way because an instance was lost.
        catch_up: called on all instances that are left, after they have taken over the replicas; begins with `meet`,
            whatever the others are about to do; returns the result where another instance had done it already, and None
            where it is to be attempted once more.
        share: hands what was done to those who are late, given it and the rank that has it, in a collective call; None
            where they need nothing. It is kept until the next thing is done, and what was done too, where members
            carry on without those that are lost.

    Raises:
        PeerLostError: if an instance is lost and the job was not started to go on without it, or if those that are left
            do not find each other, or go on without this one.
    """
    try:
        done = attempt()
    except LOSSES as loss:
        done = repeated(members, loss, attempt, catch_up)
    members.done_so_far.complete(partial(share, done) if share is not None and members.can_carry_on else None)
    return done


def together(members: Members, attempt: Callable[[], T], share: Callable[[T, int], T], local: Callable[[], T]) -> T:
    """Return the result of a collective call on all instances, whichever of them are lost meanwhile.

    Args:
        members: the instances.
        attempt: makes the call.
        share: hands the result to those who are late, given it, or on those something like it, and the rank that has
            it; a collective call.
        local: returns something like the result.
    """

    def catch_up() -> T | None:
        meeting = meet(members)
        return share(local(), meeting.newest) if meeting.is_late else None

    return surviving(members, attempt, catch_up, share)


def repeated(members: Members, loss: BaseException, attempt: Callable[[], T], catch_up: Callable[[], T | None]) -> T:
    """Do again, with the instances that are left, what has failed half-way.

    Args:
        members: the instances.
        loss: one of `LOSSES`, with which it has failed.
        attempt: see `surviving`.
        catch_up: see there.

    Raises:
        PeerLostError: see there.
    """
    while members.can_carry_on:
        logger.info("an instance is lost: %s", loss)
        with members.communicator.instruments.during[RECOVERY]:
            members.carry_on()  # itself begins again for whoever is lost meanwhile; what it raises is final
        try:
            with members.communicator.instruments.during[RECOVERY]:
                done = catch_up()
            return attempt() if done is None else done
        except LOSSES as another:
            loss = another
    raise loss


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
            members.kind,
        )


def lost_with_an_instance(has_feeds: bool, dataset: DistributedDataset | None) -> str | None:
    """Return the reason why the other instances cannot replace one that is lost; None if they can.

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


def meet(members: Members) -> SurvivorMeeting:
    """Find out who has done what, and hand it to those who are late; a collective call.

    Those who are late take it, with the same call as `InstanceProgress.share` of the others, once this returns.

    Args:
        members: the instances.
    """
    progress = members.done_so_far
    own = np.array([progress.done, progress.passes, progress.batches])
    done, passes, batches = members.communicator.all_gather(own, name="how far instances have come").T
    newest, is_late = int(done.argmax()), bool(progress.done < done.max())
    if progress.share is not None and done.min() < done.max() and not is_late:
        progress.share(newest)
    return SurvivorMeeting(is_late, newest, passes, batches)
