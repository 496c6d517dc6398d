"""The continuation without lost instances, and the end of the job: together after success, at once after a failure."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from popdist.environments.poprun import SHRINKS_VARIABLE
from popdist.errors import LifeCycleError
from popdist.failing import end_with
from popdist.instance import Instance
from popdist.membership import connecting, rejoining
from popdist.membership.places import take_places
from popdist.membership.process import Chief, member, process
from popdist.records.progress import Role


@dataclass
class _Exit:
    """The end of this process.

    Attributes:
        is_watched: Whether the process leaves the job when it ends.
        at_end: Ends other users of MPI.
        at_failure: Lets a failed process end without waiting.
        failed_at: Number of collectives called when the program began to fail.
    """

    is_watched: bool = False
    at_end: Callable[[], None] | None = None
    at_failure: Callable[[], None] | None = None
    failed_at: int | None = None


_exit = _Exit()
_at_renumbering: list[Callable[[], None]] = []
_WITHOUT_CHIEF = (
    "instance 0 was lost when all others had finished: its output and files for the whole job are missing. "
    "Start the job again, or write them in strategy.on_chief, so that after a loss another instance writes them"
)
_ONLY_SPARES = "all instances that had the variables are lost, and spares have none. Start the job from its checkpoint"


# ---- survivors


def can_carry_on() -> bool:
    """Return whether the other instances can continue after a loss.

    Instances over MPI can under poprun --on-failure shrink, and workers of a cluster with on_failure="shrink".
    """
    return (process.workers_go_on or (process.is_default and is_to_carry_on())) and not process.others


def is_to_carry_on() -> bool:
    """Return whether the user wants the job to continue after losses, even if it cannot."""
    return SHRINKS_VARIABLE in os.environ


def carry_on() -> Instance:
    """Continue without lost instances; a collective call of the surviving instances.

    Survivors are numbered anew in the same order, and spares take the numbers of lost instances. The active ones share
    all replicas in order, as evenly as possible; the first ones may drive one more. The call waits until every survivor
    has called it or has finished its program. Finished survivors wait at their exit and get no replicas. If another
    instance is lost meanwhile, the call begins again. On a spare that has been chosen the call waits for nobody.

    Returns:
        The new identity of this instance. `communicator` returns a new communicator as well. If fewer instances are
        wanted, this one may have become a spare: `popdist.membership.spares.is_spare` tells.

    Raises:
        LifeCycleError: The job was not started to continue after losses.
    """
    process.refuse_in_child()
    if process.communicator is None or process.instance is None or not can_carry_on():
        raise LifeCycleError(
            "the job cannot go on without an instance; start it with poprun --on-failure shrink, or make all workers "
            "with IPUMultiWorkerStrategy(on_failure='shrink')"
        )
    if not member.is_chosen:
        if member.lacks_values:  # those that had chosen it are lost before it has got the variables
            member.role = Role.SPARE
        connect_survivors(member.role)
    if member.is_chosen:
        member.role, member.is_chosen = Role.ACTIVE, False
    for forget in _at_renumbering:
        forget()
    if member.role is Role.ACTIVE:
        process.instance = process.instance.renumbered(process.communicator.rank, process.communicator.size)
    if process.timeline is not None:
        is_spare = member.role is Role.SPARE
        process.timeline.renumbered(process.instance.index, 0 if is_spare else process.instance.count, member.changes)
    return process.instance


def at_renumbering(forget: Callable[[], None]) -> None:
    """Register a function to call when the instances get new numbers."""
    _at_renumbering.append(forget)


def connect_survivors(role: Role) -> None:
    """Connect with the surviving processes; finished ones and spares take no part in the work of the others.

    Args:
        role: The role of this process. If it has finished its program, it then waits for the survivors at its exit.
    """
    import collectives

    process.progress.changes()
    while True:
        lost = [each for each in process.every_communicator if each is not member.alone]
        latest = lost[-1] if lost else member.alone
        assert latest is not None
        everybody = connecting.connect_survivors(latest)
        for communicator in lost:
            communicator.abandon()
        process.everybody = everybody
        if role is not Role.SPARE:  # the program of a spare may be using its own one in another thread
            process.communicator = everybody
        try:
            take_places(everybody, role)
        except (collectives.PeerLostError, collectives.BrokenError):
            continue
        if role is Role.LEAVING:
            process.progress.leaving()
        return


# ---- the end


def disconnect() -> None:
    """Wait until all instances disconnect, then disconnect; see `finalizeBackend`."""
    process.refuse_in_child()
    with member.looking:  # the thread of `popdist.membership.reserve` may be in a change of the members; then it ends
        member.is_ready = True
    if can_carry_on():
        _end_with_who_is_left()
        return
    communicators = process.every_communicator
    process.forget_backend()
    for communicator in communicators[:-1]:
        communicator.close()
    if _exit.at_end is not None:
        _exit.at_end()
    communicators[-1].close()
    process.progress.finished()
    connecting.finalize_mpi()


def _end_with_who_is_left() -> None:
    """Wait until all surviving instances finalise, also after losses. MPI itself is not finalized.

    If an instance is lost during the last collective, some survivors may complete it while others abandon it. The
    others then wait for all survivors. So each instance checks for losses before it leaves.
    """
    from collectives import BrokenError, ClosedError, PeerLostError

    process.progress.leaving()
    if process.workers_go_on:
        rejoining.end()
    while True:
        try:
            for communicator in process.every_communicator:
                communicator.close()
                if communicator is process.communicator and member.feeding is not None:
                    assert member.journal is not None
                    member.feeding.end(member.journal)
        except (PeerLostError, BrokenError):
            pass
        except Exception:
            process.forget_backend()
            raise
        else:
            if member.chief is Chief.AT_WORK:
                member.chief = Chief.DONE
            if not process.progress.is_released:
                break
        try:
            connect_survivors(Role.LEAVING)
        except ClosedError:  # all others have ended in order, and this instance has only missed their last messages
            member.chief = Chief.DONE
            break
    process.forget_backend()
    process.progress.finished()


def watch_exit() -> None:
    """Make a finished program wait for the others at exit, and a failed program leave at once."""
    if _exit.is_watched:
        return
    from collectives import forks
    from popdist.failing import LastThreads, notice_failure

    _exit.is_watched = True
    forks.at_exit(_leave)
    last_threads = LastThreads(has_failed, _abandon)

    def note_failure(status: int) -> None:
        if process.communicator is None or process.communicator.is_inherited:
            return
        _exit.failed_at = process.calls_made
        if process.communicator.size > 1:
            last_threads.watch(status)

    notice_failure(note_failure, lambda: process.progress.is_supervised)


def has_failed() -> bool:
    """Return whether the program has failed and has called no collective since."""
    return process.communicator is not None and _exit.failed_at == process.calls_made


def end_before_mpi(at_end: Callable[[], None], at_failure: Callable[[], None]) -> None:
    """Register the end of another user of MPI, which must end before MPI does; may be called before `init`.

    Args:
        at_end: Function that ends it together with the other instances, if it is still running.
        at_failure: Function that lets a failed process end without waiting for the others.
    """
    _exit.at_end, _exit.at_failure = at_end, at_failure
    leave_first()


def leave_first() -> None:
    """Let this instance wait for the others before the exit handlers that exist now, which may end what others use."""
    if _exit.is_watched:
        from collectives import forks

        forks.not_at_exit(_leave)  # exit handlers run in reverse order
        forks.at_exit(_leave)


def _abandon() -> None:
    """Leave the job at once, without waiting for the others."""
    from collectives import forks

    for communicator in process.every_communicator:
        communicator.abandon()
    forks.not_at_exit(connecting.finalize_mpi)
    if _exit.at_failure is not None:
        _exit.at_failure()


def _leave() -> None:
    """Leave the job: together with the others after success, at once after a failure."""
    if process.communicator is not None:
        if has_failed():
            _abandon()
            return
        _finalize_at_exit()
    if member.chief is Chief.LOST:
        reason = _ONLY_SPARES if member.role is Role.SPARE else _WITHOUT_CHIEF
        end_with(1, reason if member.is_first_left else "")


def _finalize_at_exit() -> None:
    import logging

    from collectives import CollectiveError

    process.progress.leaving()
    try:
        disconnect()
    except CollectiveError as error:
        logging.getLogger(__name__).debug("the instances did not end together: %s", error)
