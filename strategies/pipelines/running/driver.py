"""Drivers that carry out a timetable on threads, one for each device of a replica, or one for each micro-batch."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from operator import itemgetter
from typing import TypeVar

from strategies.jax.replicas.devices import ReplicaDevices
from strategies.pipelines.timetable import StageAction, Timed, Timetable, in_order

_Any = TypeVar("_Any")

Perform = Callable[[int, StageAction], None]
"""(device, action) -> None: runs the device's part of an action, and returns when it is done."""


_ALL: AbstractContextManager[object] = nullcontext()

Part = tuple[int, StageAction]
"""A device, and an action of which the device runs its part."""

SHORT_S = 1.5e-4
"""If actions take less on average, they run one at a time: threads would only hand Python's lock to each other.

On two cores, PyTorch's blocks of 0.14 ms then cost 0.11 ms instead of 0.20, but blocks of 0.43 ms 0.31 instead of 0.17.
"""

_SHORT_AT_FIRST = 4
"""The number of actions that count as short before any has ended: the first is slow, because other threads start."""

_PATIENCE_S = 0.01
"""The first limit of a sleep. After it a thread looks whether its turn has come, and sleeps twice as long if not."""


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


def raise_first(begun: Sequence[Future[_Any]]) -> None:
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
        number: The number of the action in the graph.
        releases: The numbers of the actions of other threads that wait for it.
    """

    device: int
    action: StageAction
    number: int
    releases: tuple[int, ...]


@dataclass(frozen=True)
class ScheduleGraph:
    """The actions of a timetable with their dependencies between threads.

    Attributes:
        devices: The scheduled actions of each device.
        needs: For each action, by its number, the number of actions of other threads for which it waits.
    """

    devices: tuple[tuple[ScheduledAction, ...], ...]
    needs: tuple[int, ...]

    @classmethod
    def of(cls, timetable: Timetable, thread_of: Callable[[Part], object] = itemgetter(0)) -> ScheduleGraph:
        """Return the graph of a timetable.

        Args:
            timetable: The timetable.
            thread_of: Returns the thread that runs a part of an action, by default one for each device. A thread runs
                its parts in the order of the timetable.
        """
        needed = dict(_needed(timetable))
        numbers = {part: number for number, part in enumerate(needed)}
        needs = [0] * len(needed)
        releases: list[list[int]] = [[] for _ in needed]
        for part, before in needed.items():
            for one in before:
                if thread_of(one) != thread_of(part):
                    needs[numbers[part]] += 1
                    releases[numbers[one]].append(numbers[part])
        devices: list[list[ScheduledAction]] = [[] for _ in timetable.devices]
        for part, number in numbers.items():
            devices[part[0]].append(ScheduledAction(*part, number, tuple(releases[number])))
        return cls(tuple(map(tuple, devices)), tuple(needs))


def _needed(timetable: Timetable) -> Iterator[tuple[Part, Sequence[Part]]]:
    """Yield each part with its dependencies: producers of its inputs, and the previous part of its device."""
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
class ScheduleRunner:
    """A runner of one replica's actions, once in the order of a timetable, in the threads that call it.

    A thread of a device calls `follow`. Other threads call `wait` before each of their actions, and `done` after it.
    After an error all threads raise `AbandonedError` before their next action, and the runner cannot be used again.

    Attributes:
        schedule_graph: The graph of the timetable.
        begin_s: The time when the pipeline began, on the clock.
        clock: Returns seconds.
        short_s: If actions take less on average, they run one at a time; 0 if actions wait for each other.
    """

    schedule_graph: ScheduleGraph
    begin_s: float = 0.0
    clock: Callable[[], float] = time.perf_counter
    short_s: float = SHORT_S

    def __post_init__(self) -> None:
        self._needs = list(self.schedule_graph.needs)
        self._asleep: dict[int, threading.Lock] = {}  # by the number of the action for which a thread sleeps
        self._ready: deque[threading.Lock] = deque()  # of threads that may go on, and still sleep
        self._busy_s, self._ended = 0.0, _SHORT_AT_FIRST
        self._change = threading.Lock()
        self._has_failed = False
        self._spans: list[list[Timed]] = [[] for _ in self.schedule_graph.devices]

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
            actions = self.schedule_graph.devices[device]
            for scheduled, following in zip_longest(actions, actions[1:]):
                self.wait(scheduled)
                with at_once:
                    begin_s = self.clock()
                    perform(device, scheduled.action)
                    self.done(scheduled, begin_s, following)
        except BaseException:
            self.give_up()
            raise

    def wait(self, scheduled: ScheduledAction) -> None:
        """Wait until an action may begin.

        Raises:
            AbandonedError: If another thread has failed.
        """
        if self._needs[scheduled.number]:
            self._sleep(scheduled.number)
        if self._has_failed:
            raise AbandonedError(
                f"device {scheduled.device} gives up before the {scheduled.action}: another thread has failed"
            )

    def _sleep(self, number: int) -> None:
        with self._change:
            if self._has_failed or not self._needs[number]:
                return
            lock = self._asleep[number] = threading.Lock()
            lock.acquire()
        limit_s = _PATIENCE_S
        while not lock.acquire(timeout=limit_s):  # nobody wakes it while the only running thread waits for this one
            with self._change:
                if self._has_failed or not self._needs[number]:
                    with suppress(ValueError):
                        self._ready.remove(lock)
                    return
            limit_s *= 2

    def done(self, scheduled: ScheduledAction, begin_s: float, following: ScheduledAction | None = None) -> None:
        """Record an action that began at `begin_s` of the clock and ends now; wake threads that waited for it.

        Args:
            scheduled: The action.
            begin_s: The time when it began.
            following: The next action of this thread; None for none.
        """
        end_s = self.clock()
        times = (begin_s - self.begin_s, end_s - self.begin_s)
        self._spans[scheduled.device].append(Timed(scheduled.device, scheduled.action, *times))
        with self._change:
            self._busy_s += end_s - begin_s
            self._ended += 1
            for number in scheduled.releases:
                self._needs[number] -= 1
                if not self._needs[number] and number in self._asleep:
                    self._ready.append(self._asleep.pop(number))
            woken = [self._ready.popleft() for _ in range(self._how_many_to_wake(following))]
        for lock in woken:
            lock.release()

    def _how_many_to_wake(self, following: ScheduledAction | None) -> int:
        if self._busy_s >= self.short_s * self._ended:
            return len(self._ready)
        goes_on = following is not None and not self._needs[following.number]
        return 0 if goes_on else min(1, len(self._ready))

    def give_up(self) -> None:
        """End all threads before their next actions. May be called from any thread."""
        with self._change:
            self._has_failed = True
            woken = [*self._asleep.values(), *self._ready]
            self._asleep.clear()
            self._ready.clear()
        for lock in woken:
            lock.release()
