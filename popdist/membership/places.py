"""The places of the processes of a job: who is active, who is a spare, and who feeds the spares."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from popdist.errors import LifeCycleError
from popdist.membership.process import Chief, member, process
from popdist.membership.standby import SLEEP_S, Fed, Feeding, KeptJournal, Standing, choose
from popdist.records.faults import FaultInjector
from popdist.records.progress import Role

if TYPE_CHECKING:
    import numpy as np

    from collectives import Communicator


def take_first_places(everybody: Communicator, num_spares: int) -> None:
    """Separate the active instances from the spares at the start of the job. Collective of all processes.

    Args:
        everybody: The communicator of all processes.
        num_spares: The number of spares; they are the last processes.
    """
    assert process.instance is not None
    count = everybody.size - num_spares
    process.everybody, member.journal = everybody, KeptJournal()
    member.role = Role.ACTIVE if everybody.rank < count else Role.SPARE
    spares = dict.fromkeys(range(count, everybody.size), 0)
    if member.role is Role.ACTIVE:
        process.communicator = _part_of(everybody, range(count))
    else:
        process.communicator = member.alone = _alone()
        member.lacks_values = True
    _connect_journal(everybody, spares, feeder=0)
    process.progress.takes_role(member.role is Role.SPARE)


def take_places(everybody: Communicator, role: Role) -> None:
    """Choose the active instances after a change, and connect them. Collective of all processes that are left.

    The new communicator of this process is `process.communicator`: that of the active instances, or on a spare one of
    its own. Afterwards the spares that were chosen have the whole journal.

    Args:
        everybody: The communicator of all processes that are left.
        role: The role of this process before the change.
    """
    assert process.instance is not None
    standings, is_done, wishes = _gather(everybody, role)
    _note_the_chief(everybody, role, standings, is_done)
    number, wanted = min(wishes, default=(0, 0))
    member.target = wanted or member.target or process.instance.count
    active = choose(standings, member.target)
    is_active = everybody.rank in active
    are_all_active = active == list(range(everybody.size))
    process.everybody = None if are_all_active else everybody
    member.feeding = member.fed = None
    if role is Role.LEAVING:
        process.communicator, process.everybody = everybody, None
    elif is_active:
        process.communicator = everybody if are_all_active else _part_of(everybody, active)
    else:
        if member.journal is None:
            raise LifeCycleError(
                f"{member.target} instances are wanted, and this one would sleep, but nothing is kept with which it "
                "could join again; start the job with poprun --spares"
            )
        process.communicator = member.alone = member.alone or _alone()
    if member.journal is not None and role is not Role.LEAVING and active:
        _bring_up(everybody, role, standings, active)
    member.is_chosen = role is Role.SPARE and is_active
    if role is Role.ACTIVE and not is_active:
        _fall_asleep()
    is_spare = member.role is Role.SPARE if role is Role.LEAVING else not is_active
    process.progress.takes_role(is_spare, number)


def _fall_asleep() -> None:
    """Become a spare: the program has done all operations of the journal itself."""
    assert member.journal is not None
    member.role, member.lacks_values = Role.SPARE, True
    member.journal.encode()
    member.journal.read = len(member.journal)


def _gather(everybody: Communicator, role: Role) -> tuple[list[Standing], np.ndarray, Sequence[tuple[int, int]]]:
    """Return the facts about all processes, whether each is a chief that has finished, and the wishes of poprun.

    A wish is a pair: its number, and the wanted number of active instances. It counts once an active instance has it.
    If a new wish comes meanwhile, some have that one and others the one before. Then the earlier one counts, and the
    new one leads to another change.
    """
    import numpy as np

    instance, progress = process.instance, process.progress
    assert instance is not None
    is_done = member.chief is Chief.DONE or (role is Role.LEAVING and member.role is Role.ACTIVE and instance.is_leader)
    wanted = progress.wanted  # read before the next property, which belongs to the same wish
    entries = 0 if member.journal is None else len(member.journal)
    host = zlib.crc32(instance.host.encode())
    may_be_active = progress.may_be_active and member.is_ready
    own = [int(role), instance.index, host, entries, may_be_active, is_done, member.changes, progress.wish, wanted]
    facts = everybody.all_gather(np.array(own, np.int64), name="places of the processes")
    standings = [
        Standing(Role(role), index, host, entries, bool(may)) for role, index, host, entries, may, *_ in facts.tolist()
    ]
    member.changes = 1 + int(facts[:, 6].max())
    wishes = [(number, count) for number, count in facts[:, 7:].tolist()]
    of_active = [wish for each, wish in zip(standings, wishes, strict=True) if each.role is Role.ACTIVE]
    found = [wish for wish in of_active or wishes if wish[0]]
    return standings, facts[:, 5], found  # the last ones must not wait for a wish that nobody fulfils


def _note_the_chief(everybody: Communicator, role: Role, standings: Sequence[Standing], is_done: np.ndarray) -> None:
    if is_done.any():
        member.chief, member.has_chief_left = Chief.DONE, role is not Role.LEAVING
    elif not any(each.role is Role.ACTIVE for each in standings):
        member.chief, member.is_first_left = Chief.LOST, everybody.rank == 0


def _bring_up(everybody: Communicator, role: Role, standings: Sequence[Standing], active: Sequence[int]) -> None:
    """Let the instance that knows most bring the journals of all spares up to its own."""
    had = [rank for rank in active if standings[rank].role is Role.ACTIVE]
    feeder = max(had, key=lambda rank: standings[rank].entries)
    fed = {
        rank: each.entries
        for rank, each in enumerate(standings)
        if each.role is Role.SPARE or (each.role is Role.ACTIVE and rank not in active)
    }
    _connect_journal(everybody, fed, feeder)
    journal = member.journal
    assert journal is not None
    if member.feeding is not None:
        member.feeding.pass_on(journal)
        member.feeding.leave_out(active)
    if role is Role.SPARE and everybody.rank in active:
        assert member.fed is not None
        while len(journal) < standings[feeder].entries:
            if not member.fed.take(journal):
                if process.progress.is_released:
                    from collectives import PeerLostError

                    raise PeerLostError("another process was lost while this spare read the journal")
                time.sleep(SLEEP_S / 10)
        member.fed = None


def _connect_journal(everybody: Communicator, fed: dict[int, int], feeder: int) -> None:
    assert everybody.beside is not None
    if everybody.rank in fed:
        member.fed = Fed(everybody.beside, feeder)
    elif everybody.rank == feeder:
        member.feeding = Feeding(everybody.beside, fed)


def _part_of(everybody: Communicator, active: Sequence[int]) -> Communicator:
    assert everybody.part is not None
    return everybody.part(active)


def _alone() -> Communicator:
    """Return the communicator of a spare, whose collectives nobody else takes part in."""
    import collectives
    from collectives.instruments import Instruments

    faults = [each for each in process.attached if isinstance(each, FaultInjector)]
    return collectives.connect("single", replace(process.settings(), progress=Instruments(*faults)))
