"""The admission of streams: each other worker is admitted once, at its own rank."""

from __future__ import annotations

import logging
from functools import cached_property

import grpc

from collectives.calls import foreign
from collectives.network import wire
from collectives.network.claims import taken
from collectives.network.hello import CONTROL, PROTOCOL, Hello, Refusal
from collectives.network.identity import Bearer, Runner
from collectives.network.peer import Peer
from collectives.network.security import TOKEN, is_same
from collectives.network.worker import Worker
from collectives.point_to_point.link import LANES

logger = logging.getLogger(__name__)

_LANES_OF_CHANNEL = {str(number) for number in range(LANES)}
_CHANNELS_AHEAD = 1024  # number of channels that a peer may begin before this worker does; each group has two
_REFUSALS_LOGGED = 100


def channel_of(lane: str) -> str:
    """Return the channel of a lane."""
    return lane.rpartition("/")[0]


class Admission:
    """The check of peers that begin a stream to a worker.

    Args:
        node: Worker that receives the streams.
    """

    def __init__(self, node: Worker) -> None:
        self._node = node
        self._refused: set[str] = set()

    @cached_property
    def rests_on_words(self) -> bool:
        """Whether peers are identified by their own claims alone: all addresses are local, without TLS and token."""
        node = self._node
        addresses = (node.address, *(peer.address for peer in node.peers.values()))
        is_open = node.security.certificates is None and not node.security.token
        return is_open and all(address.is_loopback() for address in addresses)

    def admit(self, context: grpc.ServicerContext) -> Hello:
        """Return the hello of the worker that begins this stream; abort the stream of any other process."""
        try:
            return self._identify(context)
        except Refusal as refusal:
            self._refuse(context, refusal)
            raise

    def _identify(self, context: grpc.ServicerContext) -> Hello:
        metadata = dict(context.invocation_metadata())
        text = metadata.get(wire.HELLO)
        if not isinstance(text, str):
            raise Refusal("it sent no hello, so it is not one of our workers")
        if not self._node.security.is_proof(metadata.get(wire.PROOF, ""), text):
            raise Refusal("its job token is not ours; set POPDIST_JOB_TOKEN to the same value everywhere")
        try:
            hello = Hello.decode(text)
        except ValueError as error:
            raise Refusal(f"its hello cannot be read: {error}") from error
        self._check(hello)
        self._check_host(hello.source, context)
        self._check_user(hello)
        with self._node.changed:
            self._check_place(hello, context)
        return hello

    def _check(self, hello: Hello) -> None:
        if hello.protocol != PROTOCOL:
            raise Refusal(f"it speaks version {hello.protocol}, but we speak {PROTOCOL}; install the same everywhere")
        if hello.cluster != self._node.cluster:
            raise Refusal(f"its cluster is not ours, which is {self._node.description}; give all workers the same one")
        if hello.source not in self._node.peers or hello.to != self._node.rank:
            raise Refusal(
                f"it is rank {hello.source} and looks for rank {hello.to}, but this is rank {self._node.rank}"
            )

    def _check_host(self, source: int, context: grpc.ServicerContext) -> None:
        """Require, with certificates, that the caller's certificate carries the host of the caller's worker."""
        if self._node.security.certificates is None:
            return
        host, bearer = self._node.peers[source].address.authority, Bearer.of(context.auth_context())
        if not bearer.is_for(host):
            raise Refusal(
                f"its certificate is for {foreign(bearer.hosts)}, and rank {source} is at {host}; give each worker a "
                "certificate that carries its own host"
            )

    def _check_user(self, hello: Hello) -> None:
        """Refuse a process of another user if nothing else tells two jobs at the same addresses apart."""
        ours = self._node.runner
        if self.rests_on_words and hello.user_id != ours.user_id:
            raise Refusal(
                f"it is {hello.runner.title}, and this worker is {ours.title}: jobs of two users at the same "
                f"addresses; take other ones, or set {TOKEN} to the same secret in all workers"
            )

    def _check_place(self, hello: Hello, context: grpc.ServicerContext) -> None:
        peer, name = self._node.peers[hello.source], f"rank {hello.source}"
        if hello.lane == CONTROL:
            peer = self._node.seat(hello.source)
        holder = peer.runner.title if peer.runner else ""
        if hello.lane == CONTROL:
            peer.claim.greet(hello.incarnation, name, holder)
            peer.runner, peer.cancel = hello.runner, context.cancel
            self._compare_programs(peer, hello.runner)
            return
        if not (peer.claim.is_held_by(hello.incarnation) and is_same(hello.heard, peer.drawn)):
            raise taken(name, holder)
        if hello.epoch < self._node.epoch:
            why = f"it comes from membership {hello.epoch}, but this is {self._node.epoch}"
            raise Refusal(why, is_final=False, is_usual=True)
        if hello.lane in peer.incoming:
            raise Refusal(f"{name} has begun that lane already")
        self._check_lane(peer, hello.lane)
        peer.incoming.add(hello.lane)

    def _compare_programs(self, peer: Peer, runner: Runner) -> None:
        """Warn if the peer runs another program and no token proves that both are one job; this is allowed."""
        node = self._node
        if not node.security.token and runner.program != node.runner.program:
            why = f"{node.runner.title}, and {peer.name} is {runner.title}"
            self.log(
                why,
                f"{node.names[node.rank]} is {why}: two programs; if these are two jobs, take other addresses, and if "
                f"they are one, set {TOKEN} to the same secret in all workers",
            )

    def _check_lane(self, peer: Peer, lane: str) -> None:
        """Refuse unknown lanes, and channels too far ahead of this worker's channels."""
        channel, _, number = lane.rpartition("/")
        if number not in _LANES_OF_CHANNEL:
            raise Refusal("there is no such lane")
        if channel not in self._node.channels:
            ahead = {channel_of(lane) for lane in peer.incoming} - self._node.channels
            if len(ahead | {channel}) > _CHANNELS_AHEAD:
                raise Refusal("it opens too many lanes")

    def _refuse(self, context: grpc.ServicerContext, refusal: Refusal) -> None:
        """Report the reason on both sides, and abort the stream; does not return."""
        line = f"{self._node.names[self._node.rank]} refused {context.peer()}: {refusal.reason}"
        logger.debug("%s", line) if refusal.is_usual else self.log(refusal.reason, line)
        context.set_trailing_metadata(((wire.REFUSAL, "1"),))
        context.abort(wire.REFUSED if refusal.is_final else wire.NOT_YET, refusal.reason)

    def log(self, reason: str, line: str) -> None:
        """Log the line, as a warning the first time that this reason occurs."""
        with self._node.changed:
            is_new = reason not in self._refused and len(self._refused) < _REFUSALS_LOGGED
            self._refused.add(reason) if is_new else None
        logger.log(logging.WARNING if is_new else logging.DEBUG, "%s", line)
