"""The recovery of a worker: from the loss of another one to the next membership."""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import partial

from collectives.errors import ClosedError, CollectiveTimeoutError, PeerLostError
from collectives.network.peer import Peer
from collectives.network.survivors import CHANGED, VIEW, Agreement, View
from collectives.network.worker import Worker

logger = logging.getLogger(__name__)

READY = b"ready "  # the beat of a worker that was started again; the number of results follows that it has read

_DIGITS = 16
_LAST_NEWS_S = 1.0  # a worker whose part is too small waits this long for news that others have taken it along
_LOOK_EVERY_S = 0.5


class Recovery:
    """The part of a worker that agrees with the others on who is left.

    The threads that receive beats do the work, so the other workers need not wait for this one's program.

    Args:
        node: This worker.

    Attributes:
        agreement: Agreement with the other workers; guarded by `node.changed`.
        has_read: The number of results after which this worker, which was started again, may join; 0: not yet.
    """

    def __init__(self, node: Worker) -> None:
        self.agreement = Agreement(node.rank, range(len(node.names)))
        self._node = node
        self.has_read = 0
        self._joining: dict[int, int] = {}  # for each worker that is about to join, its first membership
        self._reported: set[int] = set()
        self._brought_up: Peer | None = None

    def beat(self) -> bytes:
        """Return the next beat to the other workers: the view of a member, or the progress of one that may join."""
        if self.agreement.is_member:
            return self.encoded_view
        is_ready = self.has_read and all(peer.is_connected for peer in self._node.awaited)
        return b"%s%d" % (READY, self.has_read) if is_ready else b""

    @property
    def encoded_view(self) -> bytes:
        """The view of this worker; empty if it is no member, or if nothing has happened yet."""
        view = self.agreement.view
        return view.encode() if self.agreement.is_member and (view.epoch or view.is_changing) else b""

    def lose(self, peer: Peer, why: str) -> None:
        """Give up a worker; the caller holds the lock."""
        self.agreement.lose(peer.rank, why, self._node.losses[peer.rank])
        self.note()

    def is_free(self, rank: int) -> bool:
        """Return whether the members have gone on without this worker, so that it may be started again."""
        view = self.agreement.view
        return rank not in view.members | view.next_members

    @property
    def joiner(self) -> Peer | None:
        """The worker that was started again and joins next, if this worker is the one that brings it up.

        Others that were started again wait until it has joined or is gone.
        """
        agreement, peers = self.agreement, self._node.peers.values()
        if not agreement.is_member or self._node.rank != agreement.view.leader:
            return None
        waiting = [each for each in peers if each.is_connected and not each.is_lost and self.is_free(each.rank)]
        if self._brought_up not in waiting:
            self._brought_up = next(iter(waiting), None)
        return self._brought_up

    def be_invited(self, beat: bytes) -> None:
        """Wait to join workers that work already; the caller holds the lock.

        Raises:
            ValueError: The beat is not a view.
        """
        said = View.decode(beat)
        if self.agreement.is_member or said.epoch > self.agreement.view.epoch:
            self.agreement.invite(said)
            self._reported = set(said.survived)
            self.note()

    def hear(self, peer: Peer, beat: bytes) -> None:
        """Compare the view of another worker with our own, and give up the workers that it has given up."""
        node, agreement = self._node, self.agreement
        if beat.startswith(READY):
            number = beat.removeprefix(READY)
            peer.has_read = int(number) if number.isdigit() and len(number) < _DIGITS else 0
        if not beat.startswith(VIEW):
            return
        try:
            said = View.decode(beat)
        except ValueError as error:
            node.lose(peer, f"it sent {error}")
            return
        with node.changed:
            before = (agreement.view, agreement.excluded)
            others_lost = agreement.hear(peer.rank, said)
            self.note()
            for rank, why in others_lost.items():
                node.lose(node.peers[rank], why)
            for other in node.peers.values():
                if other.is_lost and other.rank in agreement.view.alive:  # it joins, and was lost here before
                    self.lose(other, "its connection broke")
            has_changed = (agreement.view, agreement.excluded) != before
            if node.is_met and not agreement.is_member:
                for rank in agreement.view.members - before[0].members:  # they have joined since it met the others
                    node.call(node.peers[rank])
        if has_changed:
            node.tell_change()

    def let_join(self, entries: int) -> None:
        """Let the waiting worker join if this worker feeds it, and if it has read `entries` results at least."""
        node = self._node
        with node.changed:
            view, joiner = self.agreement.view, self.joiner
            if joiner is not None and joiner.has_read >= entries:
                self.agreement.admit(joiner.rank)
                self.note()
        if self.agreement.view is not view:
            node.tell_change()

    def have_joined(self, epoch: int) -> None:
        """Note that all members of the membership with this number have worked together."""
        if self._joining:
            with self._node.changed:
                self._joining = {rank: first for rank, first in self._joining.items() if first > epoch}

    def give_up_joining(self) -> bool:
        """Give up the workers that are about to join, after a wait of `timeout_s`; return whether there were any."""
        node = self._node
        with node.changed:
            late = [node.peers[rank] for rank in self._joining.keys() & self.agreement.view.alive - {node.rank}]
        for peer in late:
            node.lose(peer, f"it has not joined within timeout_s = {node.limits.timeout_s:g}")
        return bool(late)

    def note(self) -> None:
        """Take over the result of the agreement; the caller holds the lock."""
        node, view = self._node, self.agreement.view
        joining = dict.fromkeys(view.members - (view.voters or view.members), view.epoch) | self._joining
        self._joining = {rank: first for rank, first in joining.items() if rank in view.members}
        node.epoch = view.epoch if self.agreement.is_member else 0
        node.survived = frozenset(view.survived)
        node.changed.notify_all()

    def survive(self, epoch: int) -> View:
        """Wait until the workers that are left have agreed on a membership after the one with number `epoch`.

        Raises:
            ClosedError: All workers have finished, so there is nothing to go on with.
            PeerLostError: The others go on without this worker, or too few are left.
            CollectiveTimeoutError: Some worker has not agreed within `timeout_s`.
        """
        node, agreement, clock = self._node, self.agreement, self._node.clock
        started, alive = clock.now_s(), agreement.view.alive
        too_few_since: float | None = None
        with node.changed:
            if agreement.view.epoch == epoch:
                agreement.change(CHANGED)
                self.note()
                node.tell_change()
            while True:
                view, now = agreement.view, clock.now_s()
                if now - started > node.limits.timeout_s and self.give_up_joining():
                    continue
                if view.alive != alive:  # a loss is news, after which the others may agree
                    started, alive = now, view.alive
                self._refuse(now - started)
                if view.epoch > epoch and not view.is_changing:
                    self._report(view)
                    return view
                too_few_since = None if agreement.may_go_on else (too_few_since or now)
                if too_few_since is not None and now - too_few_since >= _LAST_NEWS_S:
                    raise PeerLostError(self._why_too_few())
                clock.wait_for(node.changed, partial(self._has_news_since, view), _LOOK_EVERY_S)

    def _report(self, view: View) -> None:
        """Warn of each worker that was lost since the last report."""
        new = [rank for rank in view.survived if rank not in self._reported]
        joined = self._reported & view.members
        self._reported = self._reported.difference(joined).union(new)
        verb = "goes" if len(view.members) == 1 else "go"
        for rank in new:
            why = f"{self._node.names[rank]} is lost: {view.survived[rank]}"
            logger.warning("%s; %s %s on without it", why, self.named(view.members), verb)
        for rank in sorted(joined - {self._node.rank}):
            logger.warning("%s has joined again", self._node.names[rank])

    def _has_news_since(self, view: View) -> bool:
        return self.agreement.view is not view or bool(self.agreement.excluded) or self._have_finished()

    def _have_finished(self) -> bool:
        peers = self._node.peers
        return any(peers[rank].has_finished for rank in self.agreement.view.alive if rank in peers)

    def _refuse(self, waited_s: float) -> None:
        """Raise if this worker cannot go on."""
        node, limit_s = self._node, self._node.limits.timeout_s
        if why := self.agreement.excluded:  # first: the others may have finished without this worker
            raise PeerLostError(f"{node.names[node.rank]} cannot go on: the others go on without it ({why})")
        if self._have_finished():
            raise ClosedError("all workers have finished, so none goes on")
        if waited_s > limit_s:
            raise CollectiveTimeoutError(
                f"{node.names[node.rank]} has waited {waited_s:.3g} s for {self.named(self.agreement.awaited)} to "
                f"agree on who is left: gave up after timeout_s = {limit_s:g}"
            )

    def _why_too_few(self) -> str:
        view = self.agreement.view
        losses = "; ".join(f"{self._node.names[rank]} is lost: {why}" for rank, why in view.lost.items())
        return (
            f"{losses}. {self.named(view.alive)} cannot go on: {len(view.alive)} of {len(view.members)} workers are "
            f"left, and only more than half of them go on, or half with {self._node.names[view.first]}; "
            "otherwise both parts of a cut network would. Start all workers again"
        )

    def named(self, ranks: Collection[int]) -> str:
        """Return the names of workers for messages."""
        return ", ".join(self._node.names[rank] for rank in sorted(ranks))
