"""Timetables of pipelines, carried out by one thread per micro-batch, which takes it through the stages."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from strategies.pipelines.running.driver import SHORT_S, Course, Drive, ScheduledAction
from strategies.pipelines.timetable import ActionKind, StageAction, Timed, Timetable


class MicroBatchCourse:
    """The course of a timetable, with a thread for each micro-batch.

    Args:
        timetable: A timetable with one device for each stage.

    Attributes:
        timetable: The timetable.
        course: The course.
        of_each: For each micro-batch, its actions in the order of its thread: forward, back, then weights.
    """

    def __init__(self, timetable: Timetable) -> None:
        self.timetable = timetable
        self.course = Course.of(timetable, lambda part: part[1].micro_batch)
        self.of_each: list[list[ScheduledAction]] = [[] for _ in range(timetable.num_micro_batches)]
        for turn in sorted(chain.from_iterable(self.course.devices), key=_place):
            if turn.action.micro_batch is not None:
                self.of_each[turn.action.micro_batch].append(turn)


def _place(turn: ScheduledAction) -> tuple[int, int]:
    kind, stage = turn.action.kind, turn.action.stage
    if kind is ActionKind.FORWARD:
        return 0, stage
    return (2, stage) if kind is ActionKind.BACKWARD_WEIGHTS else (1, -stage)


class MicroBatches:
    """The turns of micro-batches, each in a thread of its own, during one pass through a timetable.

    Args:
        course: The course of the micro-batches.
        meet: Whether actions wait for those of other replicas.
    """

    def __init__(self, course: MicroBatchCourse, meet: bool = False) -> None:
        self._course = course
        self._drive = Drive(course.course, time.perf_counter(), short_s=0.0 if meet else SHORT_S)

    def turns_of(self, micro_batch: int) -> MicroBatchTurns:
        """Return the turns of a micro-batch."""
        return MicroBatchTurns(self._drive, self._course.of_each[micro_batch], self._course.timetable)

    @property
    def spans(self) -> Sequence[Timed]:
        """The actions of all devices with their times, sorted by their beginnings; updates come last."""
        spans = list(self._drive.spans)
        timetable = self._course.timetable
        if not timetable.training:
            return spans
        end_s = max(span.end_s for span in spans)
        return spans + [
            Timed(device, StageAction(ActionKind.UPDATE, stage, None), end_s, end_s)
            for stage, devices in enumerate(timetable.mapping)
            for device in devices
        ]


class MicroBatchTurns:
    """The turns of one micro-batch: its thread calls `wait` before each action, and `done` after it.

    Args:
        drive: The drive of all micro-batches.
        turns: The actions of this one, in their order.
        timetable: The timetable.
    """

    def __init__(self, drive: Drive, turns: Sequence[ScheduledAction], timetable: Timetable) -> None:
        self.timetable = timetable
        self._drive = drive
        self._turns = turns
        self._next = 0
        self._begun_s = 0.0

    def wait(self, kind: ActionKind, stage: int) -> None:
        """Wait for the turn of the next action. `kind` and `stage` say what the thread is about to do.

        Raises:
            AbandonedError: If another micro-batch has failed.
        """
        turn = self._turns[self._next]
        assert (turn.action.kind, turn.action.stage) == (kind, stage), f"{kind} of stage {stage}, not {turn.action}"
        self._drive.wait(turn)
        self._begun_s = self._drive.clock()

    def done(self) -> None:
        """Mark the action as ended, and wake threads that wait for it."""
        turn = self._turns[self._next]
        self._next += 1
        following = self._turns[self._next] if self._next < len(self._turns) else None
        self._drive.done(turn, self._begun_s, following)

    def give_up(self) -> None:
        """End the waits of all micro-batches."""
        self._drive.give_up()


def weights_behind(timetable: Timetable) -> Timetable:
    """Move the weight parts of backward passes behind the input parts, and return the new timetable.

    The input part of a micro-batch's backward pass is one call of autograd through all stages. So its weight parts come
    after that call, stage by stage; other actions keep their order. A device computes weight parts, in the order of
    micro-batches, when no other action is ready.

    Args:
        timetable: A timetable with a device for each stage, and backward passes in two parts.
    """
    ended: set[StageAction] = set()
    found: list[list[StageAction]] = [[] for _ in timetable.devices]
    waiting = [_Waiting(timetable, actions) for actions in timetable.devices]
    while any(each.is_left for each in waiting):
        begun = [each.next(ended) for each in waiting]
        for actions, action in zip(found, begun, strict=True):
            if action is not None:
                actions.append(action)
                ended.add(action)
    updates = [[action for action in actions if action.kind is ActionKind.UPDATE] for actions in timetable.devices]
    return replace(timetable, devices=tuple((*one, *last) for one, last in zip(found, updates, strict=True)))


class _Waiting:
    """The actions that a device has not begun."""

    def __init__(self, timetable: Timetable, actions: tuple[StageAction, ...]) -> None:
        self._timetable = timetable
        weights = [action for action in actions if action.kind is ActionKind.BACKWARD_WEIGHTS]
        self._weights = deque(sorted(weights, key=lambda action: (action.micro_batch or 0, action.stage)))
        self._others = deque(one for one in actions if one.kind not in (ActionKind.BACKWARD_WEIGHTS, ActionKind.UPDATE))

    @property
    def is_left(self) -> bool:
        """Whether there are actions left."""
        return bool(self._weights or self._others)

    def next(self, ended: set[StageAction]) -> StageAction | None:
        """Remove and return an action that the device can begin now; None if every action must wait."""
        for queue in (self._others, self._weights):
            if queue and ended.issuperset(self._needed(queue[0])):
                return queue.popleft()
        return None

    def _needed(self, action: StageAction) -> Iterator[StageAction]:
        yield from self._timetable.dependencies(action)
        if action.kind is ActionKind.BACKWARD_WEIGHTS:
            yield StageAction(ActionKind.BACKWARD_INPUTS, 0, action.micro_batch)
            if action.stage:
                yield StageAction(ActionKind.BACKWARD_WEIGHTS, action.stage - 1, action.micro_batch)
