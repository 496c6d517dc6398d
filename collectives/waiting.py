"""Waiting for other ranks: spin, then yield, then sleep; warn while it lasts, and give up at the limit."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from collectives.calls import Call
from collectives.clock import Clock, RealClock
from collectives.errors import CollectiveTimeoutError, PeerLostError
from collectives.instruments import Instruments

logger = logging.getLogger(__name__)

SPINS = 4000  # polls of a flag, some 40 ns each, before the core is offered to others
_YIELD_S = 0.001
_FIRST_SLEEP_S = 20e-6
_FIRST_CALM_SLEEP_S = 200e-6
_LONGEST_SLEEP_S = 0.001
_NOTE_EVERY_S = 0.02


@dataclass(frozen=True)
class Limits:
    """The limits on the time that a rank waits for the others.

    Attributes:
        stall_warning_s: after this long, and then again and again, a warning says who is waited for.
        timeout_s: after this long the wait raises `CollectiveTimeoutError`.
        connect_timeout_s: so long workers that find each other over a network may start apart.
        clock: what that is measured with.
    """

    stall_warning_s: float = 30.0
    timeout_s: float = 600.0
    connect_timeout_s: float = 300.0
    clock: Clock = field(default_factory=RealClock, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("stall_warning_s", "timeout_s", "connect_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be a positive number of seconds")


def _nobody_is_lost(awaited: Sequence[int]) -> str:
    return ""


def _by_polling() -> None:
    return None


class Watch:
    """The waits of one rank in one communicator.

    Args:
        rank: this rank.
        names: what each rank is called in messages, e.g. "rank 1 (instance 5 on node-b)".
        instances: the instance behind each rank, for instruments.
        limits: when to warn and when to give up, and by what clock.
        instruments: they see long waits.
        spins: how often to poll before yielding; 0 where ranks share a core or an interpreter.

    Attributes:
        call: the call that waits; set by whoever begins one, as is `number`, its place in the sequence.
        cancelled: set from another thread, it ends a long wait with `PeerLostError`.
        lost: says why it is useless to wait for these ranks, if it is; asked while a wait is long.
        pausing: asked when a wait begins that is not over at once: what returns when something may have happened, or
            after the given seconds; None: there is no such thing, so the wait has to poll.
    """

    def __init__(
        self,
        rank: int,
        names: Sequence[str],
        instances: Sequence[int],
        limits: Limits,
        instruments: Instruments,
        spins: int = SPINS,
    ) -> None:
        self.rank = rank
        self.names = names
        self.limits = limits
        self.spins = spins
        self.clock = limits.clock
        self.call = Call("connect")
        self.number = 0
        self.cancelled = False
        self.lost: Callable[[Sequence[int]], str] = _nobody_is_lost
        self.pausing: Callable[[], Callable[[float], None] | None] = _by_polling
        self._instances = instances
        self.instruments = instruments

    def wait(self, ready: Callable[[], bool], missing: Callable[[], Sequence[int]]) -> None:
        """Return as soon as `ready()` is true.

        Args:
            ready: polled; drives the transport where that needs driving.
            missing: the ranks that have not come yet; asked only when the wait is long.

        Raises:
            CollectiveTimeoutError: after `limits.timeout_s`.
        """
        for _ in range(self.spins):
            if ready():
                return
        self.wait_patiently(ready, missing)

    def wait_patiently(self, ready: Callable[[], bool], missing: Callable[[], Sequence[int]]) -> None:
        """`wait` for a caller that has spun already."""
        now_s, sleep = self.clock.now_s, self.clock.sleep
        started, until_something_happens = now_s(), self.pausing()
        while until_something_happens is None and now_s() - started < _YIELD_S:
            os.sched_yield()
            sleep(0)
            if ready():
                return
        self._wait_long(ready, missing, started, _FIRST_SLEEP_S, until_something_happens)

    def wait_calmly(self, ready: Callable[[], bool], missing: Callable[[], Sequence[int]]) -> None:
        """`wait` for who has more under way than what it waits for: where ranks share cores it sleeps at once."""
        if self.spins:
            self.wait(ready, missing)
        else:
            self._wait_long(ready, missing, self.clock.now_s(), _FIRST_CALM_SLEEP_S, self.pausing())

    def _wait_long(
        self,
        ready: Callable[[], bool],
        missing: Callable[[], Sequence[int]],
        started: float,
        first_sleep_s: float,
        until_something_happens: Callable[[float], None] | None,
    ) -> None:
        pause = first_sleep_s if until_something_happens is None else _LONGEST_SLEEP_S
        now_s, sleep = self.clock.now_s, until_something_happens or self.clock.sleep
        next_warning = started + self.limits.stall_warning_s
        give_up = started + self.limits.timeout_s
        next_note = started + _YIELD_S
        while not ready():
            # What a lost rank sent before may have come in between, while others are still waited for.
            if self.lost(missing()) and not ready() and (lost := self.lost(missing())):
                raise PeerLostError(f"{lost}; {self._facts(now_s() - started, missing())}")
            if self.cancelled or self.instruments.is_released:
                raise PeerLostError(f"{self._facts(now_s() - started, missing())}: the wait was abandoned")
            sleep(pause)
            pause = min(_LONGEST_SLEEP_S, pause * 1.2)
            now = now_s()
            if pause == _LONGEST_SLEEP_S and now >= next_note:
                next_note = now + _NOTE_EVERY_S
                self.note(missing())
            if now >= give_up and not ready():
                waited = f"timeout_s = {self.limits.timeout_s:g}"
                raise CollectiveTimeoutError(f"{self._facts(now - started, missing())}: gave up after {waited}")
            if now >= next_warning:
                next_warning += self.limits.stall_warning_s
                logger.warning("%s", self._facts(now - started, missing()))

    def note(self, missing: Sequence[int]) -> None:
        """Tell instruments that these ranks are waited for."""
        self.instruments.waiting_for(self.instances_of(missing))

    def instances_of(self, ranks: Sequence[int]) -> list[int]:
        """Return the instances behind ranks."""
        return [self._instances[rank] for rank in ranks]

    def _facts(self, waited_s: float, missing: Sequence[int]) -> str:
        others = ", ".join(self.names[rank] for rank in missing) or "nobody"
        where = f"{self.call.title} (collective {self.number})"
        return f"{self.names[self.rank]} has waited {waited_s:.3g} s for {others} in {where}"
