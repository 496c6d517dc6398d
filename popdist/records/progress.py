"""The progress record: one page of shared memory with an instance's current activity.

The supervisor makes the page as a memory file (memfd), and the instance inherits it. A note is a few stores to mapped
memory, cheap enough for every collective. The supervisor reads the page without the instance's help, also after the
instance has died.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, final
from weakref import WeakSet

from popdist.records.wanted import Wanted, unpack_wanted

if TYPE_CHECKING:
    from collectives.calls import Call

DESCRIPTOR_VARIABLE = "POPRUN_PROGRESS_FD"
"""Descriptor of the memory page in which popdist notes the instance's collective calls for poprun."""
PAGE_BYTES = 4096
MAGIC = 0x33_4E55_5250_4F50  # "POPRUN3" in little-endian memory; 3 is the version of the layout
CUT_SIGNAL = signal.SIGRTMIN + 1
"""Signal of an injected fault: it asks the supervisor, whose pid is in the page, to lose its connection."""

_LABEL_OFFSET = 3072
_LABEL_BYTES = PAGE_BYTES - _LABEL_OFFSET
(_MAGIC, _OWNER, _STATE, _STEP, _NUMBER, _SINCE_NS, _LABEL_LENGTH, _WAITING_COUNT, _RELEASED, _GRACE_MS) = range(10)
_SUPERVISOR, _HEEDED, _PHASE = 10, 11, 12
(_STEPS, _SAMPLES, _TIMED_STEPS, _TIMED_SAMPLES, _FROM_NS, _TO_NS, _WAITED_NS, _HAS_LOSS, _LOSS) = range(13, 22)
_ROLE, _WANTED, _CONSIDERED, _BEGUN, _READY, _CHANGING, _CALLED, _LACKING = range(22, 30)
_WAITING = 32
_WAITING_MOST = _LABEL_OFFSET // 8 - _WAITING


PHASES = ("", "data", "compile", "forward and backward", "exchange", "update", "checkpoint", "recovery")
"""The phases by their numbers in the page: none, or one of `collectives.instruments.PHASES`."""


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
    """In its exit handlers, after the collective that the record names did not complete."""
    FINISHED = 5
    """All instances have agreed that the work is done."""
    JOINING = 6
    """In `popdist.init`; MPI connects the instances as soon as all of them are here."""


class Role(IntEnum):
    """The role of the process among the processes of its job."""

    UNKNOWN = 0
    """The program has not said it, as in jobs whose instances are all active for ever."""
    ACTIVE = 1
    """It takes part in the training."""
    SPARE = 2
    """It waits until it becomes active."""
    LEAVING = 3
    """It has finished its program, and waits for the others at its exit."""
    FIXED = 4
    """It takes part in the training, which cannot go on with other instances."""


_STATES, _ROLES = frozenset(map(int, State)), frozenset(map(int, Role))
_RUNNING, _IN_COLLECTIVE = State.RUNNING.value, State.IN_COLLECTIVE.value
_LEAVING_STATES = frozenset((State.LEAVING.value, State.LEAVING_INSIDE.value))
_PHASE_NUMBERS = {phase: number for number, phase in enumerate(PHASES)}
_DOUBLE = struct.Struct("=d")
_now_ns = time.monotonic_ns


@dataclass(frozen=True)
class Made:
    """The steps that an instance has made, and their results.

    Timing begins with the end of the first step, which includes compilation and waiting for other compilations.

    Attributes:
        steps: Number of steps made.
        samples: Number of rows of data in these steps.
        timed_steps: Number of steps after the first one.
        timed_samples: Number of rows in the timed steps.
        from_s: End of the first step, on the host's `time.monotonic` clock; 0 before.
        to_s: End of the last step, on the same clock.
        waited_s: Time since `from_s` spent in collectives before all other instances had come.
        loss: Mean loss over all replicas in a recent step; None if unknown.
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
        """The duration of the timed steps, including the time between them."""
        return max(self.to_s - self.from_s, 0.0)


@dataclass(frozen=True)
class ProgressRecord:
    """The latest note of an instance.

    Attributes:
        step: Training step; 0 before the first.
        number: Number of the present or last collective, counted from 1.
        label: Operation and name of that collective, e.g. `all_reduce 'gradients'`.
        state: Activity of the instance.
        since_s: Begin of that activity, on the host's `time.monotonic` clock.
        waiting_for: Instances for which it has waited long.
        grace_s: Time that it may take to end after SIGTERM or SIGINT, because it has something to save.
        heeded: Number of lost instances in the supervisor's last release that the instance has seen; 0: none.
        phase: Phase of the step, one of `PHASES`.
        made: Steps made, and their results.
        role: Role of the process.
        wanted: Wish of poprun in the page.
        considered: Number of the last wish that the instance has considered in a membership change; 0: none.
        is_ready: Whether a spare has come to the place in the program at which the active instances are.
        is_changing: Whether the process waits for the others in a change of the members.
        lacks_values: Whether the process has been a spare, and has not got the variables of the others yet.
        fault: Reason why the page is invalid, or "".
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
    role: Role = Role.UNKNOWN
    wanted: Wanted = Wanted()
    considered: int = 0
    is_ready: bool = False
    is_changing: bool = False
    lacks_values: bool = False
    fault: str = ""

    @property
    def has_joined(self) -> bool:
        """Whether the instance is connected with the others."""
        return self.since_s > 0 and not self.is_joining

    @property
    def is_joining(self) -> bool:
        """Whether the instance waits for the others in `popdist.init`."""
        return self.state is State.JOINING

    @property
    def is_spare(self) -> bool:
        """Whether the process is a spare."""
        return self.role is Role.SPARE

    @property
    def is_inside(self) -> bool:
        """Whether a collective was entered and has not completed."""
        return self.state in (State.IN_COLLECTIVE, State.LEAVING_INSIDE)

    @property
    def is_leaving(self) -> bool:
        """Whether the program is in its exit handlers."""
        return self.state in (State.LEAVING, State.LEAVING_INSIDE)


@final
class ProgressPage:
    """The writing side of the page: the connection of an instance with its supervisor; also an instrument.

    A process without a supervisor writes to memory that nobody reads. One thread at a time calls the methods. The notes
    come in the order `joining`, `joined`, `leaving`, `finished`; some may be left out. No note waits for the
    supervisor, and each takes well under a microsecond.

    Args:
        descriptor: The supervisor's memory file; None without a supervisor.
        is_change_due: Function that returns whether the members change, as `is_resize_due` tells; only without a
            supervisor.

    Attributes:
        is_supervised: Whether a supervisor reads the notes, and ends this process when another instance fails.
    """

    def __init__(self, descriptor: int | None = None, is_change_due: Callable[[], bool] | None = None) -> None:
        self.is_supervised, self._is_change_due = descriptor is not None, is_change_due
        self._write_to(bytearray(PAGE_BYTES) if descriptor is None else mmap.mmap(descriptor, PAGE_BYTES))
        self._call: Call | None = None
        self._pending: Callable[[], float | None] | None = None
        self._begun_ns = self._waited_ns = self._lost = self._outer = 0
        self._wanted_word = self._considered_word = 0
        self._wanted = Wanted()
        self._heeds = False
        self._is_changing = False  # a change of the members is under way, and considers the wish
        self._words[_OWNER] = os.getpid()
        self._words[_STATE] = State.RUNNING.value
        self._words[_BEGUN] |= not self.is_supervised
        if self.is_supervised:
            _pages.add(self)

    def _write_to(self, page: mmap.mmap | bytearray) -> None:
        self._map = page
        view = memoryview(page)
        self._words = view.cast("Q")
        self._label_at = view[_LABEL_OFFSET:]
        self._losses = view[8 * _LOSS : 8 * _LOSS + 8]

    def leave_alone(self) -> None:
        """Write to memory of this process from now on, because it is a forked child of the page's owner."""
        self._write_to(bytearray(PAGE_BYTES))

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> ProgressPage:
        """Return the page that the supervisor gave to this process, or else one that nobody reads.

        A page belongs to one process. A child of the program may inherit both variable and descriptor, but gets no page
        of the supervisor.
        """
        if page_owner(environ) not in (0, os.getpid()):
            return cls()
        return cls(int(environ[DESCRIPTOR_VARIABLE]))

    def operation_begins(self, number: int, call: Call) -> None:
        """Note that the `number`-th collective begins.

        Args:
            number: Number of the collective of this instance, counted from 1.
            call: Call of the collective. Reuse the object: its label is copied only if the object is another one.
        """
        words = self._words
        if call is not self._call:
            self._write_label(call)
        words[_NUMBER] = number
        words[_WAITING_COUNT] = 0
        self._begun_ns = words[_SINCE_NS] = _now_ns()
        words[_STATE] = _IN_COLLECTIVE

    def data_moves(self, nbytes: int) -> None:
        """Add the time for which the collective has waited for other instances."""
        self._waited_ns += _now_ns() - self._begun_ns

    def operation_ends(self) -> None:
        """Note that the collective has succeeded. After a failure it is not called, so the record names the failure."""
        words = self._words
        words[_STATE] = _RUNNING
        words[_WAITING_COUNT] = 0
        words[_SINCE_NS] = _now_ns()

    def waiting_for(self, instances: Sequence[int]) -> None:
        """Note the instances for which a collective has waited long; called rarely."""
        words = self._words
        instances = instances[:_WAITING_MOST]
        for position, instance in enumerate(instances):
            words[_WAITING + position] = instance
        words[_WAITING_COUNT] = len(instances)

    def step_begins(self, step: int) -> None:
        """Note that this training step begins."""
        words = self._words
        words[_STEP] = step
        words[_PHASE] = self._outer = 0

    def steps_made(self, steps: int, rows: int, loss: Callable[[], float | None]) -> None:
        """Count steps, and note their time. If `loss` is not known yet, ask for it again at the next call."""
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
        """Note the phase of the step; COMPILE may begin inside another phase."""
        words = self._words
        self._outer = words[_PHASE]
        words[_PHASE] = _PHASE_NUMBERS[phase]

    def phase_ends(self, phase: str) -> None:
        """Note that the phase is over."""
        self._words[_PHASE] = self._outer
        self._outer = 0

    def grace(self, seconds: float) -> None:
        """Note how long the program may take to end by itself after SIGTERM or SIGINT; 0: the usual time."""
        self._words[_GRACE_MS] = int(1000 * seconds)

    def joining(self) -> None:
        """Note that the program is in `popdist.init` and waits for the other instances."""
        self._set_state(State.JOINING)

    def joined(self) -> None:
        """Note that the instance is connected with the others."""
        self.operation_ends()  # sets the time since which the instance is in its present state

    def leaving(self) -> None:
        """Note that the program is in its exit handlers and waits for the other instances."""
        inside = self._words[_STATE] in (State.IN_COLLECTIVE, State.LEAVING_INSIDE)
        self._set_state(State.LEAVING_INSIDE if inside else State.LEAVING)

    def finished(self) -> None:
        """Note that all instances agree on the end of the work; no instance waits for this one."""
        self._words[_WAITING_COUNT] = 0
        self._set_state(State.FINISHED)

    @property
    def is_released(self) -> bool:
        """Whether the supervisor counts more lost instances than the last call of `carry_on`, or has a new wish."""
        if not self.is_supervised:
            return False
        released = self._words[_RELEASED]
        if released > self._lost:
            self._words[_HEEDED] = released
            return True
        if self._is_changing:
            return False
        heeds = self._heeds or self._words[_ROLE] == Role.SPARE
        return self._is_called or (heeds and self._words[_STATE] not in _LEAVING_STATES and self.is_resize_due)

    @property
    def _is_called(self) -> bool:
        """Whether another process has begun the change for a wish that this one has not considered."""
        called = self._words[_CALLED]
        return called != 0 and called != self._words[_CONSIDERED]

    def heeds_wishes(self, is_so: bool) -> None:
        """Note whether waits may end for a wish of poprun: this process is in an operation that can be repeated."""
        self._heeds = is_so

    def changes(self) -> None:
        """Note that a change of the members begins, in which this process waits for all others."""
        self._words[_CHANGING] = 1

    def carry_on(self, lost: int) -> None:
        """Note that the others continue without `lost` lost instances in all; their change considers poprun's wish."""
        self._lost, self._is_changing = lost, True

    @property
    def is_resize_due(self) -> bool:
        """Whether poprun has a complete wish that no change has read yet; cheap enough for every step."""
        if self._is_change_due is not None:
            return self._is_change_due()
        word = self._words[_WANTED]
        if word == self._considered_word:
            return False
        latest = unpack_wanted(word)
        is_new = latest.is_complete and latest.number != self._words[_CONSIDERED]
        return is_new and self._words[_ROLE] != Role.FIXED

    @property
    def wanted(self) -> int:
        """The number of active instances in the complete wish of poprun; 0: no wish.

        A membership change reads the wish by this property. `may_be_active` and `takes_role` then belong to the same
        wish, even if poprun writes another one meanwhile. The wish stays valid for later changes.
        """
        self._wanted_word = self._words[_WANTED]
        self._wanted = unpack_wanted(self._wanted_word)
        return self._wanted.count if self._wanted.is_complete else 0

    @property
    def may_be_active(self) -> bool:
        """Whether this process may be active, by the wish that `wanted` has read last; complete or not."""
        return not self._wanted.is_barred

    @property
    def wish(self) -> int:
        """The number of the wish that `wanted` has read last, if it is complete; 0: no wish."""
        return self._wanted.number if self._wanted.is_complete else 0

    def takes_role(self, is_spare: bool, wish: int = 0) -> None:
        """Note the role of this process after a membership change.

        Args:
            is_spare: Whether it is a spare.
            wish: The number of the wish that the change has considered, the same on all processes; 0: none. A page may
                get the wish a moment later than another one, so this page may not have it yet.
        """
        if is_spare:
            self._words[_LACKING] = 1  # also as an active instance, until it has got the variables
        self._words[_ROLE] = Role.SPARE if is_spare else Role.ACTIVE  # first: poprun trusts it in a considered wish
        self._is_changing = False
        self._words[_CHANGING] = 0
        if wish:
            self._words[_CONSIDERED] = wish
        if wish and wish == self.wish:
            self._considered_word = self._wanted_word

    def takes_values(self) -> None:
        """Note that this process, which was a spare, has got the variables of the others."""
        self._words[_LACKING] = 0

    @property
    def is_to_begin(self) -> bool:
        """Whether poprun has started the program of this process; only a reserve asks."""
        return bool(self._words[_BEGUN])

    def catches_up(self) -> None:
        """Note that this spare has come to the place in the program at which the active instances are."""
        self._words[_READY] = 1

    def needs_all(self) -> None:
        """Note that the program cannot go on with other instances; later wishes for others have no effect.

        A spare cannot tell, because it has no batches; its note is dropped.
        """
        if self._words[_ROLE] != Role.SPARE:
            self._words[_ROLE] = Role.FIXED

    def cut_off(self) -> bool:
        """Make the supervisor lose its connection, so that it ends this process; return whether it is supervised."""
        supervisor = self._words[_SUPERVISOR]
        if supervisor:
            os.kill(supervisor, CUT_SIGNAL)
        return bool(supervisor)

    def _note_loss(self, loss: Callable[[], float | None]) -> None:
        """Write the loss, or an earlier loss that is known by now; of several unknown losses keep the oldest."""
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


_pages: WeakSet[ProgressPage] = WeakSet()


def _leave_pages_alone() -> None:
    for page in _pages:
        page.leave_alone()


os.register_at_fork(after_in_child=_leave_pages_alone)


def new_page() -> bytes:
    """Return the content of an unused page."""
    return MAGIC.to_bytes(8, "little") + bytes(PAGE_BYTES - 8)


def parse_progress(page: bytes) -> ProgressRecord:
    """Parse a copy of a page; return an empty record if it is not a page."""
    if len(page) < PAGE_BYTES:
        return ProgressRecord()
    words = memoryview(page)[:PAGE_BYTES].cast("Q")
    if words[_MAGIC] != MAGIC:
        return ProgressRecord()
    if words[_STATE] not in _STATES:
        return ProgressRecord(fault=f"its state is {words[_STATE]}")
    if words[_ROLE] not in _ROLES:
        return ProgressRecord(fault=f"its role is {words[_ROLE]}")
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
        role=Role(words[_ROLE]),
        wanted=unpack_wanted(words[_WANTED]),
        considered=words[_CONSIDERED],
        is_ready=bool(words[_READY]),
        is_changing=bool(words[_CHANGING]),
        lacks_values=bool(words[_LACKING]),
    )


def _printable(text: str) -> str:
    """Escape control characters, so that the text is safe to print on one line."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def page_owner(environ: Mapping[str, str]) -> int:
    """Return the pid of the living process that writes to this instance's page; 0: none; -1: there is no page."""
    try:
        head = os.pread(int(environ.get(DESCRIPTOR_VARIABLE, "")), 16, 0)
    except (OSError, ValueError):
        return -1
    if len(head) < 16 or int.from_bytes(head[:8], "little") != MAGIC:
        return -1
    owner = int.from_bytes(head[8:], "little")
    return owner if owner and os.path.exists(f"/proc/{owner}") else 0
