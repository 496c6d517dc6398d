"""Drivers that carry out a timetable on threads, one for each device of a replica, or one for each micro-batch."""

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
"""(device, action) -> None: runs the device's part of an action, and returns when it is done."""


_ALL: AbstractContextManager[object] = nullcontext()

Part = tuple[int, StageAction]
"""A device, and an action of which the device runs its part."""


class AbandonedError(Exception):
    """Another thread of the replica has failed; the user should see that thread's error."""


def begin_devices(
    columns: Sequence[ReplicaDevices], follow: Callable[[int, int], None], failed: Callable[[BaseException], None]
) -> list[Future[None]]:
    """Start a thread for each device of all local replicas, which follows the device's actions.

    Args:
        columns: For each device of a replica, that device of all local replicas.
        follow: Called with a device, and the position of a replica.
        failed: Called with the error of the first device that fails, but not with `AbandonedError`.
    """

    def fail(error: BaseException) -> None:
        if not isinstance(error, AbandonedError):
            failed(error)

    return [future for device, column in enumerate(columns) for future in column.begin(partial(follow, device), fail)]


def raise_first(begun: Sequence[Future[None]]) -> None:
    """Wait until all threads have ended, and raise an error of one, `AbandonedError` only if there is no other."""
    errors = [error for error in (future.exception() for future in begun) if error is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, AbandonedError)):
        raise error


@dataclass(frozen=True)
class ScheduledAction:
    """An action of a device.

    Attributes:
        device: The device that runs the action, or its part of it.
        action: The action.
        needs: The numbers of the signals that it waits for. It needs no signal of earlier actions in its own thread.
        gives: The number of the signal that it gives; None if no thread waits for it.
    """

    device: int
    action: StageAction
    needs: tuple[int, ...]
    gives: int | None


@dataclass(frozen=True)
class Course:
    """A timetable in the form that drivers follow.

    Attributes:
        devices: The scheduled actions of each device.
        signals: The number of signals.
    """

    devices: tuple[tuple[ScheduledAction, ...], ...]
    signals: int

    @classmethod
    def of(cls, timetable: Timetable, thread_of: Callable[[Part], object] = itemgetter(0)) -> Course:
        """Return the course of a timetable.

        Args:
            timetable: The timetable.
            thread_of: Returns the thread that runs a part of an action, by default one for each device. A thread runs
                its parts in the order of the timetable.
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
    """Yield each part with the parts that it waits for: the makers of its data, and the part before on its device."""
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

    A thread of a device calls `follow`. Other threads call `wait` before each of their actions, and `done` after it.
    After an error all threads raise `AbandonedError` before their next action, and the drive cannot be used again.

    Attributes:
        course: The course of the timetable.
        begin_s: The time when the pipeline began, on the clock.
        clock: Returns seconds.
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
        """The timed actions of all devices after all have ended, sorted by begin time."""
        return in_order(chain.from_iterable(self._spans))

    def follow(self, device: int, perform: Perform, at_once: AbstractContextManager[object] = _ALL) -> None:
        """Run all actions of a device.

        Args:
            device: The number of the device in the replica.
            perform: Runs an action. All devices call it at once.
            at_once: Entered for each action; limits the number of actions that run at once.

        Raises:
            AbandonedError: If another device has failed.
            BaseException: The error of an action; then all other devices end.
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
        """Wait until an action may begin.

        Raises:
            AbandonedError: If another thread has failed.
        """
        for number in turn.needs:
            self._signals[number].wait()
        if self._has_failed:
            raise AbandonedError(f"device {turn.device} gives up before the {turn.action}: another thread has failed")

    def done(self, turn: ScheduledAction, begin_s: float) -> None:
        """Record an action that began at `begin_s` of the clock and ends now; wake the threads that wait for it."""
        times = (begin_s - self.begin_s, self.clock() - self.begin_s)
        self._spans[turn.device].append(Timed(turn.device, turn.action, *times))
        if turn.gives is not None:
            self._signals[turn.gives].set()

    def give_up(self) -> None:
        """End all threads before their next actions. May be called from any thread."""
        self._has_failed = True
        for signal in self._signals:
            signal.set()
