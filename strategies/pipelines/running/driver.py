"""Carries out a timetable on threads, one for each device of a replica, or one for each micro-batch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import itemgetter

from strategies.jax.replicas.devices import ReplicaDevices
from strategies.pipelines.timetable import StageAction, Timed, Timetable, in_order

Perform = Callable[[int, StageAction], None]
"""(device, action) -> None: does the device's part of an action, and returns when that is done."""


_ALL: AbstractContextManager[object] = nullcontext()

Part = tuple[int, StageAction]
"""A device, and an action of which it does its part."""


class AbandonedError(Exception):
    """Another thread of the replica has failed; the error of that one is what the user has to see."""


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
    """Wait until all threads have ended; raise what one of them has raised by itself, if any has."""
    errors = [error for error in (future.exception() for future in begun) if error is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, AbandonedError)):
        raise error


@dataclass(frozen=True)
class ScheduledAction:
    """An action of a device.

    Attributes:
        device: that does it, or its part of it.
        action: what is done.
        needs: the numbers of the signals that it waits for; what its own thread does before gives none.
        gives: the number of the signal that it gives; None if nobody waits for it.
    """

    device: int
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
    def of(cls, timetable: Timetable, thread_of: Callable[[Part], object] = itemgetter(0)) -> Course:
        """Return the course of a timetable.

        Args:
            timetable: to be followed.
            thread_of: the thread that does a part of an action, by default one for each device. A thread does its
                parts in the order of the timetable.
        """
        needed = dict(_needed(timetable))
        elsewhere = {
            part: [one for one in before if thread_of(one) != thread_of(part)] for part, before in needed.items()
        }
        numbers = {one: number for number, one in enumerate(sorted({*chain(*elsewhere.values())}, key=str))}
        devices: list[list[ScheduledAction]] = [[] for _ in timetable.devices]
        for part, before in elsewhere.items():
            devices[part[0]].append(ScheduledAction(*part, tuple(numbers[one] for one in before), numbers.get(part)))
        return cls(tuple(map(tuple, devices)), len(numbers))


def _needed(timetable: Timetable) -> Iterator[tuple[Part, Sequence[Part]]]:
    """Yield each part with those that come before it: by the data, and the one before on its device."""
    for device, actions in enumerate(timetable.devices):
        for before, action in zip([None, *actions], actions, strict=False):
            by_data = [
                (other, one)
                for one in timetable.dependencies(action)
                for other in sorted(set(timetable.mapping[one.stage]))
            ]
            last = [] if before is None or (device, before) in by_data else [(device, before)]
            yield (device, action), by_data + last


@dataclass
class Drive:
    """One replica's threads while a course is followed once.

    A thread of a device calls `follow`; others wait for each of their turns, and say when it is done.

    Attributes:
        course: of the timetable.
        begin_s: when the pipeline began, on the clock.
        clock: seconds.
    """

    course: Course
    begin_s: float = 0.0
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self._signals = [threading.Event() for _ in range(self.course.signals)]
        self._has_failed = False
        self._spans: list[list[Timed]] = [[] for _ in self.course.devices]

    @property
    def spans(self) -> Sequence[Timed]:
        """When each device did what, once all have ended, in the order of the begins."""
        return in_order(chain.from_iterable(self._spans))

    def follow(self, device: int, perform: Perform, at_once: AbstractContextManager[object] = _ALL) -> None:
        """Do all that a device has to do.

        Args:
            device: of the replica.
            perform: does the actions; called by all devices at once.
            at_once: entered for each action; lets in as many as may be carried out at once.

        Raises:
            AbandonedError: another device has failed.
            BaseException: what an action has raised; all other devices end.
        """
        try:
            for turn in self.course.devices[device]:
                self.wait(turn)
                with at_once:
                    begin_s = self.clock()
                    perform(device, turn.action)
                    self.done(turn, begin_s)
        except BaseException:
            self.give_up()
            raise

    def wait(self, turn: ScheduledAction) -> None:
        """Return when all is done that an action needs.

        Raises:
            AbandonedError: another thread has failed.
        """
        for number in turn.needs:
            self._signals[number].wait()
        if self._has_failed:
            raise AbandonedError(f"device {turn.device} gives up before the {turn.action}: another thread has failed")

    def done(self, turn: ScheduledAction, begin_s: float) -> None:
        """Note an action that began at this time of the clock and ends now; wake the threads that wait for it."""
        times = (begin_s - self.begin_s, self.clock() - self.begin_s)
        self._spans[turn.device].append(Timed(turn.device, turn.action, *times))
        if turn.gives is not None:
            self._signals[turn.gives].set()

    def give_up(self) -> None:
        """Have all threads end before their next actions; from any thread."""
        self._has_failed = True
        for signal in self._signals:
            signal.set()
