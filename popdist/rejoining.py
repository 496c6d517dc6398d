"""Workers of a cluster that were started again: they replay the journal, and join between two steps."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from popdist.process import process
from popdist.records.progress import NoProgress, Role
from popdist.standby import Fed, Feeding, KeptJournal

if TYPE_CHECKING:
    from collectives import Communicator
    from collectives.point_to_point.link import Link

_feeding: tuple[Link, Feeding] | None = None


# ---- the worker that was started again


def take_place(communicator: Communicator) -> None:
    """Keep a journal, and become a spare if this worker was started again while the others work."""
    process.journal, process.progress = KeptJournal(), NoProgress(_is_change_due)
    if not _grpc().is_waiting(communicator):
        return
    assert process.instance is not None
    assert communicator.beside is not None
    count = process.instance.count
    process.role, process.is_ready, process.alone = Role.SPARE, False, communicator
    process.fed = Fed(communicator.beside, 0)
    process.instance = process.instance.renumbered(count - 1, count)  # never that of the chief


def is_waiting() -> bool:
    """Return whether this is a worker that was started again and waits to join."""
    return process.workers_go_on and process.alone is not None and bool(_grpc().is_waiting(process.alone))


def may_join() -> None:
    """Tell the other workers that this one, which was started again, has read the journal to its end."""
    if is_waiting():
        _grpc().may_join(process.alone)


def has_joined() -> bool:
    """Return whether the others have let this worker join, so that it has to connect with them.

    Raises:
        PeerLostError: The worker that passes the journal on is gone.
    """
    return is_waiting() and bool(_grpc().has_joined(process.alone))


# ---- the others


def _is_change_due() -> bool:
    """Return whether the members change, which a worker that is alone would not notice in its collectives."""
    communicator = process.communicator
    return communicator is not None and communicator.link is not None and bool(_grpc().is_revoked(communicator))


def feed() -> None:
    """Pass the journal on to a worker that was started again, if there is one and this worker has to."""
    global _feeding
    journal, communicator = process.journal, process.communicator
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


def end() -> None:
    """Tell a worker that still waits to join that the job ends."""
    if process.journal is not None:
        feed()
        if _feeding is not None:
            _feeding[1].end(process.journal)


def _grpc() -> ModuleType:
    import collectives

    return collectives.load_backend("grpc")
