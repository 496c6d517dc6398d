"""Whether silent workers live: a stopped process still has a kernel that answers, a lost one has not."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from collectives.network.addresses import describe_os_error
from collectives.network.peer import Peer

if TYPE_CHECKING:
    from collectives.network.node import Node

BEAT_S = 0.5  # how often each worker tells all the others that it is there
LOST_AFTER_S = 6.0  # silent, and nobody answers at its address
_ANSWER_LIMIT_S = 1.0


class Liveness:
    """Watches over the other workers in a thread of its own.

    A broken connection tells of itself. A cut network does not: nothing comes any more, as from a process that is
    stopped by a debugger, by SIGSTOP or by too little memory. To tell them apart a new connection is tried, which
    the kernel of a stopped process accepts.
    """

    def __init__(self, node: Node) -> None:
        self._node = node

    def start(self) -> None:
        """Begin."""
        threading.Thread(target=self._watch, name="collectives-liveness", daemon=True).start()

    def _watch(self) -> None:
        while not self._node.is_leaving.wait(BEAT_S):
            for peer in self._node.peers.values():
                is_there = not (peer.has_left or peer.is_lost)
                if peer.is_silent and is_there and peer.is_being_probed.acquire(blocking=False):
                    name = f"collectives-probe-{peer.rank}"
                    threading.Thread(target=self._probe, args=(peer,), name=name, daemon=True).start()

    def _probe(self, peer: Peer) -> None:
        """Try connections until the worker is heard again or is known to be lost.

        Its name is not looked up again: whoever answers that may be behind the same cut.
        """
        assert peer.endpoint is not None
        silent_since = peer.heard_at
        answered_at = 0.0
        failed = 0
        try:
            while peer.heard_at == silent_since and not self._node.is_leaving.is_set():
                try:
                    peer.endpoint.connect(_ANSWER_LIMIT_S).close()
                    answered_at, failed = time.monotonic(), 0
                except OSError as error:
                    failed += 1
                    silent_s = time.monotonic() - max(silent_since, answered_at)
                    if silent_s > LOST_AFTER_S and failed > 2:
                        why = f"silent for {silent_s:.1f} s, and at its address: {describe_os_error(error)}"
                        self._node.lose(peer, why)
                        return
                self._node.is_leaving.wait(BEAT_S)
        finally:
            peer.is_being_probed.release()
