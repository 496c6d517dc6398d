"""The state machine of one instance in its agent: events with their times in, actions out. Pure: no clock, no process.

An event is a method call and an action is a pair, because loading `dataclasses` takes the agent too long.
"""

from __future__ import annotations

import signal
from enum import Enum

from poprun.ipc import wire

ABORT_GRACE_S = 0.15
"""The wait after mpirun's signal to stop. In this time an instance that called MPI_Abort ends by itself, with its
status. If a host is cut off, a wait of twice the length would let daemons kill the agent before it reports this."""
LINGER_S = 0.1
"""The wait after the end of the program, so that helper processes (Python's resource tracker) can clean up and end."""
SWEEP_S = 0.003
STACK_S = 0.1
"""The interval between looks at a stack that a program writes; the stack is complete if it has stopped growing."""
STACK_LIMIT_S = 4.0
"""The limit for writing a stack, long enough for a machine with too few cores."""
CUT_SIGNAL = signal.SIGRTMIN + 1  # sent by an injected fault, and by the kernel if the keeper is gone
STACK_SIGNAL = signal.SIGRTMAX - 4  # a signal that programs do not use
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, wire.ORPHANED)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGCONT, signal.SIGTSTP)
_NEVER = float("inf")


class Do(Enum):
    """An action of the agent. Each text says what the action's number is; otherwise the number is 0."""

    SEND = "send the program this signal"
    SWEEP = "kill all remaining descendants of the agent"
    CUT = "break the connection to poprun"
    DRAIN = "forward all available output"
    REPORT = "tell poprun the program's progress"
    TELL_TOLD = "tell poprun that this signal told us to stop"
    TELL_NOTICE = "tell poprun that this host is about to go away"
    TELL_ENDED = "tell poprun how the program has ended: its exit status, or -n after signal n"
    TELL_CLOSED = "tell poprun that no process is left"
    LOOK_AT_STACK = "see how much of its stack the program has written, and the state of its process"
    TELL_STACK = "tell poprun the stack, from this byte of its file on, and the state; -1: no stack"


Action = tuple[Do, int]


class GuardMachine:
    """The state of one instance, from the start of its program until no process is left and poprun dismisses it.

    The caller reports every event with its time. It calls `tick` after events that came together, and at `deadline_s`.
    It carries out the returned actions in order before the next event.

    Args:
        tells_notice: Whether SIGUSR1 is a notice for poprun, and not a signal for the program.

    Attributes:
        told: The signal that told the instance to stop. 0: none.
    """

    def __init__(self, tells_notice: bool = False) -> None:
        self.told = 0
        self._tells_notice = tells_notice
        self._is_running = True
        self._has_children = True
        self._is_dismissed = False
        self._kill_at_s = _NEVER  # when the program itself is killed
        self._sweep_at_s = _NEVER  # when its remaining descendants are killed
        self._examined_at_s = _NEVER  # when to look at the stack
        self._stack_limit_s = _NEVER
        self._stack_begin = self._stack_end = 0  # the requested stack in its file, as far as it is written

    @property
    def is_over(self) -> bool:
        """Whether no process is left, and poprun, or its end, has dismissed the agent."""
        return self._is_dismissed and not self._has_children

    @property
    def has_children(self) -> bool:
        """Whether the program or one of its descendants may still exist."""
        return self._has_children

    @property
    def deadline_s(self) -> float:
        """The time of the next `tick`, if no event comes before."""
        kill_at_s = self._kill_at_s if self._is_running else _NEVER
        sweep_at_s = self._sweep_at_s if self._has_children else _NEVER
        return min(kill_at_s, sweep_at_s, self._examined_at_s)

    def take_signal(self, number: int, now_s: float) -> list[Action]:
        """Take a signal from mpirun, its daemon, the kernel, or the user."""
        if number == signal.SIGUSR1 and self._tells_notice:
            return [(Do.TELL_NOTICE, 0)]
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
        """Note that poprun wants the instance to end, or that poprun itself is gone."""
        self._is_dismissed = True
        self.told = self.told or int(signal.SIGKILL)
        self._kill_at_s = 0.0
        if not self._is_running:
            self._sweep_at_s = 0.0

    def examine(self, stack_bytes: int, now_s: float) -> list[Action]:
        """Ask the program for its stack.

        Args:
            stack_bytes: Length of the stack's file; 0 if the program has not announced that it can write a stack.
            now_s: The time.
        """
        self._stack_begin = self._stack_end = stack_bytes
        self._examined_at_s, self._stack_limit_s = now_s + STACK_S, now_s + STACK_LIMIT_S
        return [(Do.SEND, STACK_SIGNAL)] if stack_bytes and self._is_running else []

    def see_stack(self, stack_bytes: int, is_stopped: bool, now_s: float) -> list[Action]:
        """Take the length of the stack's file; a stopped program cannot write a stack."""
        is_awaited = self._stack_begin > 0 and self._is_running and not is_stopped
        before, self._stack_end = self._stack_end, stack_bytes if is_awaited else 0
        is_written = before == self._stack_end > self._stack_begin
        if is_awaited and not is_written and now_s < self._stack_limit_s:
            self._examined_at_s = now_s + STACK_S
            return []
        return [(Do.TELL_STACK, self._stack_begin or -1)]

    def note_end(self, code: int, now_s: float) -> list[Action]:
        """Note that the program has ended with an exit status, or with -n after signal n."""
        self._is_running = False
        self._sweep_at_s = now_s + LINGER_S
        return [(Do.DRAIN, 0), (Do.REPORT, 0), (Do.TELL_ENDED, code)]

    def note_none_left(self) -> list[Action]:
        """Note that the agent has no child any more."""
        self._has_children = False
        return [(Do.DRAIN, 0), (Do.TELL_CLOSED, 0)]

    def tick(self, now_s: float) -> list[Action]:
        """Return the actions that are due, after all events up to now have been reported."""
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
