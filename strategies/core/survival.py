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
from popdist.records.recording import note_obstacle
from strategies.core.carrier import hand_over_all
from strategies.core.journal import BecameSpareError, JoinsNowError, Recorded
from strategies.core.members import Members
from strategies.errors import SpareError

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
        is_late: Whether others have completed the operation that this instance is about to do.
        newest: The rank of an instance with the most progress.
        passes: For each rank its `InstanceProgress.passes`, int64.
        batches: For each rank its `InstanceProgress.batches`, int64.
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
    recorded: Recorded[T] | None = None,
) -> T:
    """Return the result of an operation of all instances. If some are lost meanwhile, repeat it without them.

    On a spare, return the result of the others. If the spare becomes active, it takes part in the operation.

    Args:
        members: The instances.
        attempt: The operation. It is repeated if a loss has interrupted it.
        catch_up: Function called on all remaining instances after they have taken over the replicas. It begins with
            `meet`. It returns the result if another instance had completed the operation, and None to repeat it.
        share: Function that hands the result to the instances that lack it, given the result and a rank that has it.
            Collective. None if they need nothing. If the job can carry on, `share` and the result are kept until the
            next operation ends.
        recorded: The way in which spares get the result; None inside of another operation.

    Raises:
        PeerLostError: If the job was not started to go on without a lost instance. If the remaining instances do not
            find each other. If they go on without this one.
        SpareError: If this spare cannot replay the operation.
    """

    def shared_later(done: T) -> Callable[[int], object] | None:
        return partial(share, done) if share is not None and members.can_carry_on else None

    def survived() -> T:
        try:
            if members.journal.is_joining:
                raise JoinsNowError
            done = attempt()
        except LOSSES as loss:
            done = repeated(members, loss, attempt, catch_up)
        members.done_so_far.complete(shared_later(done))
        return done

    def replayed(value: object) -> T:
        assert recorded is not None
        done = recorded.unpack(value)
        members.done_so_far.share = shared_later(done)
        return done

    if recorded is None:
        return survived()
    return members.journal.perform(Recorded(recorded.kind, recorded.pack, replayed), survived)


def together(
    members: Members,
    attempt: Callable[[], T],
    share: Callable[[T, int], T],
    local: Callable[[], T],
    recorded: Recorded[T],
) -> T:
    """Return the result of a collective call. If instances are lost meanwhile, the remaining ones repeat it.

    Args:
        members: The instances.
        attempt: The call.
        share: Function that returns the result of a rank on all instances, given a value and that rank. The value is
            the result on instances that have it, and that of `local` on the others. Collective.
        local: Function that returns a value with arrays of the same shapes as the result.
        recorded: The way in which spares get the result.
    """

    def catch_up() -> T | None:
        meeting = meet(members)
        return share(local(), meeting.newest) if meeting.is_late else None

    return surviving(members, attempt, catch_up, share, recorded)


def repeated(members: Members, loss: BaseException, attempt: Callable[[], T], catch_up: Callable[[], T | None]) -> T:
    """Repeat an operation with the remaining instances after a loss has interrupted it.

    Args:
        members: The instances.
        loss: The error of the operation, one of `LOSSES`.
        attempt: The operation, as in `surviving`.
        catch_up: Function that catches up, as in `surviving`.

    Raises:
        PeerLostError: If the remaining instances cannot go on, as in `surviving`.
        BecameSpareError: If fewer instances are wanted, and this one is a spare from now on.
    """
    while members.can_carry_on:
        logger.info("the instances change: %s", loss)
        with members.communicator.instruments.during[RECOVERY]:
            members.carry_on()  # repeats itself if more instances are lost; its errors are final
        if members.is_spare:
            raise BecameSpareError
        try:
            with members.communicator.instruments.during[RECOVERY]:
                done = catch_up()
            return attempt() if done is None else done
        except LOSSES as another:
            loss = another
    raise loss


def warn_of_loss(members: Members, reason: str | None) -> None:
    """Warn if a job that was started to go on without lost instances cannot; then it cannot be resized either.

    Args:
        members: The instances.
        reason: The reason in words; None if the job can go on.
    """
    if members.is_spare:
        return  # a rehearsal does not have the data set, and the active instances say it
    if reason:
        note_obstacle(reason)
    if reason and members.can_carry_on:
        members.progress.needs_all()
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
            "ends; use PopDistStrategy over MPI, or IPUMultiWorkerStrategy(on_failure='shrink') without poprun, or use "
            "poprun --on-failure restart to go on from a checkpoint",
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
    """Compare the progress of all instances, hand states over to those that join, and results to late ones. Collective.

    An instance that is late receives the result only after `meet` has returned: it then makes the same collective call
    as `InstanceProgress.share`.

    Raises:
        SpareError: This instance joins, and does not fit the others.
    """
    progress, joins = members.done_so_far, members.journal.is_joining
    own = np.array([progress.done, progress.passes, progress.batches, progress.entries, joins])
    done, passes, batches, entries, joining = members.communicator.all_gather(own, name="progress of instances").T
    if joining.any():
        done = _joined(members, done - batches, entries, joining, done)
    newest = int(np.where(joining, -1, done).argmax())
    is_late = bool(progress.done < done.max())
    if progress.share is not None and done.min() < done.max() and not is_late:
        progress.share(newest)
    return SurvivorMeeting(is_late, newest, passes, batches)


def _joined(
    members: Members, begun: np.ndarray, entries: np.ndarray, joining: np.ndarray, done: np.ndarray
) -> np.ndarray:
    """Hand states over to the instances that join, and return the progress of all instances. Collective.

    Args:
        members: The instances.
        begun: For each rank its progress at the beginning of its operation.
        entries: For each rank its number of complete operations with an entry.
        joining: Whether each rank joins.
        done: For each rank its progress.

    Raises:
        SpareError: This instance joins, and does not fit the others.
    """
    ready = np.flatnonzero((joining == 0) & (entries == entries[joining == 1].max()))
    if ready.size:
        source = int(ready[0])
        hand_over_all(members, source)
        if joining[members.communicator.rank]:
            members.done_so_far.done = int(begun[source])
        return np.where(joining, begun[source], done)
    if joining[members.communicator.rank]:
        raise SpareError("no instance is at the operation at which this spare is, so it cannot take part in it")
    return done


def join(members: Members) -> None:
    """Join the active instances outside of operations, as an instance that has been a spare. Collective with them."""
    repeated(members, JoinsNowError(), lambda: True, lambda: meet(members) and None)
