"""The machine of one instance in its agent: events with their times in, actions out. Pure: no clock, no process.

An event is a call and an action a pair, because the agent has no time to load `dataclasses`.
"""

from __future__ import annotations

import signal
from enum import Enum

from poprun.ipc import wire

ABORT_GRACE_S = 0.15
"""The wait after mpirun has said stop: the instance that called MPI_Abort ends by itself with its status. Not twice as
long: where a host is cut off, the daemons of the others would kill us before we have said that we were told."""
LINGER_S = 0.1
"""The wait after the program has ended: helpers such as Python's resource tracker clean up and end by themselves."""
SWEEP_S = 0.003
STACK_S = 0.1
"""The interval between looks at a stack that a program writes: it is complete when it grows no more."""
STACK_LIMIT_S = 4.0
"""The time that this may take on a machine with too few cores."""
CUT_SIGNAL = signal.SIGRTMIN + 1  # of an injected fault
STACK_SIGNAL = signal.SIGRTMAX - 4  # not one of those that programs use
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, wire.ORPHANED)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGCONT, signal.SIGTSTP)
_NEVER = float("inf")


class Do(Enum):
    """Deeds of the agent; the number that goes with one is named here, and 0 for the others."""

    SEND = "send the program this signal"
    SWEEP = "kill whatever is left of its descendants"
    CUT = "break the connection to poprun"
    DRAIN = "forward all output that is there"
    REPORT = "tell poprun what the program has noted"
    TELL_TOLD = "tell poprun that this signal has told us to stop"
    TELL_ENDED = "tell poprun how the program has ended: its exit status, or -n after signal n"
    TELL_CLOSED = "tell poprun that no process is left"
    LOOK_AT_STACK = "see how far the program has written its stack, and in which state it is"
    TELL_STACK = "tell poprun the stack, from this byte of its file on, and the state; -1: there is none"


Action = tuple[Do, int]


class GuardMachine:
    """One instance, from the start of its program until nothing of it is left and poprun has said so.

    Whoever drives it tells every event with its time, calls `tick` after those that have come together and at
    `deadline_s`, and carries out the actions in their order before the next event.

    Attributes:
        told: the signal that has told us to stop; 0: none has.
    """

    def __init__(self) -> None:
        self.told = 0
        self._is_running = True
        self._has_children = True
        self._is_dismissed = False
        self._kill_at_s = _NEVER  # the program itself
        self._sweep_at_s = _NEVER  # whatever is left of its descendants
        self._examined_at_s = _NEVER  # when the stack is looked at
        self._stack_limit_s = _NEVER
        self._stack_begin = self._stack_end = 0  # of the stack that was asked for, as far as it is written

    @property
    def is_over(self) -> bool:
        """Whether nothing is left, and poprun, or its end, has dismissed us."""
        return self._is_dismissed and not self._has_children

    @property
    def has_children(self) -> bool:
        """Whether the program, or a descendant of it, may still be there."""
        return self._has_children

    @property
    def deadline_s(self) -> float:
        """The time of the next `tick`, if nothing happens before."""
        kill_at_s = self._kill_at_s if self._is_running else _NEVER
        sweep_at_s = self._sweep_at_s if self._has_children else _NEVER
        return min(kill_at_s, sweep_at_s, self._examined_at_s)

    def take_signal(self, number: int, now_s: float) -> list[Action]:
        """Take a signal from mpirun, its daemon, the kernel, or the user."""
        if number in PASSED_ON:
            return self.pass_on(number)
        if number == CUT_SIGNAL:
            return [(Do.CUT, 0)]
        if number not in STOPPING or self.told:
            return []
        self.told = number
        self._kill_at_s = min(self._kill_at_s, now_s + ABORT_GRACE_S)
        return [(Do.TELL_TOLD, number)]

    def pass_on(self, number: int) -> list[Action]:
        """Pass a signal on to the program."""
        if not self._is_running:
            return []
        return [(Do.SEND, signal.SIGSTOP if number == signal.SIGTSTP else number)]

    def dismiss(self) -> None:
        """Poprun has said that the instance is to end, or is gone itself."""
        self._is_dismissed = True
        self.told = self.told or int(signal.SIGKILL)
        self._kill_at_s = 0.0
        if not self._is_running:
            self._sweep_at_s = 0.0

    def examine(self, stack_bytes: int, now_s: float) -> list[Action]:
        """Poprun wants to know where the program is.

        Args:
            stack_bytes: how long the file of its stack is; 0 where it has not said that it can write one.
            now_s: the time.
        """
        self._stack_begin = self._stack_end = stack_bytes
        self._examined_at_s, self._stack_limit_s = now_s + STACK_S, now_s + STACK_LIMIT_S
        return [(Do.SEND, STACK_SIGNAL)] if stack_bytes and self._is_running else []

    def see_stack(self, stack_bytes: int, is_stopped: bool, now_s: float) -> list[Action]:
        """Take the length of the stack's file; a program that is stopped can write none."""
        is_awaited = self._stack_begin > 0 and self._is_running and not is_stopped
        before, self._stack_end = self._stack_end, stack_bytes if is_awaited else 0
        is_written = before == self._stack_end > self._stack_begin
        if is_awaited and not is_written and now_s < self._stack_limit_s:
            self._examined_at_s = now_s + STACK_S
            return []
        return [(Do.TELL_STACK, self._stack_begin or -1)]

    def note_end(self, code: int, now_s: float) -> list[Action]:
        """Note that the program has ended with an exit status, or -n after signal n."""
        self._is_running = False
        self._sweep_at_s = now_s + LINGER_S
        return [(Do.DRAIN, 0), (Do.REPORT, 0), (Do.TELL_ENDED, code)]

    def note_none_left(self) -> list[Action]:
        """We have no child any more."""
        self._has_children = False
        return [(Do.DRAIN, 0), (Do.TELL_CLOSED, 0)]

    def tick(self, now_s: float) -> list[Action]:
        """Return the actions that are due once all events up to now have been told."""
        due: list[Action] = []
        if self._is_running and now_s >= self._kill_at_s:
            self._kill_at_s = _NEVER
            due.append((Do.SEND, signal.SIGKILL))
        if now_s >= self._examined_at_s:
            self._examined_at_s = _NEVER
            due.append((Do.LOOK_AT_STACK, 0))
        if self._has_children and now_s >= self._sweep_at_s:
            self._sweep_at_s = now_s + SWEEP_S
            due.append((Do.SWEEP, 0))
        return due
