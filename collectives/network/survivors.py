"""The agreement of workers on who is left: messages in, a new membership out, without threads or streams."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from collectives.calls import foreign

VIEW = b"view "
CHANGED = "the workers connect anew"
JOINED = "a worker that was started again joins"
_LONGEST_REASON = 300


@dataclass(frozen=True)
class View:
    """The opinion of one worker about the members.

    Attributes:
        epoch: Number of the last membership on which the worker and the others have agreed; 0 at the start.
        members: Ranks of that membership.
        lost: The members that the worker has given up, each with the reason.
        is_changing: Whether the worker no longer works in that membership, and waits for the next one.
        survived: All workers that earlier memberships have lost, each with the reason.
        joining: Workers that belong to the next membership as well; None if nobody has proposed any.
        voters: The members that were there before others joined, until all have entered this membership; else None.
        eldest: The first member; None if it is the one with the lowest rank.
    """

    epoch: int
    members: frozenset[int]
    lost: Mapping[int, str] = field(default_factory=dict)
    is_changing: bool = False
    survived: Mapping[int, str] = field(default_factory=dict)
    joining: frozenset[int] | None = None
    voters: frozenset[int] | None = None
    eldest: int | None = None

    @property
    def first(self) -> int:
        """The first member: half of the members go on only with it. A worker that joins never takes its place."""
        return min(self.members, default=-1) if self.eldest is None else self.eldest

    @property
    def leader(self) -> int:
        """The first member of the next membership, as far as the worker knows; it lets others join."""
        return self.first if self.first in self.alive else min(self.alive, default=self.first)

    @property
    def next_members(self) -> frozenset[int]:
        """The members of the next membership, as far as the worker knows."""
        return self.alive | (self.joining or frozenset())

    @property
    def alive(self) -> frozenset[int]:
        """The ranks that the worker has not given up."""
        return self.members.difference(self.lost)

    def encode(self) -> bytes:
        """Encode the view as a beat."""
        lost, survived = ({str(rank): why for rank, why in of.items()} for of in (self.lost, self.survived))
        others = [None if ranks is None else sorted(ranks) for ranks in (self.joining, self.voters)]
        values = [self.epoch, sorted(self.members), lost, self.is_changing, survived, *others, self.eldest]
        return VIEW + json.dumps(values).encode()

    @classmethod
    def decode(cls, beat: bytes) -> View:
        """Decode the beat of another worker.

        Raises:
            ValueError: The beat is not a view.
        """
        try:
            epoch, members, lost, is_changing, survived, *others, eldest = json.loads(beat.removeprefix(VIEW))
            joining, voters = [None if ranks is None else frozenset(ranks) for ranks in others]
            reasons = (_reasons(lost), is_changing, _reasons(survived))
            view = cls(epoch, frozenset(members), *reasons, joining, voters, eldest)
        except (TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"no view: {error}") from error
        numbers = (epoch, view.first, *view.members, *(joining or ()), *(voters or ()))
        are_numbers = all(type(number) is int for number in numbers)
        if not are_numbers or type(is_changing) is not bool or not view.lost.keys() | {view.first} <= view.members:
            raise ValueError("no view: its values have wrong types, or do not fit together")
        return view


def _reasons(given: Mapping[str, object]) -> dict[int, str]:
    return {int(rank): foreign(str(why), _LONGEST_REASON) for rank, why in given.items()}


def may_go_on(left: Collection[int], members: Collection[int], first: int) -> bool:
    """Return whether the members that are left may go on: more than half, or half with the first one.

    Two such groups always have a worker in common, so two parts of a cut network never both go on.
    """
    return 2 * len(left) > len(members) or (2 * len(left) == len(members) and first in left)


class Agreement:
    """The agreement of one worker with the others on the next membership; the owner guards it with a lock.

    Within an epoch a worker only ever gives up members, and takes over what others have given up. It enters the next
    epoch when all members that it has not given up have announced the same remaining members as itself, and these
    `may_go_on`. A worker that hears that another one has entered the next epoch with both of them follows it.

    Why two groups never both go on: suppose that one worker enters an epoch with the members S, and another one with
    T, from the same members. Some worker belongs to both, because both may go on. It has announced both sets, one
    after the other, say S and then T; so T is a part of S. Every worker of T has announced T before it left the old
    epoch. Whoever has announced T enters with S no more: from S alone, at most the workers outside of T are there. They
    are too few to leave S again, and nobody completes a collective call of S without those of T.

    Args:
        rank: Rank of this worker.
        members: Ranks of all workers.

    Attributes:
        rank: Rank of this worker.
        view: Opinion of this worker.
        excluded: Reason why the others go on without this worker; "" if they do not.
    """

    def __init__(self, rank: int, members: Collection[int]) -> None:
        self.rank = rank
        self.view = View(0, frozenset(members))
        self.excluded = ""
        self._said: dict[int, View] = {}
        self._revoked: dict[int, str] = {}

    def why_revoked(self, epoch: int) -> str:
        """Return why the membership with this number has ended; "" if it has not."""
        return self._revoked.get(epoch, "")

    @property
    def may_go_on(self) -> bool:
        """Whether the members that this worker has not given up are enough to go on."""
        view = self.view
        return may_go_on(view.alive, view.members, view.first) and (
            view.voters is None or may_go_on(view.alive & view.voters, view.voters, view.first)
        )

    @property
    def is_member(self) -> bool:
        """Whether this worker belongs to the present membership; not while it waits to join."""
        return self.rank in self.view.members

    @property
    def awaited(self) -> list[int]:
        """The members that have not announced the same remaining members as this worker."""
        alive = self.view.alive
        return sorted(rank for rank in alive - {self.rank} if not self._agrees(rank))

    def lose(self, rank: int, why: str, reason: str) -> None:
        """Give up a member.

        Args:
            rank: Rank of the member.
            why: Reason, which the others are told.
            reason: The same in a sentence that names the worker, for errors of this worker.
        """
        view = self.view
        if not self.is_member or rank == self.rank:
            return
        if rank in view.alive:
            self.view = replace(view, lost={**view.lost, rank: why}, is_changing=True)
            self._revoked.setdefault(view.epoch, reason)
        elif view.joining is not None:
            self.view = replace(view, joining=view.joining - {rank})
        self._settle()

    def invite(self, said: View) -> None:
        """Wait to join a membership, as a worker that was started again."""
        self.view = replace(said, joining=None)

    def admit(self, rank: int) -> None:
        """Let another worker join the next membership, if this member has to decide that: the leader."""
        view = self.view
        decides = self.is_member and view.joining is None and not view.is_changing and self.rank == view.leader
        if decides and rank not in view.members:
            self.view = replace(view, joining=frozenset({rank}))
            self.change(JOINED)

    def change(self, reason: str) -> None:
        """Wish for a new membership, whether or not a member is lost."""
        view = self.view
        if not view.is_changing:
            self.view = replace(view, is_changing=True)
            self._revoked.setdefault(view.epoch, reason)
            self._settle()

    def hear(self, source: int, said: View) -> dict[int, str]:
        """Take note of the view of another worker.

        Returns:
            The members that this worker must give up as well, each with the reason; the caller calls `lose` for each.
        """
        if source not in self.view.alive or self.excluded:
            return {}
        if not self.is_member:
            self._observe(said)
            return {}
        if said.epoch > self.view.epoch:
            self._follow(said)
        if said.epoch != self.view.epoch or self.excluded:
            return {}
        if self.rank in said.lost:
            self._exclude(said.lost[self.rank])
            return {}
        self._said[source] = said
        self._note_others(said)
        also_lost = {rank: why for rank, why in said.lost.items() if rank in self.view.alive}
        if said.is_changing and not also_lost:
            self.change(JOINED if said.joining else CHANGED)
        self._settle()
        return also_lost

    def _observe(self, said: View) -> None:
        """Follow the members as a worker that waits to join; enter if it has become a member."""
        if said.epoch > self.view.epoch:
            self.view = replace(said, joining=None, is_changing=bool(said.lost) and self.rank in said.members)
            self._said = {}

    def _note_others(self, said: View) -> None:
        """Take over who joins, and note whether all members have entered this membership."""
        view = self.view
        if said.joining is not None:
            joining = said.joining if view.joining is None else view.joining & said.joining
            view = replace(view, joining=joining)
        if view.voters is not None and self._said.keys() >= view.members - {self.rank}:
            view = replace(view, voters=None)
        if view != self.view:
            self.view = view

    def _follow(self, said: View) -> None:
        """Enter the epoch of a worker that has found all members of it agreed, this worker among them."""
        if self.rank not in said.members or said.epoch != self.view.epoch + 1:
            self._exclude(said.survived.get(self.rank, "they have agreed without it"))
        else:
            self._enter(said.members, said.voters, said.first)

    def _exclude(self, why: str) -> None:
        self.excluded = why
        self._revoked.setdefault(self.view.epoch, f"the others go on without this worker ({why})")

    def _agrees(self, rank: int) -> bool:
        said = self._said.get(rank)
        if said is None or not said.is_changing:
            return False
        return (said.alive, said.joining or None) == (self.view.alive, self.view.joining or None)

    def _settle(self) -> None:
        if self.view.is_changing and self.may_go_on and not self.awaited:
            view = self.view
            self._enter(view.next_members, view.alive if view.joining else None, view.leader)

    def _enter(self, members: frozenset[int], voters: frozenset[int] | None, first: int) -> None:
        """Begin the next epoch. Members that this worker has given up meanwhile stay so."""
        before = self.view
        gone = {rank: why for rank, why in before.lost.items() if rank not in members}
        lost = {rank: why for rank, why in before.lost.items() if rank in members}
        survived = {rank: why for rank, why in {**before.survived, **gone}.items() if rank not in members}
        eldest = None if first == min(members) else first
        self.view = View(before.epoch + 1, members, lost, bool(lost), survived, None, voters, eldest)
        self._said = {}
        why = self._revoked.setdefault(before.epoch, CHANGED)
        if lost:
            self._revoked[self.view.epoch] = why
