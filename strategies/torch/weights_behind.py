"""Timetables that threads of micro-batches can follow where a device has several stages and backward passes two parts.

The first part of a micro-batch's backward pass is one call of autograd, through all stages. So its second parts, for
the gradients of parameters, come behind that, stage by stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from strategies.pipelines.timetable import ActionKind, StageAction, Timetable


def weights_behind(timetable: Timetable) -> Timetable:
    """The same actions with those for weights where the thread of their micro-batch comes to them.

    All others keep their order. A device makes a part for weights when it can do nothing else, in the order of
    micro-batches.

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
    """What a device has not done yet."""

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
        """What it can do now, if anything."""
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
