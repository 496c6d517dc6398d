"""Instruments: what sees an instance at work, step by step, phase by phase and operation by operation.

An instrument has the methods of one or more of the protocols below. Whoever does the work calls them, in its thread: so
those for operations have to return in well under a microsecond, and what one raises is raised there. Ends are told of
what went well only: after an error the next thing begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, ParamSpec, Protocol, TypeVar, cast, final, runtime_checkable

from collectives.calls import Call

DATA = "data"
"""Waiting for the next batch; it ends when there is one, so not at the end of an epoch."""
COMPILE = "compile"
"""Tracing and compiling a program of replicas. That of the update is compiled inside of the first one."""
FORWARD_BACKWARD = "forward and backward"
"""Beginning the programs of the local replicas, and each wait for a bucket of gradients."""
EXCHANGE = "exchange"
"""Averaging a bucket of gradients over all replicas."""
UPDATE = "update"
"""Beginning to apply the mean gradients."""
CHECKPOINT = "checkpoint"
"""What saving a checkpoint keeps the training from; files are written beside it."""
RECOVERY = "recovery"
"""Finding those who are left when others are lost, and what they have done meanwhile."""
PHASES = (DATA, COMPILE, FORWARD_BACKWARD, EXCHANGE, UPDATE, CHECKPOINT, RECOVERY)

Item = TypeVar("Item")
Arguments = ParamSpec("Arguments")
_END: Any = object()


@runtime_checkable
class SeesOperations(Protocol):
    """Sees the collectives of this rank begin, one after another; of named ones the wait for them."""

    def operation_begins(self, number: int, call: Call) -> None:
        """Note that the `number`-th collective, counted from 1, begins, with the kind, name and bytes of `call`."""


@runtime_checkable
class SeesEnds(Protocol):
    """Sees them end."""

    def operation_ends(self) -> None:
        """Note that it has ended well; the beginning of a named one is noted only if the program waited for it."""


@runtime_checkable
class SeesWaits(Protocol):
    """Sees waits for other ranks that have become long, also in the thread of named collectives."""

    def waiting_for(self, instances: Sequence[int]) -> None:
        """Note that these instances have not come yet; called again while the wait lasts."""


@runtime_checkable
class SeesData(Protocol):
    """Sees when all ranks have come to an operation, and what it then moves."""

    def data_moves(self, nbytes: int) -> None:
        """Note that all ranks have come, and `nbytes` of each contribution begin to move, or have come along."""


@runtime_checkable
class SeesSteps(Protocol):
    """Sees the steps of a training."""

    def step_begins(self, step: int) -> None:
        """Note that step `step`, counted from 0, begins; or work between two steps, such as an evaluation."""


@runtime_checkable
class SeesStepEnds(Protocol):
    """Sees what has come of them."""

    def step_ends(self, rows: int, loss: float) -> None:
        """Note that the step has ended well, with `rows` of data on this instance and the mean loss of all replicas."""


@runtime_checkable
class SeesStepsMade(Protocol):
    """Sees that steps are made, without waiting for what comes of them."""

    def steps_made(self, steps: int, rows: int, loss: Callable[[], float | None]) -> None:
        """Note that steps have been made, or begun, with so many rows of data on this instance.

        `loss` says what the mean loss over all replicas was in the last of them; None as long as it is being computed.
        It may be asked later, from this thread.
        """


@runtime_checkable
class SeesReplicas(Protocol):
    """Sees local replicas at work, each in its own thread, where an instance has several."""

    def replica_begins(self, replica: int, stage: int) -> None:
        """Note that the program of a replica begins; in a pipeline, that this stage begins with a micro-batch."""

    def replica_ends(self, replica: int, stage: int, part: int) -> None:
        """Note that a part of its gradients, or in a pipeline a micro-batch, is finished, and the next one begins."""


@runtime_checkable
class SeesPhases(Protocol):
    """Sees the phases of a step, one of `PHASES` at a time; but compiling may be inside of another one."""

    def phase_begins(self, phase: str) -> None:
        """Note that a phase begins; a step may have several of one name."""

    def phase_ends(self, phase: str) -> None:
        """Note that it has ended well."""


Instrument = (
    SeesOperations
    | SeesEnds
    | SeesWaits
    | SeesData
    | SeesSteps
    | SeesStepEnds
    | SeesStepsMade
    | SeesReplicas
    | SeesPhases
)


class Supervisor(Protocol):
    """The process that watches over the instances of a job from outside, and may end their waits."""

    @property
    def is_released(self) -> bool:
        """Whether it has found that waiting for the others is of no use; asked only while a wait is long."""

    def carry_on(self, lost: int) -> None:
        """Note that so many instances of the job are lost, and the others carry on without them."""


def _unseen(first: object = None, second: object = None, third: object = None) -> None:
    """Do nothing: no instrument looks."""


@final
class Instruments:
    """All instruments of an instance, which see what happens in the order in which they are given; and its supervisor.

    Args:
        attached: the instruments.
        supervisor: None where nobody supervises the instance.

    Attributes:
        attached: see above.
        during: for each of `PHASES` what a `with` statement enters while the phase lasts, any number of times.

    Its other attributes have the names of the protocols' methods, and call those of all instruments; `replica_begins`
    and `replica_ends` are called by several threads.
    """

    __slots__ = (
        "_supervisor",
        "attached",
        "data_moves",
        "during",
        "operation_begins",
        "operation_ends",
        "replica_begins",
        "replica_ends",
        "step_begins",
        "step_ends",
        "steps_made",
        "waiting_for",
    )

    def __init__(self, *attached: Instrument, supervisor: Supervisor | None = None) -> None:
        self.attached = attached
        self._supervisor = supervisor
        operations = [each.operation_begins for each in attached if isinstance(each, SeesOperations)]
        self.operation_begins = _told_to(operations)
        self.operation_ends = _told_to([each.operation_ends for each in attached if isinstance(each, SeesEnds)])
        self.waiting_for = _told_to([each.waiting_for for each in attached if isinstance(each, SeesWaits)])
        self.data_moves = _told_to([each.data_moves for each in attached if isinstance(each, SeesData)])
        self.step_begins = _told_to([each.step_begins for each in attached if isinstance(each, SeesSteps)])
        self.step_ends = _told_to([each.step_ends for each in attached if isinstance(each, SeesStepEnds)])
        self.steps_made = _told_to([each.steps_made for each in attached if isinstance(each, SeesStepsMade)])
        of_replicas = [each for each in attached if isinstance(each, SeesReplicas)]
        self.replica_begins = _told_to([each.replica_begins for each in of_replicas])
        self.replica_ends = _told_to([each.replica_ends for each in of_replicas])
        seers = [each for each in attached if isinstance(each, SeesPhases)]
        begins = _told_to([each.phase_begins for each in seers])
        ends = _told_to([each.phase_ends for each in seers])
        self.during: Mapping[str, AbstractContextManager[None]] = {
            name: _Phase(name, begins, ends) if seers else _UnseenPhase() for name in PHASES
        }

    @property
    def is_released(self) -> bool:
        """Whether the supervisor has said that waiting for the others is of no use."""
        return self._supervisor is not None and self._supervisor.is_released

    def carry_on(self, lost: int) -> None:
        """Tell the supervisor that so many instances are lost, without which the others carry on."""
        if self._supervisor is not None:
            self._supervisor.carry_on(lost)

    def each(self, name: str, items: Iterator[Item]) -> Iterator[Item]:
        """Yield the same items; each wait for the next one is a phase, also that in which none is left."""
        phase = self.during[name]
        while True:
            with phase:
                found = next(items, _END)
            if found is _END:
                return
            yield found


@final
class _Phase:
    """The block of one phase, for `Instruments.during`."""

    __slots__ = ("_begins", "_ends", "_name")

    def __init__(self, name: str, begins: Callable[[str], None], ends: Callable[[str], None]) -> None:
        self._name = name
        self._begins = begins
        self._ends = ends

    def __enter__(self) -> None:
        self._begins(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._ends(self._name)


@final
class _UnseenPhase:
    """The block of a phase at which no instrument looks; `contextlib.nullcontext` takes 160 ns instead of 135."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def is_seen(told: Callable[Arguments, None]) -> bool:
    """Return whether any instrument sees what is told by this attribute of `Instruments`."""
    return told is not _unseen


def _told_to(seers: Sequence[Callable[Arguments, None]]) -> Callable[Arguments, None]:
    """Return one function for all; the only one itself, where there is no other."""
    if len(seers) < 2:
        return seers[0] if seers else cast("Callable[Arguments, None]", _unseen)

    def tell(*arguments: Arguments.args, **named: Arguments.kwargs) -> None:
        for see in seers:
            see(*arguments, **named)

    return tell
