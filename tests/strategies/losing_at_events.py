"""An instrument that counts the events of an instance on a thread, and loses the instance at one of them."""

from __future__ import annotations

import threading
from typing import final

from losing import Lost, thread_name

from collectives.calls import Call
from collectives.instruments import RECOVERY

LONG_BEFORE, BEFORE = -2, -1
"""Step numbers before the first step, in which instances meet and agree on the first state."""


@final
class Events:
    """An instrument that counts the events of an instance in one step, and loses the instance at one of them.

    Args:
        instance: The observed instance.
        step: The step in which events are counted, until the next step begins.
        last: The number of the event at which the instance is lost; None to count all events.
        in_recovery: Whether only events during the recovery from the loss of another instance count, in this step or
            a later one.

    Attributes:
        seen: The names of the events.
    """

    def __init__(self, instance: int, step: int, last: int | None = None, in_recovery: bool = False) -> None:
        self.instance, self._step, self._last = instance, step, last
        self._at = LONG_BEFORE
        self._in_recovery = in_recovery
        self._recovers = False
        self.seen: list[str] = []

    def begin(self) -> None:
        self._at = BEFORE

    def step_begins(self, step: int) -> None:
        self._at = step
        self._note("step")

    def phase_begins(self, phase: str) -> None:
        self._recovers |= phase == RECOVERY
        self._note(phase)

    def phase_ends(self, phase: str) -> None:
        self._note(f"end of {phase}")
        self._recovers &= phase != RECOVERY

    def operation_begins(self, number: int, call: Call) -> None:
        self._note(call.title)

    def data_moves(self, nbytes: int) -> None:
        self._note("data move")

    def before_send(self, source: int, to: int) -> None:
        if source == self.instance:
            self._note(f"message to {to}")

    def _note(self, name: str) -> None:
        is_due = self._recovers and self._at >= self._step if self._in_recovery else self._at == self._step
        if is_due and threading.current_thread().name == thread_name(self.instance):
            self.seen.append(name)
            if len(self.seen) - 1 == self._last:
                raise Lost
