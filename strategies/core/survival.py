"""Recovery from lost instances, and the handing over of states to instances that join."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from collectives import BrokenError, PeerLostError
from collectives.instruments import RECOVERY
from popdist.membership.leaving import is_to_carry_on
from popdist.records.recording import note_obstacle
from strategies.core.agreement import Members, broadcast_text, digest_of_arrays
from strategies.core.engine import Engine, Pending, State
from strategies.core.journal import BecameSpareError, JoinsNowError, Recorded
from strategies.errors import SpareError
from strategies.typing import Batch

if TYPE_CHECKING:
    from strategies.data.datasets import DistributedDataset


# ---- states for instances that join


class StateTransfer(Generic[State, Pending]):
    """The transfer of one trainer's latest state to joining instances.

    All instances make their transfers in the same order. On an active instance the state has values. On a spare it is
    made of placeholders, which get their values when the instance joins.

    Args:
        members: The instances.
        engine: The engine that owns the states.
        unrecoverable_part: Name of the part of the state that is lost with an instance, for messages; None without one.

    Attributes:
        batch: The batch of the step that is being made; None outside of steps.
        first: Function that returns a state with the shapes of the first one, while the training starts.
    """

    def __init__(self, members: Members, engine: Engine[State, Pending], unrecoverable_part: str | None) -> None:
        self._members = members
        self._engine = engine
        self._unrecoverable_part = unrecoverable_part
        self._latest: State | None = None
        self._version = 0
        self.batch: Batch = None
        self.first: Callable[[], State] | None = None
        if members.journal.is_kept:
            members.journal.transfers.append(self)

    def note(self, state: State) -> None:
        """Note the state that the trainer has made, or was given, last."""
        if state is not self._latest and self._members.journal.is_kept:
            self._latest = state
            self._version += 1

    def placeholder_state(self, state: State, step: int) -> State:
        """Return the state of a step on a spare, like `state` but without values, and note it."""
        found = self._engine.placeholder_state(state, step, self._members.wait_for_values)
        self.note(found)
        return found

    def read(self, state: State) -> State:
        """Return a state with values, given one that this instance may have got as a spare."""
        return self._engine.read(state) if self._members.journal.has_joined else state

    def holds(self, state: object) -> bool:
        """Return whether this is the latest state."""
        return state is self._latest

    # ---- handing over

    @property
    def facts(self) -> tuple[Mapping[str, object], Mapping[str, object]]:
        """Facts to compare with a joining instance: required ones, and ones compared only if both know them."""
        state = self._latest
        reported = {"number of states": self._version, "step": None if state is None else state.step}
        others = dict(self._engine.facts)
        if self.batch is not None:  # missing if the program of the joining instance reads variables between steps
            others["position in the data set"] = self._members.position_of(self.batch)
        return reported, others

    @property
    def obstacle(self) -> str:
        """The reason why this state cannot be handed over, or ""."""
        if self._unrecoverable_part is None:
            return ""
        return f"every instance has a part of the state that no other has ({self._unrecoverable_part})"

    def hand_over(self, source: int, joins: bool) -> None:
        """Take over the state of rank `source`, which has one, if this instance joins. Collective.

        Args:
            source: The rank whose state is handed over.
            joins: Whether this instance joins.
        """
        if self._latest is None:  # this instance is late by the start of the training
            assert self.first is not None
            self._engine.hand_over(self.first(), source, joins)
        elif joins:
            self._engine.fill(self._latest, self._engine.hand_over(self._latest, source, joins))
        else:
            self._engine.hand_over(self.read(self._latest), source, joins)

    def digest(self) -> tuple[int, int]:
        """Return a digest of the latest state."""
        return (
            (0, 0) if self._latest is None else digest_of_arrays(self._engine.digest(self.read(self._latest)).values())
        )


def transfer_states(members: Members, source: int) -> None:
    """Hand the states of all transfers over to the instances that join. Collective.

    A joining instance that differs in anything that can be compared ends, and the others go on without it.

    Args:
        members: The instances.
        source: The rank whose states are handed over.

    Raises:
        SpareError: This instance joins, and does not fit.
    """
    journal = members.journal
    joins = journal.is_joining
    reported = _compare_facts(members, source)
    for transfer, facts in zip(journal.transfers, reported, strict=False):
        if facts["step"] is not None:
            transfer.hand_over(source, joins)
    _compare_digests(members, source)
    journal.takes_values()


def _compare_facts(members: Members, source: int) -> list[dict[str, object]]:
    """Return the facts of each transfer of the source; raise on a joining instance that does not fit. Collective."""
    journal = members.journal
    counts = {"number of trainers": len(journal.transfers), "number of operations": members.done_so_far.entries}
    own = [(counts, {}), *[transfer.facts for transfer in journal.transfers]]
    text = broadcast_text(members.communicator, json.dumps(own), source, "facts of the training")
    reported: list[tuple[dict[str, object], dict[str, object]]] = json.loads(text)
    of_transfers = [facts for facts, _ in reported[1:]]
    if not journal.is_joining:
        return of_transfers
    for (theirs, some_of_theirs), (here, some_here) in zip(reported, json.loads(json.dumps(own)), strict=False):
        if found := _difference(theirs, here) or _difference(some_of_theirs, some_here, only_common=True):
            raise SpareError(f"this spare cannot take the place of a lost instance: {found}")
    if obstacle := next((each.obstacle for each in journal.transfers if each.obstacle), ""):
        raise SpareError(f"this spare cannot take the place of a lost instance: {obstacle}")
    return of_transfers


def _compare_digests(members: Members, source: int) -> None:
    """Raise on a joining instance that has other bits than the source. Collective."""
    journal, communicator = members.journal, members.communicator
    concerns = journal.is_joining or communicator.rank == source
    own = [transfer.digest() if concerns else (0, 0) for transfer in journal.transfers]
    digests = communicator.all_gather(np.array(own, np.uint64).reshape(-1), name="digests of what was handed over")
    if journal.is_joining and (digests[communicator.rank] != digests[source]).any():
        raise SpareError(
            f"the variables have other bits here than on rank {source}, which has handed them over; check the memory "
            "and the network of this host"
        )


def _difference(theirs: Mapping[str, object], own: Mapping[str, object], only_common: bool = False) -> str:
    """Describe the first fact in which two instances differ; "" if there is none.

    Args:
        theirs: The facts of the other instance.
        own: The facts of this instance.
        only_common: Whether to compare only facts that both have.
    """
    names = theirs.keys() & own.keys() if only_common else theirs.keys() | own.keys()
    for name in sorted(names):
        there, here = theirs.get(name, "missing"), own.get(name, "missing")
        if there != here:
            return f"its {name} is {here}, but on the active instances it is {there}"
    return ""


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


def collectively(
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
                for adapt in members.done_so_far.at_change:
                    adapt()
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
    own = np.array([progress.done, progress.passes, progress.batches, progress.entries, joins, progress.is_past])
    done, passes, batches, entries, joining, past = members.communicator.all_gather(own, name="progress of instances").T
    if joining.any():
        done = _joined(members, done - batches, entries, joining, done)
    newest = int(np.where(joining, -1, done).argmax())
    is_late = bool(progress.done < done.max())
    if progress.share is not None and done.min() < done.max() and not is_late:
        progress.share(newest)
    is_past = bool(past.any() and done.min() == done.max())  # else it is past for late instances, which get the result
    return SurvivorMeeting(is_past, is_late, newest, passes, batches)


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
        transfer_states(members, source)
        if joining[members.communicator.rank]:
            members.done_so_far.done = int(begun[source])
        return np.where(joining, begun[source], done)
    if joining[members.communicator.rank]:
        raise SpareError("no instance is at the operation at which this spare is, so it cannot take part in it")
    return done


def join(members: Members) -> None:
    """Join the active instances outside of operations, as an instance that has been a spare. Collective with them."""
    repeated(members, JoinsNowError(), lambda: True, lambda: meet(members) and None)
