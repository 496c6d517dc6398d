"""One worker: its server, the streams from and to all other workers, and the detection of losses."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import grpc
from typing_extensions import override

from collectives.calls import MOST_OF_PEERS, foreign
from collectives.errors import PeerRefusedError
from collectives.network import wire
from collectives.network.addresses import describe_os_error
from collectives.network.admission import Admission, channel_of
from collectives.network.claims import digest_incarnation
from collectives.network.hello import CONTROL, PROTOCOL, Hello, Refusal
from collectives.network.identity import other_users
from collectives.network.lanes import Bell, Inbox, Outbox
from collectives.network.liveness import BEAT_S, PeerWatch
from collectives.network.meeting import Meeting
from collectives.network.peer import Peer
from collectives.network.recovery import Recovery
from collectives.network.security import TOKEN
from collectives.network.worker import Worker

logger = logging.getLogger(__name__)

LEAVE_LIMIT_S = 10.0  # time limit for the other workers to receive the last messages
GOODBYE = b"goodbye "  # the last beat of a worker that leaves in order; the reason follows
FINISHED = b"finished"  # the last beat of a worker if all workers have closed their communicators
_AWAY_S = 5.0  # a leaving worker does not wait for a worker that has been silent this long
_CLOSE_LIMIT_S = 0.5  # time limit for closing the connections
_FIRST_STREAMS_LIMIT_S = 1.0  # time limit for opening the first lanes; after it the worker goes on without them
_LANES_PER_PEER = 4096
_USERS_NAMED = 3
_FAREWELL_BYTES = 2048
_STRANGERS = 64  # additional streams, and connections, for processes that are no workers; they are soon refused
_CONNECTIONS_PER_PEER = 4  # the permanent one, an attempt to reach the peer, a test of certificates, a liveness probe


class Node(Worker):
    """A worker of this process with all of its parts. Call `join` first.

    Attributes:
        admission: Check of peers that begin streams.
        recovery: Way from the loss of a worker to the next membership; None if no worker goes on after a loss.
        group: Name of the group of all workers that are left. If it is closed, this worker leaves.
        has_finished: Whether all workers have closed that group.
        may_reconnect: Whether this worker could not close it because of a loss, and may go on with the others.
    """

    admission: Admission
    recovery: Recovery | None = None
    group = ""
    has_finished = False
    may_reconnect = False
    _server: grpc.Server | None = None

    # ---- the beginning

    def join(self) -> None:
        """Listen, and return when streams connect this worker with all others, both ways.

        If it fails, the worker has left and its resources are released.

        Raises:
            SecurityError: Plaintext would leave this machine, or any user could join in the place of a lost worker.
            PeerRefusedError: Another worker refuses this one, or this machine cannot use the address.
            CollectiveTimeoutError: Some workers did not come within `connect_timeout_s`.
        """
        self._bells: dict[str, Bell] = {}
        self._inboxes: dict[tuple[int, str], Inbox] = {}
        self.admission = Admission(self)
        self.recovery = Recovery(self) if self.shrinks else None
        self.address, *others = self.security.check([self.address, *(peer.address for peer in self.peers.values())])
        if self.shrinks:
            self.security.check_rejoining([self.address, *others])
        for peer, address in zip(self.peers.values(), others, strict=True):
            peer.address = address
        self._warn_of_others()
        try:
            self._listen()
            Meeting(self).hold()
        except BaseException:
            self.leave()
            raise
        PeerWatch(self).start()

    def _warn_of_others(self) -> None:
        if self.peers and not self.address.path and self.admission.rests_on_words and (others := other_users()):
            names = ", ".join(others[:_USERS_NAMED]) + (", ..." if len(others) > _USERS_NAMED else "")
            logger.warning(
                "%s listens where other users of this machine (%s) can connect, and could take the place of a worker "
                "that has not come yet; set %s to the same secret in all workers",
                self.names[self.rank],
                names,
                TOKEN,
            )

    def _listen(self) -> None:
        count = len(self.peers)
        room = wire.Room(_STRANGERS + _LANES_PER_PEER * count, _STRANGERS + _CONNECTIONS_PER_PEER * count)
        try:
            self._server = wire.open_server(self.address, self.security.certificates, _Handlers(self), room)
        except OSError as error:
            raise PeerRefusedError(
                f"{self.names[self.rank]} cannot listen there: {describe_os_error(error)}; is another process using "
                "that address, or does it belong to another machine?"
            ) from error
        self._server.start()

    # ---- lanes

    def bell(self, channel: str) -> Bell:
        """Return the bell of a channel's lanes; from now on this worker uses the channel."""
        with self.changed:
            self.channels.add(channel)
            return self._bells.setdefault(channel, Bell())

    def inbox(self, rank: int, lane: str) -> Inbox:
        """Return the inbox of one lane from another worker."""
        with self.changed:
            bell = self._bells.setdefault(channel_of(lane), Bell())
            return self._inboxes.setdefault((rank, lane), Inbox(bell))

    def outbox(self, rank: int, lane: str, epoch: int = 0) -> Outbox:
        """Return the outbox of one lane to another worker, and open its stream."""
        peer = self.peers[rank]
        outbox = Outbox(self.bell(channel_of(lane)))
        call = self._begin(peer, wire.LANE_METHOD, outbox, lane, epoch)
        peer.outboxes[lane] = (outbox, call)
        call.add_done_callback(lambda done: None if outbox.is_dropped else self._outgoing_ended(peer, done))
        return outbox

    def await_streams(self, lanes: set[str]) -> None:
        """Wait a limited time until all present workers have begun to send on these lanes."""

        def have_begun() -> bool:
            return all(lanes <= peer.incoming or peer.has_left or peer.is_lost for peer in self.peers.values())

        with self.changed:
            self.clock.wait_for(self.changed, have_begun, _FIRST_STREAMS_LIMIT_S)

    def _begin(self, peer: Peer, method: str, messages: Iterable[bytes], lane: str, epoch: int = 0) -> grpc.Future:
        assert peer.channel is not None
        heard = "" if lane == CONTROL else peer.claim.incarnation
        places = (PROTOCOL, self.cluster, self.rank, peer.rank, peer.drawn, lane, heard)
        of_this = Hello(*places, **asdict(self.runner), epoch=epoch)
        hello = of_this.encode()
        metadata = ((wire.HELLO, hello), (wire.PROOF, self.security.prove(hello)))
        call: grpc.Future = peer.channel.stream_unary(method).future(iter(messages), metadata=metadata)
        return call

    def begin_control(self, peer: Peer) -> grpc.Future:
        """Open the control stream to a worker, which sends beats from now on."""
        peer.has_news = threading.Event()  # of this stream alone: an earlier one may not have ended yet
        return self._begin(peer, wire.CONTROL_METHOD, self._beats(peer.has_news), CONTROL)

    def _beats(self, has_news: threading.Event) -> Iterator[bytes]:
        yield b""
        while not self.is_leaving.is_set():
            self.clock.wait(has_news, BEAT_S)
            has_news.clear()
            yield b"" if self.recovery is None else self.recovery.beat()
        yield FINISHED if self.has_finished else GOODBYE + self.loss.encode()[:_FAREWELL_BYTES]

    def end_lanes(self, prefix: str, limit_s: float = LEAVE_LIMIT_S) -> None:
        """Send the remaining messages of a group's lanes, then end the lanes."""
        calls = []
        for peer, outbox, call in self._pop_outboxes(prefix):
            outbox.end()
            calls.append((peer, call))
        self._close_inboxes(prefix)
        self._await_end(calls, limit_s)

    def drop_lanes(self, prefix: str) -> None:
        """End the lanes of a group whose members have gone on without it; messages that are under way are lost."""
        for _, outbox, call in self._pop_outboxes(prefix):
            outbox.is_dropped = True
            outbox.end()
            call.cancel()
        self._close_inboxes(prefix)

    def _pop_outboxes(self, prefix: str) -> list[tuple[Peer, Outbox, grpc.Future]]:
        return [
            (peer, *peer.outboxes.pop(lane))
            for peer in self.peers.values()
            for lane in [lane for lane in peer.outboxes if lane.startswith(prefix)]
        ]

    def _close_inboxes(self, prefix: str) -> None:
        with self.changed:
            inboxes = [inbox for (_, lane), inbox in self._inboxes.items() if lane.startswith(prefix)]
        for inbox in inboxes:
            inbox.close()

    def _await_end(self, calls: Sequence[tuple[Peer, grpc.Future]], limit_s: float) -> None:
        give_up = self.clock.now_s() + limit_s
        for peer, call in calls:
            while not (call.done() or peer.is_lost or peer.silent_s > _AWAY_S or self.clock.now_s() > give_up):
                try:
                    call.exception(timeout=BEAT_S)
                except grpc.FutureTimeoutError:
                    continue
                except grpc.FutureCancelledError:
                    break

    # ---- the end

    def leave(self) -> None:
        """Send remaining messages, say goodbye, and close everything; wait a limited time for present workers."""
        if self.is_leaving.is_set():
            return
        give_up = self.clock.now_s() + LEAVE_LIMIT_S
        self.end_lanes("")
        self.is_leaving.set()
        self._end_pauses_of_beats()
        controls = [(peer, peer.control) for peer in self.peers.values() if peer.control and peer.is_connected]
        self._await_end(controls, give_up - self.clock.now_s())
        if self._server is not None:
            self._server.stop(None)
        self._close_channels()

    def _close_channels(self) -> None:
        """Close the connections, in threads: gRPC waits until the network has taken all data.

        A cut network or a stopped worker never takes it. Connections that are still open after the limit end with the
        process.
        """
        closings = [
            threading.Thread(target=peer.channel.close, name=f"collectives-close-{peer.rank}", daemon=True)
            for peer in self.peers.values()
            if peer.channel is not None
        ]
        try:
            for closing in closings:
                closing.start()
        except RuntimeError:  # at interpreter exit, Python 3.12.0 and 3.12.1 start no threads
            return
        give_up = self.clock.now_s() + _CLOSE_LIMIT_S
        for closing in closings:
            closing.join(max(0.0, give_up - self.clock.now_s()))

    def lost(self, awaited: Iterable[int], members: Collection[int], epoch: int = 0) -> str:
        """Return why waiting is useless, or "".

        Args:
            awaited: Ranks for which the caller waits.
            members: Ranks without which the group cannot continue.
            epoch: Number of the membership to which the group belongs.
        """
        if self.recovery is not None and (why := self.recovery.agreement.why_revoked(epoch)):
            return why
        if any(member in self.losses for member in members):
            return next(iter(self.losses.values()))
        for rank in awaited:
            peer = self.peers[rank]
            if peer.has_left:
                return f"{peer.name} has left{peer.farewell and ' because '}{peer.farewell}"
        return ""

    def lose(self, peer: Peer, why: str) -> None:
        """Note that a worker is lost or violates the protocol."""
        with self.changed:
            if peer.is_lost or peer.has_left or self.is_leaving.is_set():
                return
            peer.is_lost = peer.claim.is_over = True
            self.losses = {**self.losses, peer.rank: f"{peer.name} is lost: {why}"}
            if self.recovery is not None:
                self.recovery.lose(peer, why)
            self.changed.notify_all()
        logger.debug("%s: %s is lost: %s", self.names[self.rank], peer.name, why)
        self.tell_change()

    # ---- incoming streams

    def take_answer(self, peer: Peer, digest: str, control: grpc.Future) -> None:
        """Note the welcome of the worker at the address of `peer`; send away a different process with its name."""
        with self.changed:
            peer.control = control
            is_wrong = peer.claim.answer(digest)
            cancel, runner = peer.cancel, peer.runner
            if is_wrong:
                peer.is_here, peer.cancel, peer.runner = False, None, None
            self.changed.notify_all()
        if is_wrong and cancel is not None and runner is not None:
            why = f"{runner.title} said hello as rank {peer.rank}, and another process listens at its address"
            self.admission.log(why, f"{self.names[self.rank]} sent a process away: {why}")
            cancel()

    def listen_to(self, peer: Peer, incarnation: str, beats: Iterator[bytes], welcome: Callable[[], None]) -> None:
        """Welcome a worker and receive its beats until the stream ends."""
        last = b""
        try:
            welcome()
            with self.changed:
                peer.is_here = peer.claim.is_held_by(incarnation)
                peer.hear()
                if self.is_met:
                    self.call(peer)
                self.changed.notify_all()
            for beat in beats:
                if not peer.claim.is_held_by(incarnation):
                    break  # the process was sent away
                peer.hear()
                last = beat
                if self.recovery is not None:
                    self.recovery.hear(peer, beat)
        except Exception as error:  # gRPC raises various errors for a broken connection, or just ends the iterator
            logger.debug("%s: the stream of %s ended: %r", self.names[self.rank], peer.name, error)
        if not self._is_over(peer, incarnation):
            return
        if last.startswith((GOODBYE, FINISHED)):
            self._take_leave(peer, last)
        else:
            self.lose(peer, "its connection broke")

    def _is_over(self, peer: Peer, incarnation: str) -> bool:
        """Return whether the worker itself is gone; if it goes before all have met, its place is free again."""
        with self.changed:
            is_worker = peer.claim.is_held_by(incarnation)
            if is_worker and self.is_met:
                peer.claim.is_over = True
                return True
            if is_worker:
                peer.claim.leave(incarnation)
                peer.is_here, peer.cancel, peer.runner = False, None, None
                peer.incoming.clear()
                self.changed.notify_all()
            return False

    def _take_leave(self, peer: Peer, last: bytes) -> None:
        farewell = last.removeprefix(GOODBYE).removeprefix(FINISHED)
        with self.changed:
            peer.farewell = foreign(farewell[:_FAREWELL_BYTES].decode(errors="replace"), MOST_OF_PEERS)
            peer.has_finished = last == FINISHED
            if self.recovery is not None and not peer.has_finished:
                self.lose(peer, f"its program has failed or ended early{peer.farewell and ' because '}{peer.farewell}")
            peer.has_left = True
            self.changed.notify_all()
        self._ring_all()

    @override
    def tell_change(self) -> None:
        self._ring_all()
        if self.recovery is not None:
            self._end_pauses_of_beats()

    def _ring_all(self) -> None:
        with self.changed:
            bells = list(self._bells.values())
        for bell in bells:
            bell.ring()

    def _end_pauses_of_beats(self) -> None:
        for peer in self.peers.values():
            peer.has_news.set()

    def _outgoing_ended(self, peer: Peer, call: Any) -> None:
        if call.code() not in (grpc.StatusCode.OK, wire.NOT_YET):  # not yet: it has gone on to the next membership
            self.lose(peer, f"its connection broke ({foreign(call.details() or '')})")

    @override
    def call(self, peer: Peer) -> None:
        peer = self._renewed(peer) if peer.is_lost else peer
        threading.Thread(target=Meeting(self).call, args=(peer,), daemon=True).start()

    @override
    def seat(self, rank: int) -> Peer:
        peer = self.peers[rank]
        if self.recovery is None or not (self.is_met and peer.is_lost):
            return peer
        if not self.recovery.is_free(rank):
            raise Refusal(f"the others have not gone on without {peer.name} yet", is_final=False)
        return self._renewed(peer)

    def _renewed(self, lost: Peer) -> Peer:
        """Forget a lost worker, in whose place another process comes."""
        self.peers[lost.rank] = Peer(lost.rank, lost.name, lost.address, self.clock)
        self.losses = {rank: why for rank, why in self.losses.items() if rank != lost.rank}
        return self.peers[lost.rank]

    @property
    @override
    def awaited(self) -> list[Peer]:
        members = self.peers if self.recovery is None else self.recovery.agreement.view.members
        return [peer for peer in self.peers.values() if peer.rank in members]

    @override
    def take_view(self, view: str) -> None:
        if self.recovery is not None and not self.is_met:
            with self.changed:
                self.recovery.be_invited(view.encode())

    def watch_control(self, peer: Peer) -> None:
        """Detect the end of the control stream to a worker."""
        assert peer.control is not None
        peer.control.add_done_callback(lambda done: self._control_ended(peer, done))

    def _control_ended(self, peer: Peer, call: Any) -> None:
        if self.is_met:
            self._outgoing_ended(peer, call)
            return
        with self.changed:
            peer.claim.hang_up()
            self.changed.notify_all()


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]  # gRPC has no types
    """The handlers of the server's streams."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if details.method == wire.CONTROL_METHOD:
            return grpc.stream_unary_rpc_method_handler(self._control)
        if details.method == wire.LANE_METHOD:
            lane = _Lane(self._node)
            return grpc.stream_unary_rpc_method_handler(lane.serve, request_deserializer=lane.deliver)
        return None

    def _control(self, beats: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        node = self._node
        hello = node.admission.admit(context)
        peer = node.peers[hello.source]
        digest = digest_incarnation(peer.drawn)
        proof = node.security.prove(f"{digest} welcomes {hello.incarnation}")
        view = node.recovery.encoded_view if node.recovery is not None and node.is_met else b""
        words = ((wire.WELCOME, digest), (wire.PROOF, proof), *(((wire.VIEW, view.decode()),) if view else ()))
        answer = partial(context.send_initial_metadata, words)
        node.listen_to(peer, hello.incarnation, beats, answer)
        return b""


class _Lane:
    """The handler of one incoming lane.

    gRPC's own thread delivers a message, and wakes the waiting thread of the program without one more thread between
    them. The thread of the stream only requests the next message.
    """

    def __init__(self, node: Node) -> None:
        self._node = node

    def serve(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """Admit the stream, and request its messages until it ends."""
        node = self._node
        hello = node.admission.admit(context)
        self._peer = node.peers[hello.source]
        self._inbox = node.inbox(self._peer.rank, hello.lane)
        with node.changed:
            node.changed.notify_all()
        try:
            for _ in messages:
                self._inbox.await_room()
        except Exception as error:
            logger.debug("lane %s of %s ended: %r", foreign(hello.lane), self._peer.name, error)
        return b""

    def deliver(self, message: bytes) -> bytes:
        """Put a message into its inbox; `serve` has requested it, and gets an empty one."""
        self._peer.hear()
        self._inbox.put(message)
        return b""
