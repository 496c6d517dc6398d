"""The progress record: one page of shared memory in which an instance notes what it is doing.

The page is a memory file that the supervisor of the instance makes and the instance inherits. Writing is a
few stores to mapped memory, so it can be done around every collective; the supervisor reads the page without
asking, also after the instance has died.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collectives.calls import Call

DESCRIPTOR_VARIABLE = "POPRUN_PROGRESS_FD"
"""Descriptor of the memory page in which popdist notes the instance's collective calls for poprun."""
PAGE_BYTES = 4096
MAGIC = 0x32_4E55_5250_4F50  # "POPRUN2" as it lies in little-endian memory; the number is that of the layout
CUT_SIGNAL = signal.SIGRTMIN + 1
"""Asks the supervisor, whose process the page names, to lose its connection; that of an injected fault."""

_LABEL_OFFSET = 3072
_LABEL_BYTES = PAGE_BYTES - _LABEL_OFFSET
(_MAGIC, _OWNER, _STATE, _STEP, _NUMBER, _SINCE_NS, _LABEL_LENGTH, _WAITING_COUNT, _RELEASED, _GRACE_MS) = range(10)
_SUPERVISOR, _HEEDED, _PHASE = 10, 11, 12
(_STEPS, _SAMPLES, _TIMED_STEPS, _TIMED_SAMPLES, _FROM_NS, _TO_NS, _WAITED_NS, _HAS_LOSS, _LOSS) = range(13, 22)
_WAITING = 24
_WAITING_MOST = _LABEL_OFFSET // 8 - _WAITING


PHASES = ("", "data", "compile", "forward and backward", "exchange", "update", "checkpoint", "recovery")
"""What the number of a phase in the page stands for: none, or one of `collectives.instruments.PHASES`."""


class State(IntEnum):
    """The activity of an instance."""

    UNUSED = 0
    """The program keeps no record."""
    RUNNING = 1
    """Between collectives."""
    IN_COLLECTIVE = 2
    """Inside the collective that the record names."""
    LEAVING = 3
    """In its exit handlers, waiting for the others."""
    LEAVING_INSIDE = 4
    """The same, but the collective that the record names was never completed."""
    FINISHED = 5
    """All instances have agreed that the work is done."""
    JOINING = 6
    """In `popdist.init`, where MPI connects it with the others as soon as all of them have come."""


_STATES = frozenset(map(int, State))
_RUNNING, _IN_COLLECTIVE = State.RUNNING.value, State.IN_COLLECTIVE.value
_PHASE_NUMBERS = {phase: number for number, phase in enumerate(PHASES)}
_DOUBLE = struct.Struct("=d")
_now_ns = time.monotonic_ns


@dataclass(frozen=True)
class Made:
    """The results of the steps of an instance.

    What is timed begins with the end of the first step, which has compiled programs and waited for others to do so.

    Attributes:
        steps: how many it has made.
        samples: how many rows of data it had in them.
        timed_steps: those of them behind the first.
        timed_samples: the rows in these.
        from_s: when the first one ended, on the clock of `time.monotonic` of its host; 0 before.
        to_s: the same of the last one.
        waited_s: how long it has waited in between, in collectives, until all other instances had come to them.
        loss: the mean loss over all replicas in a step not long ago; None: it is not known.
    """

    steps: int = 0
    samples: int = 0
    timed_steps: int = 0
    timed_samples: int = 0
    from_s: float = 0.0
    to_s: float = 0.0
    waited_s: float = 0.0
    loss: float | None = None

    @property
    def timed_s(self) -> float:
        """The time of the timed steps, with what was between them."""
        return max(self.to_s - self.from_s, 0.0)


@dataclass(frozen=True)
class ProgressRecord:
    """The latest note of an instance.

    Attributes:
        step: the training step, 0 before the first.
        number: how many collectives it has entered; the number of the present or last one.
        label: what that collective is, such as `all_reduce 'gradients'`.
        state: what the instance is doing.
        since_s: when it began that, on the clock of `time.monotonic` of its host.
        waiting_for: the instances that a long wait is for.
        grace_s: how long it may take to end after SIGTERM, because it has something to save.
        heeded: what it has last seen to be said by the supervisor about waiting being of no use; 0: nothing.
        phase: of the step, one of `PHASES`.
        made: what has come of its steps.
        fault: why nothing else is known: what the page says that nobody can have noted.
    """

    step: int = 0
    number: int = 0
    label: str = ""
    state: State = State.UNUSED
    since_s: float = 0.0
    waiting_for: tuple[int, ...] = field(default=())
    grace_s: float = 0.0
    heeded: int = 0
    phase: str = ""
    made: Made = Made()
    fault: str = ""

    @property
    def has_joined(self) -> bool:
        """Whether the instance is connected with the others."""
        return self.since_s > 0 and not self.is_joining

    @property
    def is_joining(self) -> bool:
        """Whether it waits in `popdist.init` for the others."""
        return self.state is State.JOINING

    @property
    def is_inside(self) -> bool:
        """Whether a collective was entered and not completed."""
        return self.state in (State.IN_COLLECTIVE, State.LEAVING_INSIDE)

    @property
    def is_leaving(self) -> bool:
        """Whether the program is in its exit handlers."""
        return self.state in (State.LEAVING, State.LEAVING_INSIDE)


class Progress(ABC):
    """The line to the supervisor of an instance: how far it is in its life, and what the supervisor wants of it.

    What it works at meanwhile its instruments see. Not for several threads at once.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def is_supervised(self) -> bool:
        """Whether somebody reads the notes, and ends this process when another instance fails."""

    @property
    @abstractmethod
    def is_released(self) -> bool:
        """Whether the supervisor has said that waiting for the others is of no use any more."""

    @abstractmethod
    def joining(self) -> None:
        """Note that the program has come to `popdist.init` and waits for the others to come too."""

    @abstractmethod
    def joined(self) -> None:
        """Note that it is connected with them."""

    @abstractmethod
    def grace(self, seconds: float) -> None:
        """Note how long the program may take to end by itself after SIGTERM; 0 is as long as any other."""

    @abstractmethod
    def leaving(self) -> None:
        """Note that the program is in its exit handlers and waits for the other instances."""

    @abstractmethod
    def finished(self) -> None:
        """Note that every instance has agreed that the work is done, so that none waits for this one."""

    @abstractmethod
    def carry_on(self, lost: int) -> None:
        """Note that so many instances are lost without which the others carry on."""

    @abstractmethod
    def cut_off(self) -> bool:
        """Have the supervisor lose its connection, whereupon it ends this process; whether there is one."""


@final
class NoProgress(Progress):
    """The line of a process that nobody supervises: every note is dropped."""

    is_supervised = False
    is_released = False

    def joining(self) -> None: ...

    def joined(self) -> None: ...

    def grace(self, seconds: float) -> None: ...

    def leaving(self) -> None: ...

    def finished(self) -> None: ...

    def carry_on(self, lost: int) -> None: ...

    def cut_off(self) -> bool:
        return False


@final
class ProgressPage(Progress):
    """The writing side, and an instrument. Not for several threads at once; a note takes well under a microsecond."""

    __slots__ = (
        "_begun_ns",
        "_call",
        "_label_at",
        "_losses",
        "_lost",
        "_map",
        "_outer",
        "_pending",
        "_waited_ns",
        "_words",
    )

    is_supervised = True

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, PAGE_BYTES)
        view = memoryview(self._map)
        self._words = view.cast("Q")
        self._label_at = view[_LABEL_OFFSET:]
        self._losses = view[8 * _LOSS : 8 * _LOSS + 8]
        self._call: Call | None = None
        self._pending: Callable[[], float | None] | None = None
        self._begun_ns = self._waited_ns = self._lost = self._outer = 0
        self._words[_OWNER] = os.getpid()
        self._words[_STATE] = State.RUNNING.value

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> ProgressPage | NoProgress:
        """Return the page that the supervisor handed to this process, or nothing to write to.

        A page belongs to one process: a child of the program, which may inherit both variable and
        descriptor, gets none.
        """
        if page_owner(environ) not in (0, os.getpid()):
            return NoProgress()
        return cls(int(environ[DESCRIPTOR_VARIABLE]))

    def operation_begins(self, number: int, call: Call) -> None:
        """Note that the `number`-th collective begins.

        Args:
            number: counts the collectives of this instance, from 1.
            call: what it is. Keep the object: its label is copied only when it is another one.
        """
        words = self._words
        if call is not self._call:
            self._write_label(call)
        words[_NUMBER] = number
        words[_WAITING_COUNT] = 0
        self._begun_ns = words[_SINCE_NS] = _now_ns()
        words[_STATE] = _IN_COLLECTIVE

    def data_moves(self, nbytes: int) -> None:
        """Count for how long the collective has waited until all instances had come."""
        self._waited_ns += _now_ns() - self._begun_ns

    def operation_ends(self) -> None:
        """Note that the collective is complete. Not for one that failed: then the record says where."""
        words = self._words
        words[_STATE] = _RUNNING
        words[_WAITING_COUNT] = 0
        words[_SINCE_NS] = _now_ns()

    def waiting_for(self, instances: Sequence[int]) -> None:
        """Note that the wait inside the collective has become long, and for whom; called seldom."""
        words = self._words
        instances = instances[:_WAITING_MOST]
        for position, instance in enumerate(instances):
            words[_WAITING + position] = instance
        words[_WAITING_COUNT] = len(instances)

    def step_begins(self, step: int) -> None:
        """Note that the training step with this number begins."""
        words = self._words
        words[_STEP] = step
        words[_PHASE] = self._outer = 0

    def steps_made(self, steps: int, rows: int, loss: Callable[[], float | None]) -> None:
        """Count steps that have been made, and what they took; a loss that is not known yet is asked for again."""
        words = self._words
        words[_TO_NS] = now_ns = _now_ns()
        if words[_FROM_NS]:
            words[_TIMED_STEPS] += steps
            words[_TIMED_SAMPLES] += rows
            words[_WAITED_NS] = self._waited_ns
        else:
            self._waited_ns = 0
            words[_FROM_NS] = now_ns
        words[_STEPS] += steps
        words[_SAMPLES] += rows
        self._note_loss(loss)

    def phase_begins(self, phase: str) -> None:
        """Note what a step is at; compiling may be inside of another phase."""
        words = self._words
        self._outer = words[_PHASE]
        words[_PHASE] = _PHASE_NUMBERS[phase]

    def phase_ends(self, phase: str) -> None:
        """Note that it is over."""
        self._words[_PHASE] = self._outer
        self._outer = 0

    def grace(self, seconds: float) -> None:
        self._words[_GRACE_MS] = int(1000 * seconds)

    def joining(self) -> None:
        self._set_state(State.JOINING)

    def joined(self) -> None:
        self.operation_ends()  # from here on the record has the time since which the instance does what it does

    def leaving(self) -> None:
        inside = self._words[_STATE] in (State.IN_COLLECTIVE, State.LEAVING_INSIDE)
        self._set_state(State.LEAVING_INSIDE if inside else State.LEAVING)

    def finished(self) -> None:
        self._words[_WAITING_COUNT] = 0
        self._set_state(State.FINISHED)

    @property
    def is_released(self) -> bool:
        """Whether more instances are lost than those without which the others carry on already."""
        released = self._words[_RELEASED]
        if released > self._lost:
            self._words[_HEEDED] = released
        return released > self._lost

    def carry_on(self, lost: int) -> None:
        self._lost = lost

    def cut_off(self) -> bool:
        supervisor = self._words[_SUPERVISOR]
        if supervisor:
            os.kill(supervisor, CUT_SIGNAL)
        return bool(supervisor)

    def _note_loss(self, loss: Callable[[], float | None]) -> None:
        """Write it, or that of an earlier step that is known by now; of what is not known the oldest is kept."""
        pending = self._pending
        known = loss()
        if known is not None:
            self._pending = None
        elif pending is None or (known := pending()) is not None:
            self._pending = loss
        if known is not None:
            _DOUBLE.pack_into(self._losses, 0, known)
            self._words[_HAS_LOSS] = 1

    def _set_state(self, state: State) -> None:
        self._words[_SINCE_NS] = _now_ns()
        self._words[_STATE] = state

    def _write_label(self, call: Call) -> None:
        written = call.label[:_LABEL_BYTES]
        self._label_at[: len(written)] = written
        self._words[_LABEL_LENGTH] = len(written)
        self._call = call


def new_page() -> bytes:
    """Return the content of a page that nobody has written to."""
    return MAGIC.to_bytes(8, "little") + bytes(PAGE_BYTES - 8)


def parse_progress(page: bytes) -> ProgressRecord:
    """Return the record in a copy of a page; an empty record where there is no page."""
    if len(page) < PAGE_BYTES:
        return ProgressRecord()
    words = memoryview(page)[:PAGE_BYTES].cast("Q")
    if words[_MAGIC] != MAGIC:
        return ProgressRecord()
    if words[_STATE] not in _STATES:
        return ProgressRecord(fault=f"its state is {words[_STATE]}")
    waiting = min(words[_WAITING_COUNT], _WAITING_MOST)
    label = page[_LABEL_OFFSET : _LABEL_OFFSET + words[_LABEL_LENGTH]]
    return ProgressRecord(
        step=words[_STEP],
        number=words[_NUMBER],
        label=_printable(label.decode(errors="replace")),
        state=State(words[_STATE]),
        since_s=words[_SINCE_NS] / 1e9,
        waiting_for=tuple(words[_WAITING : _WAITING + waiting]),
        grace_s=words[_GRACE_MS] / 1e3,
        heeded=words[_HEEDED],
        phase=PHASES[words[_PHASE]] if words[_PHASE] < len(PHASES) else "",
        made=Made(
            steps=words[_STEPS],
            samples=words[_SAMPLES],
            timed_steps=words[_TIMED_STEPS],
            timed_samples=words[_TIMED_SAMPLES],
            from_s=words[_FROM_NS] / 1e9,
            to_s=words[_TO_NS] / 1e9,
            waited_s=words[_WAITED_NS] / 1e9,
            loss=_DOUBLE.unpack_from(page, 8 * _LOSS)[0] if words[_HAS_LOSS] else None,
        ),
    )


def _printable(text: str) -> str:
    """Return the text on one line, with nothing in it that a terminal obeys."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def page_owner(environ: Mapping[str, str]) -> int:
    """Return the pid of the living process that writes to the page of this instance; 0: none, -1: there is no page."""
    try:
        head = os.pread(int(environ.get(DESCRIPTOR_VARIABLE, "")), 16, 0)
    except (OSError, ValueError):
        return -1
    if len(head) < 16 or int.from_bytes(head[:8], "little") != MAGIC:
        return -1
    owner = int.from_bytes(head[8:], "little")
    return owner if owner and os.path.exists(f"/proc/{owner}") else 0
