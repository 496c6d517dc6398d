"""Workers of a cluster that were started again: they replay the journal, and join between two steps."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import TYPE_CHECKING

from popdist.membership.process import member, process
from popdist.membership.standby import Fed, Feeding, KeptJournal
from popdist.records.progress import ProgressPage, Role

if TYPE_CHECKING:
    from collectives import Communicator
    from collectives.point_to_point.link import Link

logger = logging.getLogger(__name__)

_feeding: tuple[Link, Feeding] | None = None


# ---- the worker that was started again


def take_place(communicator: Communicator) -> None:
    """Keep a journal, and become a spare if this worker was started again while the others work."""
    member.journal, process.progress = KeptJournal(), ProgressPage(is_change_due=_is_change_due)
    if not _grpc().is_waiting(communicator):
        return
    assert process.instance is not None
    assert communicator.beside is not None
    count = process.instance.count
    member.role, member.is_ready, member.alone = Role.SPARE, False, communicator
    member.lacks_values = True
    member.fed = Fed(communicator.beside, 0)
    process.instance = process.instance.renumbered(count - 1, count)  # never that of the chief


def is_waiting() -> bool:
    """Return whether this is a worker that was started again and waits to join."""
    return process.workers_go_on and member.alone is not None and bool(_grpc().is_waiting(member.alone))


def may_join(has_read: int) -> None:
    """Tell the others that this worker, if it was started again, has read all entries that have come.

    Args:
        has_read: The number of these entries.
    """
    if is_waiting():
        _grpc().may_join(member.alone, has_read)


def has_joined() -> bool:
    """Return whether the others have let this worker join, so that it has to connect with them.

    Raises:
        PeerLostError: The worker that passes the journal on is gone.
    """
    return is_waiting() and bool(_grpc().has_joined(member.alone))


# ---- the others


def _is_change_due() -> bool:
    """Return whether the members change, which a worker that is alone would not notice in its collectives."""
    communicator = process.communicator
    return communicator is not None and communicator.link is not None and bool(_grpc().is_revoked(communicator))


def feed() -> None:
    """Pass the journal on to a worker that was started again, if there is one and this worker has to."""
    global _feeding
    journal, communicator = member.journal, process.communicator
    assert journal is not None
    if communicator is None or communicator.link is None:
        return
    link = _grpc().joiner_of(communicator)
    if link is None:
        _feeding = None
    elif _feeding is None or _feeding[0] is not link:
        _feeding = link, Feeding(link, {1: 0})
    if _feeding is not None:
        _feeding[1].pass_on(journal)


def begin(may_change: bool) -> None:
    """Begin an operation of the active workers; let a worker join that has nearly caught up.

    Args:
        may_change: Whether the members may change in this operation, and in the one before, in which others may be.
    """
    communicator = process.communicator
    if communicator is None or communicator.link is None:
        return
    grpc = _grpc()
    grpc.have_joined(communicator)
    if may_change and _feeding is not None and (entries := _feeding[1].passed_on_before(1)):
        grpc.let_join(communicator, entries)


def end() -> None:
    """Tell a worker that still waits to join that the job ends; on that worker, tell the user."""
    if member.role is Role.SPARE:
        logger.warning(
            "the others have finished before this worker had caught up with them, so it has not joined; it catches up "
            "faster if the program does less between two steps"
        )
    elif member.journal is not None and member.role is Role.ACTIVE:
        feed()
        if _feeding is not None:
            _feeding[1].end(member.journal)


def _grpc() -> ModuleType:
    import collectives

    return collectives.load_backend("grpc")
