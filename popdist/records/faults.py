"""Faults that a user injects into an instance to test the job's reaction.

`kill:instance=2,step=7,phase=all_reduce` kills instance 2 by SIGKILL when it begins its all-reduce in step 7.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collectives.calls import Call

VARIABLE = "POPDIST_INJECT"
"""Faults that instances inject into themselves, separated by semicolons: `--inject`."""
ATTEMPT_VARIABLE = "POPDIST_RESTART_COUNT"
"""Number of times that `--on-failure shrink`, `replace` or `restart` has started the job again; 0 at first."""

KINDS = ("kill", "exit", "raise", "stop", "delay", "cut", "flip-bit")
DATA, FORWARD, WAITING, UPDATE, CHECKPOINT = "data", "forward", "waiting", "update", "checkpoint"
COLLECTIVES = ("all_reduce", "all_gather", "gather", "reduce_scatter", "broadcast", "barrier")
PHASES = (DATA, FORWARD, *COLLECTIVES, WAITING, UPDATE, CHECKPOINT)
_EXIT_STATUS = 3
CUT_LIMIT_S = 10.0
"""Limit of a cut-off instance's wait for its supervisor to end it."""


class InjectedError(RuntimeError):
    """The error raised by a fault of kind `raise`."""


@dataclass(frozen=True)
class Fault:
    """A failure that happens once.

    Attributes:
        kind: `kill` (SIGKILL), `exit` (at once, with status 3), `raise` (an exception), `stop` (SIGSTOP), `delay`,
            `cut` (its connections break while it lives), or `flip-bit` (in a variable, before the step; its phase is
            always `forward`).
        instance: Index of the failing instance.
        phase: `data`: a batch has been read; `forward`: a step begins; a collective: it begins; `waiting`: a collective
            has waited for others for some milliseconds; `update`: a step is about to apply the mean gradients;
            `checkpoint`: a checkpoint is about to be saved.
        step: Step of the failure; None: the first step that reaches the phase.
        attempt: Number of restarts of the job before the failure.
        seconds: Duration of a delay.
    """

    kind: str
    instance: int
    phase: str = FORWARD
    step: int | None = None
    attempt: int = 0
    seconds: float = 1.0

    def strike(self) -> None:
        """Make the fault happen now."""
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "exit":
            os._exit(_EXIT_STATUS)
        elif self.kind == "raise":
            raise InjectedError(f"injected into instance {self.instance} in phase {self.phase}")
        elif self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.kind == "delay":
            time.sleep(self.seconds)
        elif self.kind == "cut":
            break_connections()


def break_connections() -> None:
    """Shut down all TCP sockets of this process, also listening ones, so that the peers see a broken connection."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own descriptor is closed by now; a socket may be unconnected
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                _break_connection(int(name))


def _break_connection(descriptor: int) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        if copy.type == socket.SOCK_STREAM and copy.family in (socket.AF_INET, socket.AF_INET6):
            copy.shutdown(socket.SHUT_RDWR)


def parse_fault(text: str) -> Fault:
    """Parse a fault: `KIND:instance=I[,step=S][,phase=P][,attempt=A][,seconds=X]`.

    Raises:
        ValueError: The text is not a fault. The message names the mistake and the valid choices.
    """
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is not a kind of fault; use one of {', '.join(KINDS)}")
    pairs = [part.partition("=")[::2] for part in rest.split(",") if part]
    given = dict(pairs)
    wrong = [name for name in given if name not in ("instance", "step", "phase", "attempt", "seconds")]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is not understood; write KIND:instance=I,step=S,phase=P,attempt=A,seconds=X")
    if len(given) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice}= is given twice; write one fault for each, --inject may be repeated")
    if "instance" not in given:
        raise ValueError("no instance is named; write KIND:instance=I")
    phase = given.get("phase", FORWARD)
    if phase not in PHASES:
        raise ValueError(f"{phase!r} is not a phase; use one of {', '.join(PHASES)}")
    if kind == "flip-bit" and phase != FORWARD:
        raise ValueError(f"a bit is flipped before a step, so its phase is {FORWARD} and not {phase}")
    if kind != "delay" and "seconds" in given:
        raise ValueError(f"seconds= is the duration of a delay, but this fault is {kind}; leave it out, or use delay")
    step = given.get("step")
    return Fault(
        kind,
        instance=_number(given, "instance"),
        phase=phase,
        step=None if step is None else _number(given, "step"),
        attempt=_number(given, "attempt") if "attempt" in given else 0,
        seconds=_seconds(given.get("seconds", "1")),
    )


def due_faults(environ: Mapping[str, str], instance: int) -> list[Fault]:
    """Return the faults of an instance in this attempt of the job, read from the environment."""
    faults = [parse_fault(text) for text in environ.get(VARIABLE, "").split(";") if text]
    attempt = int(environ.get(ATTEMPT_VARIABLE, "0"))
    return [fault for fault in faults if (fault.attempt, fault.instance) == (attempt, instance)]


@final
class FaultInjector:
    """An instrument that makes faults happen when their phase and step come.

    Args:
        faults: Faults of this instance.
        cut_off: Function that tells the supervisor to lose its connection, and returns whether there is a supervisor.

    Attributes:
        is_armed: Whether there were any faults at the beginning.
    """

    def __init__(self, faults: Sequence[Fault] = (), cut_off: Callable[[], bool] = lambda: False) -> None:
        self.is_armed = bool(faults)
        self._faults = list(faults)
        self._cut_off = cut_off
        self._step = -1
        self._flips_bit = False

    def step_begins(self, step: int) -> None:
        self._step = step
        self._strike(FORWARD)

    def operation_begins(self, number: int, call: Call) -> None:
        self._strike(call.kind)

    def waiting_for(self, instances: Sequence[int]) -> None:
        self._strike(WAITING)

    def phase_begins(self, phase: str) -> None:
        if phase != DATA:
            self._strike(phase)

    def phase_ends(self, phase: str) -> None:
        # a batch is read for the next step
        if phase == DATA:
            self._strike(phase, step=self._step + 1)

    def take_flip(self) -> bool:
        """Return, once, whether a bit of this instance's variables has to be flipped before the step that begins."""
        flips_bit, self._flips_bit = self._flips_bit, False
        return flips_bit

    def _strike(self, phase: str, step: int | None = None) -> None:
        step = self._step if step is None else step
        for fault in [each for each in self._faults if each.phase == phase and each.step in (None, step)]:
            self._faults.remove(fault)
            self._flips_bit |= fault.kind == "flip-bit"
            is_to_end = fault.kind == "cut" and self._cut_off()
            fault.strike()
            if is_to_end:  # shared memory cannot be cut, so this instance must stop by itself
                time.sleep(CUT_LIMIT_S)
                raise InjectedError(f"instance {fault.instance} is cut off, but its supervisor has not ended it")


def _number(given: Mapping[str, str], name: str) -> int:
    if not given[name].isdecimal():
        raise ValueError(f"{name}={given[name]} is not a whole number")
    return int(given[name])


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"seconds={text} is not a number of seconds")
    return seconds
