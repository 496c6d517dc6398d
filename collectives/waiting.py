"""Waits for other ranks: spin, then yield, then sleep; warn during the wait, and give up at the limit."""

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

SPINS = 4000  # polls of a flag, about 40 ns each, before the core is offered to others
_YIELD_S = 0.001
_FIRST_SLEEP_S = 20e-6
_FIRST_CALM_SLEEP_S = 200e-6
_LONGEST_SLEEP_S = 0.001
_NOTE_EVERY_S = 0.02


@dataclass(frozen=True)
class Limits:
    """The limits on the time that a rank waits for the others.

    Attributes:
        stall_warning_s: Interval of warnings that name the missing ranks.
        timeout_s: Time after which a wait raises `CollectiveTimeoutError`.
        connect_timeout_s: Maximum time between the starts of workers that meet over a network.
        clock: Clock that measures these times.
    """

    stall_warning_s: float = 30.0
    timeout_s: float = 600.0
    connect_timeout_s: float = 300.0
    clock: Clock = field(default_factory=RealClock, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("stall_warning_s", "timeout_s", "connect_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be a positive number of seconds")


class Watch:
    """The waits of one rank in one communicator.

    Args:
        rank: This rank.
        names: Name of each rank in messages, e.g. "rank 1 (instance 5 on node-b)".
        instances: Instance of each rank, for instruments.
        limits: Times of warnings and errors, and their clock.
        instruments: Instruments that see long waits.
        spins: Number of polls before yielding; 0 if ranks share a core or an interpreter.

    Attributes:
        call: Current call, set by the code that begins it.
        number: Number of the current call in the sequence, set by the same code.
        cancelled: Flag that another thread sets to end a long wait with `PeerLostError`.
        lost: Function that returns why waiting for the given ranks is useless, or ""; called during long waits.
        gives_up: Function that is called when a wait reaches its limit. It returns True if it has given up ranks that
            are about to join, so that `lost` ends the wait.
        pausing: Function that is called when a wait does not end at once. It returns a function that pauses until
            something may have happened or the given seconds have passed; None: the wait has to poll.
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
        self.lost: Callable[[Sequence[int]], str] = lambda awaited: ""
        self.gives_up: Callable[[], bool] = lambda: False
        self.pausing: Callable[[], Callable[[float], None] | None] = lambda: None
        self._instances = instances
        self.instruments = instruments

    def wait(self, ready: Callable[[], bool], missing: Callable[[], Sequence[int]]) -> None:
        """Wait until `ready()` is true.

        Args:
            ready: Function to poll; it also drives the transport if that needs driving.
            missing: Function that returns the ranks that have not come yet; called only during long waits.

        Raises:
            CollectiveTimeoutError: `limits.timeout_s` have passed.
            PeerLostError: `lost` reports a missing rank, the wait was cancelled, or the supervisor released it.
        """
        for _ in range(self.spins):
            if ready():
                return
        self.wait_patiently(ready, missing)

    def wait_patiently(self, ready: Callable[[], bool], missing: Callable[[], Sequence[int]]) -> None:
        """Wait as `wait` does, for a caller that has already spun."""
        now_s, sleep = self.clock.now_s, self.clock.sleep
        started, until_something_happens = now_s(), self.pausing()
        while until_something_happens is None and now_s() - started < _YIELD_S:
            os.sched_yield()
            sleep(0)
            if ready():
                return
        self._wait_long(ready, missing, started, _FIRST_SLEEP_S, until_something_happens)

    def wait_on(
        self,
        ready: Callable[[], bool],
        missing: Callable[[], Sequence[int]],
        pause: Callable[[float], None] | None = None,
    ) -> None:
        """Wait as `wait` does, for a caller that has already slept for about a millisecond.

        Args:
            ready: Function to poll.
            missing: Function that returns the ranks that have not come yet.
            pause: Function that pauses until something may have happened or the given seconds have passed.
        """
        self._wait_long(ready, missing, self.clock.now_s(), _FIRST_SLEEP_S, pause)

    def wait_calmly(self, ready: Callable[[], bool], missing: Callable[[], Sequence[int]]) -> None:
        """Wait as `wait` does, but sleep at once if ranks share cores: the caller has other transfers in progress."""
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
        if ready():
            return
        while True:
            sleep(pause)
            pause = min(_LONGEST_SLEEP_S, pause * 1.2)
            now = now_s()
            if pause == _LONGEST_SLEEP_S and now >= next_note:
                next_note = now + _NOTE_EVERY_S
                self.note(missing())
            if now >= give_up and not (ready() or self.lost(missing()) or self.gives_up()):
                waited = f"timeout_s = {self.limits.timeout_s:g}"
                raise CollectiveTimeoutError(f"{self._facts(now - started, missing())}: gave up after {waited}")
            if now >= next_warning:
                next_warning += self.limits.stall_warning_s
                logger.warning("%s", self._facts(now - started, missing()))
            if ready():
                return
            self._refuse_vain_wait(ready, missing, started)

    def _refuse_vain_wait(
        self, ready: Callable[[], bool], missing: Callable[[], Sequence[int]], started: float
    ) -> None:
        """Raise PeerLostError if a missing rank is lost or the wait was abandoned."""
        # Asked again after `ready`: a lost rank's last message may have arrived in between.
        if self.lost(missing()) and not ready() and (lost := self.lost(missing())):
            raise PeerLostError(f"{lost}; {self._facts(self.clock.now_s() - started, missing())}")
        if (self.cancelled or self.instruments.is_released) and not ready():
            raise PeerLostError(f"{self._facts(self.clock.now_s() - started, missing())}: the wait was abandoned")

    def note(self, missing: Sequence[int]) -> None:
        """Tell the instruments that this rank waits for the missing ranks."""
        self.instruments.waiting_for(self.instances_of(missing))

    def instances_of(self, ranks: Sequence[int]) -> list[int]:
        """Return the instances of the given ranks."""
        return [self._instances[rank] for rank in ranks]

    def _facts(self, waited_s: float, missing: Sequence[int]) -> str:
        others = ", ".join(self.names[rank] for rank in missing) or "nobody"
        where = f"{self.call.title} (collective {self.number})"
        return f"{self.names[self.rank]} has waited {waited_s:.3g} s for {others} in {where}"
