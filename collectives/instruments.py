"""Instruments: observers of an instance's steps, phases and operations.

An instrument implements one or more of the protocols below. The working thread calls it directly. So the methods for
operations must return in well under a microsecond, and an exception that an instrument raises reaches the working
thread. The end of an operation, step or phase is reported only if it succeeded; after an error the next report is a
beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, ParamSpec, Protocol, TypeVar, cast, final, runtime_checkable

from collectives.calls import Call

DATA = "data"
"""Waiting for the next batch. The wait that finds the end of an epoch never ends as a phase."""
COMPILE = "compile"
"""Tracing and compiling the replicas' programs. The update's program is compiled inside the first `UPDATE`."""
FORWARD_BACKWARD = "forward and backward"
"""Dispatching the programs of the local replicas, and each wait for a bucket of gradients."""
EXCHANGE = "exchange"
"""Averaging a bucket of gradients over all replicas."""
UPDATE = "update"
"""Dispatching the update with the mean gradients."""
CHECKPOINT = "checkpoint"
"""The part of saving a checkpoint that interrupts training; files are written in the background."""
RECOVERY = "recovery"
"""Finding the surviving instances after a loss, and the work that they have completed."""
PHASES = (DATA, COMPILE, FORWARD_BACKWARD, EXCHANGE, UPDATE, CHECKPOINT, RECOVERY)

Item = TypeVar("Item")
Arguments = ParamSpec("Arguments")
_END: Any = object()


@runtime_checkable
class SeesOperations(Protocol):
    """An observer of this rank's synchronous collectives, and of waits for named collectives."""

    def operation_begins(self, number: int, call: Call) -> None:
        """Note that the `number`-th collective, counted from 1, begins; `call` has its kind, name and bytes."""


@runtime_checkable
class SeesEnds(Protocol):
    """An observer of the ends of collectives."""

    def operation_ends(self) -> None:
        """Note that the collective has succeeded. A named one had a beginning only if the program waited for it."""


@runtime_checkable
class SeesWaits(Protocol):
    """An observer of long waits for other ranks, also in the thread of named collectives."""

    def waiting_for(self, instances: Sequence[int]) -> None:
        """Note that these instances have not come yet; called repeatedly during the wait."""


@runtime_checkable
class SeesData(Protocol):
    """An observer of the moment when all ranks have come to an operation and its data moves."""

    def data_moves(self, nbytes: int) -> None:
        """Note that all ranks have arrived, and that `nbytes` of each contribution move now or have arrived too."""


@runtime_checkable
class SeesSteps(Protocol):
    """An observer of training steps."""

    def step_begins(self, step: int) -> None:
        """Note that step `step`, counted from 0, begins, or other work after it, e.g. an evaluation."""


@runtime_checkable
class SeesStepEnds(Protocol):
    """An observer of the results of steps."""

    def step_ends(self, rows: int, loss: float) -> None:
        """Note that the step has succeeded, with `rows` of data on this instance and the mean loss of all replicas."""


@runtime_checkable
class SeesStepNumbers(Protocol):
    """An observer of numbers of steps beside the loss, such as norms. It has to see the ends of steps, too."""

    def step_numbers(self, numbers: Mapping[str, float]) -> None:
        """Note numbers of the step by name, before its end is reported."""


@runtime_checkable
class SeesStepsMade(Protocol):
    """An observer of steps that does not wait for their results."""

    def steps_made(self, steps: int, rows: int, loss: Callable[[], float | None]) -> None:
        """Note that `steps` steps have been made or dispatched, with `rows` rows of data on this instance.

        `loss` returns the mean loss over all replicas in the last of these steps, or None while it is being computed.
        This thread may call it later.
        """


@runtime_checkable
class SeesReplicas(Protocol):
    """An observer of local replicas that work in their own threads, if an instance has several replicas."""

    def replica_begins(self, replica: int, stage: int) -> None:
        """Note that the program of a replica begins; in a pipeline: that this stage begins a micro-batch."""

    def replica_ends(self, replica: int, stage: int, part: int) -> None:
        """Note that a part of its gradients (in a pipeline: a micro-batch) is finished and the next part begins."""


@runtime_checkable
class SeesPhases(Protocol):
    """An observer of the phases of a step, one of `PHASES` at a time; only COMPILE may occur inside another phase."""

    def phase_begins(self, phase: str) -> None:
        """Note that a phase begins; a step may have several phases of the same name."""

    def phase_ends(self, phase: str) -> None:
        """Note that the phase has succeeded."""


Instrument = (
    SeesOperations
    | SeesEnds
    | SeesWaits
    | SeesData
    | SeesSteps
    | SeesStepEnds
    | SeesStepNumbers
    | SeesStepsMade
    | SeesReplicas
    | SeesPhases
)


class Supervisor(Protocol):
    """The process that watches over the instances of a job from outside and may end their waits."""

    @property
    def is_released(self) -> bool:
        """Whether the supervisor has found that waiting for the others is useless; asked only during long waits."""

    def carry_on(self, lost: int) -> None:
        """Note that `lost` instances of the job are lost and the others continue without them."""


def _unseen(first: object = None, second: object = None, third: object = None) -> None:
    """Do nothing: no instrument is attached."""


@final
class Instruments:
    """All instruments of an instance, called in the given order, and its supervisor.

    Args:
        attached: Instruments.
        supervisor: Supervisor of the instance, or None.

    Attributes:
        attached: Instruments.
        during: For each of `PHASES` a reusable context manager, to be entered while the phase lasts.

    The other attributes are named after the protocols' methods and call these methods of all instruments. Several
    threads call `replica_begins` and `replica_ends`.
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
        "step_numbers",
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
        self.step_numbers = _told_to([each.step_numbers for each in attached if isinstance(each, SeesStepNumbers)])
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
        """Whether the supervisor has found that waiting for the others is useless."""
        return self._supervisor is not None and self._supervisor.is_released

    def carry_on(self, lost: int) -> None:
        """Tell the supervisor that `lost` instances are lost and the others continue without them."""
        if self._supervisor is not None:
            self._supervisor.carry_on(lost)

    def each(self, name: str, items: Iterator[Item]) -> Iterator[Item]:
        """Yield the items; each wait for an item is a phase `name`, also the wait that finds the end."""
        phase = self.during[name]
        while True:
            with phase:
                found = next(items, _END)
            if found is _END:
                return
            yield found


@final
class _Phase:
    """The context manager of one phase, for `Instruments.during`."""

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
    """The context manager of a phase without observers: 135 ns, against 160 ns of `contextlib.nullcontext`."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def is_seen(told: Callable[Arguments, None]) -> bool:
    """Return whether any instrument observes this event; `told` is an attribute of `Instruments`."""
    return told is not _unseen


def _told_to(seers: Sequence[Callable[Arguments, None]]) -> Callable[Arguments, None]:
    """Combine functions into one; return the only function itself."""
    if len(seers) < 2:
        return seers[0] if seers else cast("Callable[Arguments, None]", _unseen)

    def tell(*arguments: Arguments.args, **named: Arguments.kwargs) -> None:
        for see in seers:
            see(*arguments, **named)

    return tell
