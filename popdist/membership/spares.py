"""The journal of a job with spares, from the side of the strategies."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from popdist.errors import LifeCycleError
from popdist.membership import rejoining
from popdist.membership.leaving import connect_survivors
from popdist.membership.process import Chief, member, process
from popdist.membership.standby import SLEEP_S, KeptJournal
from popdist.records.progress import Role


def is_spare() -> bool:
    """Return whether this process waits to take the place of a lost instance."""
    return member.role is Role.SPARE


def keeps_journal() -> bool:
    """Return whether the results of operations are kept, because other instances may join later."""
    return member.journal is not None


def may_change(is_so: bool, was_so: bool = False) -> None:
    """Note whether this instance is in an operation that can be repeated, so that the members may change in it.

    Args:
        is_so: Whether it is in one.
        was_so: Whether it begins one, and the operation before could be repeated as well.
    """
    process.progress.heeds_wishes(is_so)
    if is_so and process.workers_go_on:
        rejoining.begin(was_so)


def takes_values() -> None:
    """Note that this process, which was a spare, has got the variables of the others."""
    member.lacks_values = False
    process.progress.takes_values()


def publish(entry: Callable[[], bytes]) -> None:
    """Keep the result of an operation for spares; every active instance calls this, in the same order.

    Args:
        entry: Function that encodes the result. It is called some time later, at the latest when the members change.
    """
    journal = member.journal
    if journal is None:
        return
    process.refuse_in_child()
    if not journal.add(entry):
        return
    if member.feeding is not None:
        member.feeding.pass_on(journal)
    if process.workers_go_on:
        rejoining.feed()


def next_entry() -> bytes | None:
    """Return the result of the next operation; a spare calls this in place of the operation.

    It sleeps until the others have completed the operation.

    Returns:
        The encoded result. None if this spare was chosen, and has got all results that the others have published. Then
        `popdist.carry_on` returns its new identity, and it takes part in this operation.

    Raises:
        LifeCycleError: This process is no spare.
        SystemExit: At the end of the job.
    """
    journal = member.journal
    if journal is None or not is_spare():
        raise LifeCycleError("only a spare reads the journal of the other instances")
    process.refuse_in_child()
    with member.looking:
        _take_what_has_come(journal)
        if _has_to_join(journal):
            return None
        journal.read += 1
        return journal.entries[journal.read - 1]


def _take_what_has_come(journal: KeptJournal) -> None:
    """Add all entries that have come to the journal, so that the sender need not keep them."""
    from collectives import PeerLostError

    with suppress(PeerLostError):  # `has_news` meets it again when the program has read everything
        while member.fed is not None and member.fed.take(journal):
            pass


def _has_to_join(journal: KeptJournal) -> bool:
    """Sleep until the journal has another entry; return whether this spare has been chosen instead."""
    while journal.read == len(journal.entries):
        if member.is_chosen:
            return True
        if has_news():
            continue
        if not member.is_ready:
            member.is_ready = True
            process.progress.catches_up()
        rejoining.may_join(journal.read)
        time.sleep(SLEEP_S)
    return False


def has_news() -> bool:
    """Look for new entries, for a change of the members, and for the end of the job."""
    from collectives import ClosedError, PeerLostError

    fed, journal = member.fed, member.journal
    assert journal is not None
    if member.chief is Chief.LOST or fed is None or fed.is_end:
        raise SystemExit(0)
    try:
        if fed.take(journal):
            return True
        if not (process.progress.is_released or rejoining.has_joined()):
            return False
    except PeerLostError:
        if rejoining.is_waiting():
            raise
    try:
        connect_survivors(Role.SPARE)
    except ClosedError:  # all others have just finished
        raise SystemExit(0) from None
    return True
