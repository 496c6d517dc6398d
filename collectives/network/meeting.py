"""The meeting of workers, which may start in any order."""

from __future__ import annotations

import logging
import ssl
import threading
from typing import Any

from collectives.calls import foreign
from collectives.errors import CollectiveTimeoutError, PeerRefusedError
from collectives.network import wire
from collectives.network.addresses import describe_os_error
from collectives.network.peer import Peer
from collectives.network.worker import Worker

logger = logging.getLogger(__name__)

_ATTEMPT_S = 1.0
_ANSWER_LIMIT_S = 10.0  # real time; a peer that is only slow is called again
_PAUSE_S = 0.1
_FIRST_NEWS_S = 2.0
_NEWS_EVERY_S = 10.0
_LINGER_S = 1.0


class Meeting:
    """The repeated calls to all other workers, until streams lead both ways.

    A worker that is refused by an earlier one is in the wrong place and ends. The earlier one logs the event and waits
    for the right worker. It also goes on waiting if a process that is no worker answers at an address.
    """

    def __init__(self, node: Worker) -> None:
        self._node = node
        self._over = threading.Event()
        self._refusal: PeerRefusedError | None = None
        self._told: set[tuple[int, str]] = set()

    def hold(self) -> None:
        """Wait until all workers have met.

        Raises:
            PeerRefusedError: This worker is in the wrong place.
            CollectiveTimeoutError: `connect_timeout_s` have passed.
        """
        for peer in self._node.peers.values():
            name = f"collectives-call-{peer.rank}"
            threading.Thread(target=self.call, args=(peer, False), name=name, daemon=True).start()
        try:
            self._await_all()
        except PeerRefusedError:
            self._node.clock.wait(self._over, _LINGER_S)  # so that callers of this worker learn of the refusal
            raise
        finally:
            self._over.set()

    def _await_all(self) -> None:
        node = self._node
        started = node.clock.now_s()
        next_news = started + _FIRST_NEWS_S
        limit_s = node.limits.connect_timeout_s
        with node.changed:
            while missing := [peer for peer in node.awaited if not peer.is_connected]:
                if self._refusal is not None:
                    raise self._refusal
                now = node.clock.now_s()
                facts = f"{node.names[node.rank]} has waited {now - started:.0f} s for {_describe(missing)}"
                if now - started > limit_s:
                    raise CollectiveTimeoutError(f"{facts}: gave up after connect_timeout_s = {limit_s:g}")
                if now >= next_news:
                    next_news = now + _NEWS_EVERY_S
                    logger.warning("%s", facts)
                pause_s = max(0.01, min(next_news, started + limit_s) - now)
                node.clock.wait_for(node.changed, self._is_decided, pause_s)
            node.is_met = True
            for peer in node.peers.values():
                if peer.is_here and not peer.is_connected:  # it waits to join as well
                    node.call(peer)

    def _is_decided(self) -> bool:
        return self._refusal is not None or all(peer.is_connected for peer in self._node.awaited)

    def call(self, peer: Peer, once: bool = True) -> None:
        """Call a worker until the meeting is over, or `once`: until it answers or is gone."""
        with peer.is_being_called:  # a second connection would end the first one
            while not (self._over.is_set() or peer.is_lost or self._node.is_leaving.is_set()):
                if not peer.has_welcomed:
                    self._try_once(peer)
                elif once:
                    break
                self._node.clock.wait(self._over, _PAUSE_S)

    def _try_once(self, peer: Peer) -> None:
        certificates = self._node.security.certificates
        try:
            endpoint = peer.address.reach(_ATTEMPT_S)
        except OSError as error:
            self._note_first_contact(peer, False)
            peer.trouble = describe_os_error(error)
            return
        self._note_first_contact(peer, True)
        try:
            if certificates is not None:
                endpoint.shake_hands(_ATTEMPT_S, certificates.client_context, peer.address.authority)
        except ssl.SSLError as error:
            self._refused(peer, f"the certificates do not fit ({describe_os_error(error)})")
            return
        except OSError as error:
            peer.trouble = describe_os_error(error)
            return
        if peer.channel is not None:
            peer.channel.close()
        peer.endpoint = endpoint
        peer.channel = wire.open_channel(endpoint, peer.address, certificates)
        self._introduce(peer)

    @staticmethod
    def _note_first_contact(peer: Peer, is_there: bool) -> None:
        if peer.was_there_first is None:
            peer.was_there_first = is_there

    def _introduce(self, peer: Peer) -> None:
        node = self._node
        call: Any = node.begin_control(peer)
        welcome = _answer_of(call)
        if wire.WELCOME not in welcome:
            if call.cancelled():
                peer.trouble = f"the process there has not answered for {_ANSWER_LIMIT_S:g} s"
            elif wire.REFUSAL not in dict(call.trailing_metadata() or ()):
                peer.trouble = f"the process there does not answer as a worker: {foreign(call.details() or '')}"
            elif call.code() is wire.REFUSED:
                self._refused(peer, foreign(call.details() or ""))
            else:
                peer.trouble = foreign(call.details() or "")
            return
        digest = str(welcome[wire.WELCOME])
        proof = welcome.get(wire.PROOF, "")
        if not node.security.is_proof(proof, f"{digest} welcomes {peer.drawn}"):
            call.cancel()
            # A worker without a token sends no proof. A worker with another token would have refused our hello.
            self._refused(peer, "the process there does not know our job token", is_worker=not proof)
            return
        if view := welcome.get(wire.VIEW):
            try:
                node.take_view(str(view))
            except ValueError as error:
                call.cancel()
                self._refused(peer, f"the process there does not answer as a worker: {error}", is_worker=False)
                return
        node.take_answer(peer, digest, call)
        node.watch_control(peer)

    def _refused(self, peer: Peer, reason: str, is_worker: bool = True) -> None:
        """Handle a refusal between this worker and the process at the address of `peer`."""
        peer.trouble = reason
        facts = f"{self._node.names[self._node.rank]} was refused by {peer.name}: {reason}"
        if peer.was_there_first and is_worker:
            with self._node.changed:
                self._refusal = self._refusal or PeerRefusedError(facts)
                self._node.changed.notify_all()
        elif (peer.rank, reason) not in self._told:
            self._told.add((peer.rank, reason))
            logger.warning("%s; this worker goes on waiting for the right one", facts)


def _answer_of(call: Any) -> dict[str, Any]:
    """Return the peer's initial metadata. Cancel the call if none comes in time, e.g. from a host that has vanished."""
    limit = threading.Timer(_ANSWER_LIMIT_S, call.cancel)
    limit.daemon = True
    limit.start()
    try:
        return dict(call.initial_metadata() or ())
    finally:
        limit.cancel()


def _describe(missing: list[Peer]) -> str:
    """List the missing workers with reasons: `worker 1 at localhost:3738 (connection refused)`."""
    return ", ".join(f"{peer.name} ({_state(peer)})" for peer in missing)


def _state(peer: Peer) -> str:
    if not peer.has_welcomed:
        return peer.trouble
    if peer.is_here:
        return "it answers, but another process has said hello in its name"
    return "it answers, but has not reached this worker yet"
