"""Timetables of pipelines, followed by threads, each of which carries one micro-batch through the stages."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from strategies.pipelines.running.driver import AbandonedError
from strategies.pipelines.timetable import ActionKind, StageAction, Timed, Timetable, in_order


@dataclass
class MicroBatches:
    """The gates of a timetable: each micro-batch's thread waits here until its next action may begin.

    Used for one step. A thread is woken once for each action, by the last of what the action needs.

    Attributes:
        followers: for each action, the actions that wait for its end.
    """

    timetable: Timetable
    followers: Mapping[StageAction, Sequence[StageAction]]
    clock: Callable[[], float] = time.perf_counter
    _missing: Counter[StageAction] = field(default_factory=Counter)  # how much of what an action needs has not ended
    _gates: dict[StageAction, threading.Lock] = field(default_factory=dict)  # locked until it is its turn
    _changing: threading.Lock = field(default_factory=threading.Lock)
    _begun_s: dict[StageAction, float] = field(default_factory=dict)
    _spans: list[Timed] = field(default_factory=list)
    _has_failed: bool = False

    def __post_init__(self) -> None:
        for following in self.followers.values():
            self._missing.update(following)
        self._gates = {action: threading.Lock() for action in self.followers}
        for action in self._missing:
            self._gates[action].acquire()
        self._start_s = self.clock()

    @property
    def spans(self) -> Sequence[Timed]:
        """The actions of all devices with their times, in the order of their beginnings. Updates come last."""
        spans = in_order(self._spans)
        if not self.timetable.training:
            return spans
        end_s = max(span.end_s for span in spans)
        return spans + [
            Timed(device, StageAction(ActionKind.UPDATE, stage, None), end_s, end_s)
            for stage, devices in enumerate(self.timetable.mapping)
            for device in devices
        ]

    def wait(self, action: StageAction) -> None:
        """Return when it is an action's turn.

        Raises:
            AbandonedError: another micro-batch has failed.
        """
        self._gates[action].acquire()
        if self._has_failed:
            raise AbandonedError(f"the {action} is given up: another micro-batch has failed")
        self._begun_s[action] = self.clock() - self._start_s

    def done(self, action: StageAction) -> None:
        """Mark an action as ended, and wake the threads whose actions now have all they need."""
        end_s = self.clock() - self._start_s
        for device in self.timetable.mapping[action.stage]:
            self._spans.append(Timed(device, action, self._begun_s[action], end_s))
        with self._changing:
            if not self._has_failed:
                for following in self.followers[action]:
                    self._missing[following] -= 1
                    if not self._missing[following]:
                        self._gates[following].release()

    def give_up(self) -> None:
        """Have all end that wait."""
        with self._changing:
            if not self._has_failed:
                self._has_failed = True
                for action, missing in self._missing.items():
                    if missing:
                        self._gates[action].release()


def followers_in(timetable: Timetable) -> Mapping[StageAction, Sequence[StageAction]]:
    """Return for each action those that need its end: by the data, or as the next ones of the device; no updates."""
    found: dict[StageAction, list[StageAction]] = {
        action: [] for actions in timetable.devices for action in actions if action.kind is not ActionKind.UPDATE
    }
    for actions in timetable.devices:
        own = [action for action in actions if action.kind is not ActionKind.UPDATE]
        for before, action in zip([None, *own], own, strict=False):
            for needed in {*timetable.dependencies(action), *([] if before is None else [before])}:
                found[needed].append(action)
    return found


def weights_behind(timetable: Timetable) -> Timetable:
    """Return the same actions, with those for weights where the thread of their micro-batch comes to them.

    The first part of a micro-batch's backward pass is one call of autograd through all stages, so its second parts come
    behind that, stage by stage. All others keep their order. A device makes a part for weights when it can do nothing
    else, in the order of micro-batches.

    Args:
        timetable: with a device for each stage, and backward passes in two parts.
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
        """Whether there is anything."""
        return bool(self._weights or self._others)

    def next(self, ended: set[StageAction]) -> StageAction | None:
        """Return the action that the device can begin now, if any."""
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
