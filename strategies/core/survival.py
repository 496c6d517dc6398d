"""Recovery from lost instances: the others repeat the interrupted operation, with the same bits."""

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
"""The errors of a collective call that show the loss of another instance."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SurvivorMeeting:
    """The progress that the remaining instances report to each other after a loss.

    Attributes:
        is_past: Whether an instance has used up the state before this operation, so that all have to complete it.
        is_late: Whether others have completed the operation that this instance is about to do.
        newest: The rank of an instance with the most progress.
        passes: For each rank its `InstanceProgress.passes`, int64.
        batches: For each rank its `InstanceProgress.batches`, int64.
    """

    is_past: bool
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
    """Return the result of an operation of all instances. If some are lost meanwhile, repeat it without them.

    Args:
        members: The instances.
        attempt: The operation. It is repeated if a loss has interrupted it.
        catch_up: Function called on all remaining instances after they have taken over the replicas. It begins with
            `meet`. It returns the result if another instance had completed the operation, and None to repeat it.
        share: Function that hands the result to the instances that lack it, given the result and a rank that has it.
            Collective. None if they need nothing. If the job can carry on, `share` and the result are kept until the
            next operation ends.

    Raises:
        PeerLostError: If the job was not started to go on without a lost instance. If the remaining instances do not
            find each other. If they go on without this one.
    """
    try:
        done = attempt()
    except LOSSES as loss:
        done = repeated(members, loss, attempt, catch_up)
    members.done_so_far.complete(partial(share, done) if share is not None and members.can_carry_on else None)
    return done


def together(members: Members, attempt: Callable[[], T], share: Callable[[T, int], T], local: Callable[[], T]) -> T:
    """Return the result of a collective call. If instances are lost meanwhile, the remaining ones repeat it.

    Args:
        members: The instances.
        attempt: The call.
        share: Function that returns the result of a rank on all instances, given a value and that rank. The value is
            the result on instances that have it, and that of `local` on the others. Collective.
        local: Function that returns a value with arrays of the same shapes as the result.
    """

    def catch_up() -> T | None:
        meeting = meet(members)
        return share(local(), meeting.newest) if meeting.is_late else None

    return surviving(members, attempt, catch_up, share)


def repeated(members: Members, loss: BaseException, attempt: Callable[[], T], catch_up: Callable[[], T | None]) -> T:
    """Repeat an operation with the remaining instances after a loss has interrupted it.

    Args:
        members: The instances.
        loss: The error of the operation, one of `LOSSES`.
        attempt: The operation, as in `surviving`.
        catch_up: Function that catches up, as in `surviving`.

    Raises:
        PeerLostError: If the remaining instances cannot go on, as in `surviving`.
    """
    while members.can_carry_on:
        logger.info("an instance is lost: %s", loss)
        with members.communicator.instruments.during[RECOVERY]:
            members.carry_on()  # repeats itself if more instances are lost; its errors are final
        try:
            with members.communicator.instruments.during[RECOVERY]:
                done = catch_up()
                for adapt in members.done_so_far.at_change:
                    adapt()
            return attempt() if done is None else done
        except LOSSES as another:
            loss = another
    raise loss


def warn_of_loss(members: Members, reason: str | None) -> None:
    """Warn if a job that was started to go on without lost instances cannot.

    Args:
        members: The instances.
        reason: The reason in words; None if the job can go on.
    """
    if reason and members.can_carry_on and members.communicator.size > 1:
        logger.warning(
            "%s: if an instance is lost, the job ends; to go on from a checkpoint, use poprun --on-failure restart",
            reason,
        )


def warn_where_none_goes_on(members: Members) -> None:
    """Warn, on one instance, if the job was started to go on without lost instances but these members never can."""
    is_to_go_on = is_to_carry_on() and members.communicator.size > 1
    if is_to_go_on and not members.can_carry_on and members.communicator.rank == 0:
        logger.warning(
            "%s cannot go on without a lost instance, as --on-failure shrink asks: if an instance is lost, the job "
            "ends; use PopDistStrategy over MPI, or use poprun --on-failure restart to go on from a checkpoint",
            members.kind,
        )


def lost_with_an_instance(has_feeds: bool, dataset: DistributedDataset | None) -> str | None:
    """Return the reason why the other instances cannot replace a lost instance; None if they can.

    Args:
        has_feeds: Whether the loss function has feeds.
        dataset: The data set of the batches; None for batches of other origin.
    """
    if has_feeds:
        return "the queues of feeds stay with the replicas that an instance drives at the start"
    if dataset is None:
        return (
            "the batches do not come from strategy.distribute_dataset, so no instance can read the part of a lost one"
        )
    if not dataset.is_random_access:
        return "the data set can only be read in order, so no instance can read the part of a lost one"
    return None


def meet(members: Members) -> SurvivorMeeting:
    """Compare the progress of all instances, and share the last result with late instances. Collective.

    An instance that is late receives the result only after `meet` has returned: it then makes the same collective call
    as `InstanceProgress.share`.
    """
    progress = members.done_so_far
    own = np.array([progress.done, progress.passes, progress.batches, progress.is_past])
    done, passes, batches, past = members.communicator.all_gather(own, name="progress of instances").T
    newest, is_late = int(done.argmax()), bool(progress.done < done.max())
    if progress.share is not None and done.min() < done.max() and not is_late:
        progress.share(newest)
    is_past = bool(past.any() and done.min() == done.max())  # else it is past for late instances, which get the result
    return SurvivorMeeting(is_past, is_late, newest, passes, batches)
