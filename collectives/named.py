"""Asynchronous collectives, matched by name: ranks and threads may start them in different orders.

Each communicator has one background thread, which works on a channel of its own. The threads of all ranks negotiate in
rounds: in a round every rank announces the collectives that it has newly started. A collective that all ranks have
announced is carried out by all of them, in the order of the names.
"""

from __future__ import annotations

import json
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from collectives import forks
from collectives.agreement import exchange_bytes, layout_mismatch
from collectives.calls import CLOSE, Call, describe_crossing
from collectives.deadlock import Key, WaitingThreads, crossed_ranks
from collectives.errors import (
    BrokenError,
    ClosedError,
    CollectiveError,
    CollectiveTimeoutError,
    LayoutMismatchError,
    PeerLostError,
)
from collectives.instruments import Instruments
from collectives.requests import Request
from collectives.transport import Transport
from collectives.waiting import Limits, Watch

logger = logging.getLogger(__name__)

_SHORT_WAIT_S = 0.001  # instruments see only longer waits
_IDLE_ROUND_S = 0.001  # pause after a round without news


class Handle:
    """A collective that was started. Its buffers must not be used until `wait` has returned.

    Attributes:
        call: Call that was started.
        key: Identification that is the same on all ranks.
        number: Number of named collectives that this rank had started, with this one.
    """

    def __init__(
        self, request: Request[np.ndarray], key: Key, number: int, instruments: Instruments, waits: WaitingThreads
    ) -> None:
        self.call = request.call
        self.key = key
        self.number = number
        self._request = request
        self._instruments = instruments
        self._waits = waits
        self._finished = threading.Event()
        self._made_in = forks.generation
        self._result: np.ndarray | None = None
        self._error: BaseException | None = None
        self._missing: Sequence[int] = ()

    def done(self) -> bool:
        """Return whether the collective has ended, successfully or not."""
        return self._finished.is_set()

    def wait(self) -> np.ndarray:
        """Wait for the end and return the result of the synchronous call.

        Raises:
            CollectiveError: The errors of the synchronous call. The limit of the wait is the communicator's
                `timeout_s`.
        """
        forks.refuse_in_child(self._made_in, "the process that has started it")
        if not self._finished.wait(_SHORT_WAIT_S):
            self._instruments.operation_begins(self.number, self.call)
            with self._waits.until(self):
                self._finished.wait()
        if self._error is not None:
            self._instruments.operation_begins(self.number, self.call)  # the record ends with the failed operation
            self._instruments.waiting_for(self._missing)
            raise self._error
        self._instruments.operation_ends()
        assert self._result is not None
        return self._result

    def _carry_out(self, transport: Transport) -> None:
        self._result = self._request.carry_out(transport)
        self._finished.set()

    def _fail(self, error: BaseException, missing: Sequence[int] = ()) -> None:
        """End with an error; `missing` are the instances whose absence caused it."""
        self._error = error
        self._missing = missing
        self._finished.set()


@dataclass
class _NamedCall:
    """One use of a name: this rank's handle, if this rank has started it, and the announcements of all ranks.

    A failed use is kept until the other ranks have started it too: otherwise the counts of the name's uses would differ
    between ranks.
    """

    handle: Handle | None = None
    failure: CollectiveError | None = None
    since: float = 0.0
    next_warning: float = 0.0
    announced: dict[int, str] = field(default_factory=dict)


class NamedQueue:
    """The named collectives of one rank.

    Args:
        transport: Transport of a channel that only this queue uses.
        watch: Waits on that channel.
    """

    def __init__(self, transport: Transport, watch: Watch) -> None:
        self._transport = transport
        self._watch = watch
        self._condition = threading.Condition()
        self._new: list[tuple[Key, Handle]] = []
        self._issued: Counter[str] = Counter()
        self._waits = WaitingThreads()
        self._pending: dict[Key, _NamedCall] = {}
        self._closing = False
        self._closed_ranks: set[int] = set()
        self._failure: CollectiveError | None = None
        self._thread: threading.Thread | None = None
        if transport.size > 1:  # closing needs the thread too, maybe at interpreter exit, when no thread can start
            self._ensure_thread()

    def limit_waits(self, limits: Limits) -> None:
        """Replace the limits of waits."""
        self._watch.limits = limits

    def start(self, request: Request[np.ndarray]) -> Handle:
        """Queue a collective; the background thread carries it out once all ranks have started it."""
        call = request.call
        with self._condition:
            key = (call.name, self._issued[call.name])
            handle = Handle(request, key, self._issued.total() + 1, self._watch.instruments, self._waits)
            if self._closing:
                raise ClosedError(f"{call.title} was started after the communicator was closed")
            if self._failure is not None:
                raise BrokenError(f"the named collectives of this communicator failed before: {self._failure}")
            self._issued[call.name] += 1
            self._new.append((key, handle))
            self._waits.add_starter()
            self._ensure_thread()
            self._condition.notify()
        return handle

    def expect_others(self) -> None:
        """Note that threads unknown to Python will start collectives."""
        self._waits.expect_others()

    def begin_close(self) -> None:
        """Tell the other ranks that this rank starts nothing more; return at once."""
        with self._condition:
            self._closing = True
            self._condition.notify()

    def end_close(self) -> None:
        """Wait until all started collectives have ended on all ranks."""
        if self._thread is not None:
            self._thread.join()

    def abandon(self) -> None:
        """Stop waiting for other ranks; pending collectives fail."""
        self._watch.cancelled = True
        with self._condition:
            self._closing = True
            self._condition.notify()

    def _ensure_thread(self) -> None:
        if self._thread is None:
            arguments = weakref.ref(self), self._condition
            self._thread = threading.Thread(target=_serve, args=arguments, name="collectives-named", daemon=True)
            self._thread.start()
            weakref.finalize(self, _wake, self._condition).atexit = False

    # ---- the background thread

    def work(self) -> bool:
        """Make rounds while there is a reason; return whether there may be a reason later."""
        try:
            while self._has_work():
                if not self._round():
                    self._watch.clock.sleep(_IDLE_ROUND_S)
        except BaseException as error:
            self._fail_all(error)
            return False
        with self._condition:  # the queue may have begun to close since; the other ranks must hear of it
            return not self._is_over()

    def is_called(self) -> bool:
        """Return whether a round is needed, or the queue is closing."""
        return self._is_wanted() or self._closing

    def _has_work(self) -> bool:
        with self._condition:
            return self.is_called() and not self._is_over()

    def _is_over(self) -> bool:
        """Return whether no round is needed any more: all ranks have closed, or this rank was abandoned and is idle."""
        everybody_closed = len(self._closed_ranks) == self._transport.size
        return (everybody_closed and not self._new) or (self._watch.cancelled and not self._is_wanted())

    def _is_wanted(self) -> bool:
        """Return whether this rank has started collectives that have not ended."""
        return bool(self._new) or any(pending.handle for pending in self._pending.values())

    def _round(self) -> bool:
        """Exchange news, and carry out the complete collectives; return whether there was any news."""
        with self._condition:
            new, self._new = self._new, []
            closing = self._closing
            waits = None if new else self._waits.if_all_wait()
        for key, handle in new:
            self._admit(key, handle)
        first = next((p.handle.call for p in self._pending.values() if p.handle), None)
        self._watch.call = first or Call(CLOSE)
        news = {"calls": [(*key, str(handle.call)) for key, handle in new], "closing": closing, "waits": waits}
        messages = [json.loads(text) for text in exchange_bytes(self._transport, json.dumps(news).encode())]
        for rank, message in enumerate(messages):
            for name, number, text in message["calls"]:
                self._pending.setdefault((name, number), _NamedCall()).announced[rank] = text
            if message["closing"]:
                self._closed_ranks.add(rank)
        happened = any(message["calls"] for message in messages)
        self._carry_out_complete()
        self._fail_crossed([message["waits"] for message in messages])
        self._fail_orphans()
        self._watch_stalls()
        return happened

    def _admit(self, key: Key, handle: Handle) -> None:
        entry = self._pending.setdefault(key, _NamedCall())
        if entry.failure is not None:
            handle._fail(entry.failure)
            return
        entry.handle = handle
        entry.since = self._watch.clock.now_s()
        entry.next_warning = entry.since + self._watch.limits.stall_warning_s

    def _carry_out_complete(self) -> None:
        size = self._transport.size
        complete = [key for key, entry in self._pending.items() if len(entry.announced) == size]
        for key in sorted(complete):  # in the same order on all ranks
            entry = self._pending.pop(key)
            if entry.failure is not None:
                continue
            assert entry.handle is not None
            calls = [entry.announced[rank] for rank in range(size)]
            if len(set(calls)) > 1:
                entry.handle._fail(layout_mismatch(calls))
                continue
            self._watch.call = entry.handle.call
            try:
                entry.handle._carry_out(self._transport)
            except BaseException as error:
                entry.handle._fail(error)
                raise

    def _fail_crossed(self, waits: Sequence[Sequence[tuple[str, int]] | None]) -> None:
        """Fail the collectives of a deadlock: each is awaited by a rank that has not started another awaited one."""
        keys = [None if of_rank is None else [(name, number) for name, number in of_rank] for of_rank in waits]
        ranks = crossed_ranks(keys, {key: entry.announced for key, entry in self._pending.items()})
        if not ranks:
            return
        awaited = {rank: keys[rank] or [] for rank in ranks}
        calls = {rank: ", ".join(self._pending[key].announced[rank] for key in awaited[rank]) for rank in ranks}
        failure = LayoutMismatchError(describe_crossing(calls))
        for key in {key for of_rank in awaited.values() for key in of_rank}:
            entry = self._pending[key]
            entry.failure = failure
            if entry.handle is not None:
                entry.handle._fail(failure)
                entry.handle = None

    def _fail_orphans(self) -> None:
        """Fail collectives that a closed rank will never start."""
        for key, entry in list(self._pending.items()):
            gone = self._closed_ranks - entry.announced.keys()
            if not gone:
                continue
            del self._pending[key]
            if entry.handle is not None:
                calls = [
                    entry.announced.get(rank, CLOSE if rank in gone else "nothing yet")
                    for rank in range(self._transport.size)
                ]
                missing = self._watch.instances_of(sorted(gone))
                entry.handle._fail(layout_mismatch(calls), missing)

    def _watch_stalls(self) -> None:
        now = self._watch.clock.now_s()
        limits, names = self._watch.limits, self._watch.names
        for key, entry in list(self._pending.items()):
            if entry.handle is None:
                continue
            missing = [rank for rank in range(self._transport.size) if rank not in entry.announced]
            self._watch.note(missing)
            facts = (
                f"{names[self._transport.rank]} has waited {now - entry.since:.3g} s for "
                f"{', '.join(names[rank] for rank in missing)} "
                f"in {entry.handle.call.title}{self._started_instead(missing)}"
            )
            if now - entry.since >= limits.timeout_s and not (self._watch.lost(missing) or self._watch.gives_up()):
                del self._pending[key]
                entry.handle._fail(CollectiveTimeoutError(f"{facts}: gave up after timeout_s = {limits.timeout_s:g}"))
            elif now >= entry.next_warning:
                entry.next_warning += limits.stall_warning_s
                logger.warning("%s", facts)

    def _started_instead(self, missing: Sequence[int]) -> str:
        """Describe the collectives that the missing ranks have started and this rank has not."""
        calls = {
            entry.announced[rank]
            for entry in self._pending.values()
            if entry.handle is None and entry.failure is None
            for rank in missing
            if rank in entry.announced
        }
        return f"; started there, but not here: {', '.join(sorted(calls))}" if calls else ""

    def _fail_all(self, error: BaseException) -> None:
        """Fail all pending collectives. Log the error if no other rank caused it, since nothing may be pending."""
        with self._condition:
            if isinstance(error, CollectiveError):
                self._failure = error
            else:
                logger.error("the thread of named collectives failed", exc_info=error)
                self._failure = PeerLostError(f"the thread of named collectives failed: {error}")
                self._failure.__cause__ = error
            handles = [handle for _, handle in self._new]
            self._new = []
        handles += [entry.handle for entry in self._pending.values() if entry.handle is not None]
        self._pending.clear()
        for handle in handles:
            if not handle.done():
                handle._fail(self._failure)


def _serve(reference: weakref.ref[NamedQueue], condition: threading.Condition) -> None:
    """Work for a queue until it is closed or garbage-collected."""
    while True:
        with condition:
            while (queue := reference()) is not None and not queue.is_called():
                del queue
                condition.wait()
        if queue is None or not queue.work():
            return
        del queue


def _wake(condition: threading.Condition) -> None:
    with condition:
        condition.notify_all()
