"""Carries out a timetable: a thread for each device of a replica does the device's actions in their order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from strategies.pipelines.timetable import StageAction, Timed, Timetable, in_order
from strategies.replicas.devices import ReplicaDevices

Perform = Callable[[int, StageAction], None]
"""(device, action) -> None: does the device's part of an action, and returns when that is done."""


class AbandonedError(Exception):
    """Another device of the replica has failed; the error of that one is what the user has to see."""


def begin_devices(
    columns: Sequence[ReplicaDevices], follow: Callable[[int, int], None], failed: Callable[[BaseException], None]
) -> list[Future[None]]:
    """Have each device of all local replicas do what it has to do, in a thread.

    Args:
        columns: for each device of a replica those of all local replicas.
        follow: called with a device, and the position of a replica.
        failed: called with what the first device to fail has raised, and not with `AbandonedError`.
    """

    def fail(error: BaseException) -> None:
        if not isinstance(error, AbandonedError):
            failed(error)

    return [future for device, column in enumerate(columns) for future in column.begin(partial(follow, device), fail)]


def raise_first(begun: Sequence[Future[None]]) -> None:
    """Wait until all devices have ended; raise what one of them has raised by itself, if any has."""
    errors = [error for error in (future.exception() for future in begun) if error is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, AbandonedError)):
        raise error


@dataclass(frozen=True)
class ScheduledAction:
    """An action of a device.

    Attributes:
        action: what is done.
        needs: the numbers of the signals that it waits for; what its own device does before gives none.
        gives: the number of the signal that it gives; None if nobody waits for it.
    """

    action: StageAction
    needs: tuple[int, ...]
    gives: int | None


@dataclass(frozen=True)
class Course:
    """A timetable as drivers follow it.

    Attributes:
        devices: for each device its turns.
        signals: how many there are.
    """

    devices: tuple[tuple[ScheduledAction, ...], ...]
    signals: int

    @classmethod
    def of(cls, timetable: Timetable) -> Course:
        """Return the course of a timetable."""
        waited_for = {
            (other, needed)
            for device, actions in enumerate(timetable.devices)
            for action in actions
            for other, needed in _elsewhere(timetable, device, action)
        }
        numbers = {part: number for number, part in enumerate(sorted(waited_for, key=str))}
        return cls(
            tuple(
                tuple(
                    ScheduledAction(
                        action,
                        tuple(numbers[part] for part in _elsewhere(timetable, device, action)),
                        numbers.get((device, action)),
                    )
                    for action in actions
                )
                for device, actions in enumerate(timetable.devices)
            ),
            len(numbers),
        )


def _elsewhere(timetable: Timetable, device: int, action: StageAction) -> list[tuple[int, StageAction]]:
    """Return the parts of other devices in what has to be done before an action."""
    return [
        (other, needed)
        for needed in timetable.dependencies(action)
        for other in sorted(set(timetable.mapping[needed.stage]))
        if other != device
    ]


@dataclass
class Drive:
    """One replica's devices while a course is followed once; each device calls `follow` in a thread of its own.

    Attributes:
        course: of the timetable.
        perform: does the actions; called by all devices at once.
        begin_s: when the pipeline began, on the clock.
        clock: seconds.
        at_once: entered for each action; lets in as many as may be carried out at once.
    """

    course: Course
    perform: Perform
    begin_s: float = 0.0
    clock: Callable[[], float] = time.perf_counter
    at_once: AbstractContextManager[object] = field(default_factory=nullcontext)

    def __post_init__(self) -> None:
        self._signals = [threading.Event() for _ in range(self.course.signals)]
        self._has_failed = False
        self._spans: list[list[Timed]] = [[] for _ in self.course.devices]

    @property
    def spans(self) -> Sequence[Timed]:
        """When each device did what, once all have ended, in the order of the begins."""
        return in_order(chain.from_iterable(self._spans))

    def follow(self, device: int) -> None:
        """Do all that a device has to do.

        Raises:
            AbandonedError: another device has failed.
            BaseException: what an action has raised; all other devices end.
        """
        spans = self._spans[device]
        try:
            for turn in self.course.devices[device]:
                for number in turn.needs:
                    self._signals[number].wait()
                if self._has_failed:
                    raise AbandonedError(f"device {device} gives up before the {turn.action}: another one has failed")
                with self.at_once:
                    begin_s = self.clock()
                    self.perform(device, turn.action)
                    spans.append(Timed(device, turn.action, begin_s - self.begin_s, self.clock() - self.begin_s))
                if turn.gives is not None:
                    self._signals[turn.gives].set()
        except BaseException:
            self.give_up()
            raise

    def give_up(self) -> None:
        """Have all devices end before their next actions; from any thread."""
        self._has_failed = True
        for signal in self._signals:
            signal.set()
