"""The detection of lost workers: the kernel of a stopped process still answers; for a lost worker nothing answers."""

from __future__ import annotations

import threading

from collectives.network.addresses import describe_os_error
from collectives.network.peer import Peer
from collectives.network.worker import Worker

BEAT_S = 0.5  # interval of the beats that each worker sends to all others
LOST_AFTER_S = 6.0  # a worker with a longer silence is lost if its address does not answer either
FAILURES = 3  # number of attempts that must fail, because this worker may have been stopped itself
_SILENCE_S = 2.0  # several times the interval of beats: the worker may be stopped or lost
_ANSWER_LIMIT_S = 1.0
_LONGEST_PAUSE_S = 2.0  # between two attempts; after a longer one this worker was stopped itself


class PeerWatch:
    """A thread that watches the other workers.

    A broken connection reports itself; a cut network does not. Then nothing arrives, as from a process that is stopped
    by a debugger, by SIGSTOP or by lack of memory. To tell these cases apart, a new connection is tried: the kernel of
    a stopped process accepts it. The others wait for such a process. If they may go on without it, they wait no longer
    than `stall_warning_s`.
    """

    def __init__(self, node: Worker) -> None:
        self._node = node
        self._stopped_after_s = max(LOST_AFTER_S, node.limits.stall_warning_s)

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._watch, name="collectives-liveness", daemon=True).start()

    def _watch(self) -> None:
        while not self._node.clock.wait(self._node.is_leaving, BEAT_S):
            for peer in self._node.peers.values():
                is_there = peer.endpoint is not None and not (peer.has_left or peer.is_lost)
                if peer.silent_s > _SILENCE_S and is_there and peer.is_being_probed.acquire(blocking=False):
                    self._start_probe(peer)

    def _start_probe(self, peer: Peer) -> None:
        """Start the thread that probes a silent worker; if no thread can start, the next look tries again."""
        name = f"collectives-probe-{peer.rank}"
        try:
            threading.Thread(target=self._probe, args=(peer,), name=name, daemon=True).start()
        except RuntimeError:  # the system's limit is reached, or the interpreter ends
            peer.is_being_probed.release()

    def _probe(self, peer: Peer) -> None:
        """Try connections until the worker is heard again or is known to be lost.

        Its name is not looked up again: another machine that answers could be behind the same cut.
        """
        assert peer.endpoint is not None
        silence = Silence(peer.heard_at)
        try:
            while peer.heard_at == silence.since and not self._node.is_leaving.is_set():
                try:
                    peer.endpoint.connect(_ANSWER_LIMIT_S).close()
                    silence.was_answered(self._node.clock.now_s())
                    if self._node.shrinks and silence.observed_s > self._stopped_after_s:
                        why = f"silent for {silence.observed_s:.0f} s, though its machine answers: is it stopped?"
                        self._node.lose(peer, why)
                        return
                except OSError as error:
                    if (silent_s := silence.was_not_answered(self._node.clock.now_s())) is not None:
                        why = f"silent for {silent_s:.1f} s, and at its address: {describe_os_error(error)}"
                        self._node.lose(peer, why)
                        return
                self._node.clock.wait(self._node.is_leaving, BEAT_S)
        finally:
            peer.is_being_probed.release()


class Silence:
    """The results of attempts to reach a silent worker.

    Args:
        since: Time when the worker was last heard, in seconds of any clock; all times use that clock.

    Attributes:
        observed_s: Seconds of silence between attempts. Time in which this worker was stopped itself does not count.
    """

    def __init__(self, since: float) -> None:
        self.since = since
        self.observed_s = 0.0
        self._seen_at = since
        self._answered_at: float | None = None
        self._failures = 0

    def was_answered(self, now: float) -> None:
        """Note that the worker's kernel has accepted a connection: it may be stopped, but is not lost."""
        if self._answered_at is not None:
            self.observed_s += min(now - self._answered_at, _LONGEST_PAUSE_S)
        self._answered_at = now
        self._seen_at = max(self._seen_at, now)
        self._failures = 0

    def was_not_answered(self, now: float) -> float | None:
        """Note a failed attempt; if the worker is now lost, return the seconds without any sign of it, else None."""
        self._failures += 1
        silent_s = now - self._seen_at
        return silent_s if silent_s > LOST_AFTER_S and self._failures >= FAILURES else None
