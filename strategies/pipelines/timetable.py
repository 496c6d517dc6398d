"""The actions of each device of a pipeline in their order, checked before anything runs.

A schedule makes a timetable, and an engine carries it out. Each device runs its own actions in their order; an action
begins as soon as its `dependencies` are done. A timetable does not depend on the computations of stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple


class ActionKind(Enum):
    """The kinds of actions. The backward pass is one action, or two: for the inputs, and for the weights."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUTS = "backward of inputs"
    BACKWARD_WEIGHTS = "backward of weights"
    UPDATE = "update"


@dataclass(frozen=True)
class StageAction:
    """An action of a device: a pass of a stage for one micro-batch, or the stage's update.

    Attributes:
        kind: The kind of action.
        stage: The number of the stage.
        micro_batch: The number of the micro-batch; None for an update, which serves all of them.
    """

    kind: ActionKind
    stage: int
    micro_batch: int | None

    def __str__(self) -> str:
        of_batch = "" if self.micro_batch is None else f" for micro-batch {self.micro_batch}"
        return f"{self.kind.value} of stage {self.stage}{of_batch}"


class Timed(NamedTuple):
    """An action of a device with its begin and end, measured or planned, from the begin of the pipeline."""

    device: int
    action: StageAction
    begin_s: float
    end_s: float


Places = tuple[tuple[int, ...], ...]
"""The devices of each stage: several if the stage is a list of functions, or is sharded over devices."""

Durations = Mapping[tuple[ActionKind, int], float]
"""(kind, stage) -> the duration of the action."""

PARTS = {ActionKind.BACKWARD: 2}
"""The default durations of actions that are not 1: a whole backward pass has two parts."""


def placed(mapping: Sequence[int | Sequence[int]]) -> Places:
    """Return a device, or a list of devices, for each stage, as `Places`."""
    return tuple((devices,) if isinstance(devices, int) else tuple(devices) for devices in mapping)


@dataclass(frozen=True)
class Timetable:
    """The actions of a pipeline for one update; without training, for one round of micro-batches.

    Attributes:
        devices: For each device, its actions in their order. All devices of a stage have its actions. An action is done
            when all of them have done their part.
        mapping: The devices of each stage.
        num_micro_batches: The number of micro-batches that go through the pipeline.
        training: Whether there are backward passes and updates.
        in_turn: Whether a micro-batch enters the pipeline only after the one before has left it.

    Raises:
        ValueError: If an action is missing, twice or on a wrong device. If an update is not last, or devices would wait
            for each other forever. If micro-batches overtake each other, which would reorder sums.
    """

    devices: tuple[tuple[StageAction, ...], ...]
    mapping: Places
    num_micro_batches: int
    training: bool
    in_turn: bool = False

    def __post_init__(self) -> None:
        for device, actions in enumerate(self.devices):
            self._refuse_others(device, actions)
            _refuse_overtaking(device, actions)
        self.timed()

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.mapping)

    @cached_property
    def has_split_backward(self) -> bool:
        """Whether backward passes are two actions, for inputs and for weights."""
        return any(action.kind is ActionKind.BACKWARD_INPUTS for actions in self.devices for action in actions)

    def actions_of(self, stage: int) -> Iterator[StageAction]:
        """Yield the actions of a stage, which each of its devices carries out."""
        for micro_batch in range(self.num_micro_batches):
            yield StageAction(ActionKind.FORWARD, stage, micro_batch)
            if self.training:
                yield from (StageAction(kind, stage, micro_batch) for kind in self._backward)
        if self.training:
            yield StageAction(ActionKind.UPDATE, stage, None)

    def dependencies(self, action: StageAction) -> tuple[StageAction, ...]:
        """Return the actions that must end before an action begins, besides earlier actions of its device."""
        stage, number = action.stage, action.micro_batch
        if number is None:
            return tuple(StageAction(self._backward[-1], stage, each) for each in range(self.num_micro_batches))
        if action.kind is ActionKind.FORWARD:
            if stage:
                return (StageAction(ActionKind.FORWARD, stage - 1, number),)
            return self._ends_of(number - 1) if self.in_turn and number else ()
        if action.kind is ActionKind.BACKWARD_WEIGHTS:
            return (StageAction(ActionKind.BACKWARD_INPUTS, stage, number),)
        behind = (StageAction(action.kind, stage + 1, number),) if stage + 1 < self.num_stages else ()
        return (StageAction(ActionKind.FORWARD, stage, number), *behind)

    def stash(self, stage: int) -> int:
        """Return the largest number of micro-batches for which a device keeps a stage's values at once.

        The values are kept from the forward pass until the end of the backward pass, or of its part for the weights.
        """
        if not self.training:
            return 0
        change = {ActionKind.FORWARD: 1, self._backward[-1]: -1}
        greatest = 0
        for device in self.mapping[stage]:
            kept = 0
            for action in self.devices[device]:
                kept += change.get(action.kind, 0) if action.stage == stage else 0
                greatest = max(greatest, kept)
        return greatest

    def timed(self, durations: Durations | None = None) -> tuple[Timed, ...]:
        """Return the timed actions of all devices, if each begins as soon as it can, sorted by begin time.

        Args:
            durations: The durations of actions. Missing ones are 1, or 2 for a whole backward pass.
        """
        return tuple(simulated(self, durations or {})) if durations else self._spans

    def length(self, durations: Durations | None = None) -> float:
        """Return the length of the timetable; see `timed`."""
        return max((span.end_s for span in self.timed(durations)), default=0.0)

    def bubble_share(self, durations: Durations | None = None) -> float:
        """Return the idle share of the devices' time, from the first begin to the last end."""
        return bubble_share(self.timed(durations), len(self.devices))

    @cached_property
    def _spans(self) -> tuple[Timed, ...]:
        return tuple(simulated(self, {}))

    @cached_property
    def _backward(self) -> tuple[ActionKind, ...]:
        """The kinds of actions of a backward pass. The last of them frees the values kept for it."""
        if self.has_split_backward:
            return ActionKind.BACKWARD_INPUTS, ActionKind.BACKWARD_WEIGHTS
        return (ActionKind.BACKWARD,)

    def _ends_of(self, micro_batch: int) -> tuple[StageAction, ...]:
        """Return the last actions for a micro-batch; after them all its actions are done."""
        if not self.training:
            return (StageAction(ActionKind.FORWARD, self.num_stages - 1, micro_batch),)
        if not self.has_split_backward:
            return (StageAction(ActionKind.BACKWARD, 0, micro_batch),)
        return tuple(StageAction(ActionKind.BACKWARD_WEIGHTS, stage, micro_batch) for stage in range(self.num_stages))

    def _refuse_others(self, device: int, actions: Sequence[StageAction]) -> None:
        stages = [stage for stage, devices in enumerate(self.mapping) if device in devices]
        expected = {action for stage in stages for action in self.actions_of(stage)}
        seen: set[StageAction] = set()
        updated = False
        for action in actions:
            if action not in expected or action in seen:
                why = "a second time" if action in seen else f"which does not belong to its stages {stages}"
                raise ValueError(
                    f"device {device} has the {action}, {why}; it needs each action of its stages once, "
                    f"for {self.num_micro_batches} micro-batches"
                )
            if updated and action.kind is not ActionKind.UPDATE:
                raise ValueError(
                    f"device {device} has the {action} after an update; stages of a device may share variables: "
                    "put updates after everything else"
                )
            seen.add(action)
            updated = action.kind is ActionKind.UPDATE
        if missing := expected - seen:
            lowest = min(missing, key=lambda action: (action.micro_batch or 0, action.stage, action.kind.value))
            raise ValueError(f"device {device} lacks the {lowest}; it needs each action of its stages once")
        if beyond := {one for devices in self.mapping for one in devices} - set(range(len(self.devices))):
            raise ValueError(f"there are actions for {len(self.devices)} devices, but stages on device {min(beyond)}")


def _refuse_overtaking(device: int, actions: Sequence[StageAction]) -> None:
    """Raise if micro-batches overtake each other. Sums over micro-batches need one order to have the same bits."""
    last: dict[tuple[ActionKind, int], int] = {}
    for action in actions:
        if action.micro_batch is not None:
            before = last.get((action.kind, action.stage), -1)
            if action.micro_batch < before:
                raise ValueError(
                    f"device {device} has the {action} after that for micro-batch {before}; the micro-batches of a "
                    "stage must keep their order"
                )
            last[action.kind, action.stage] = action.micro_batch


def simulated(timetable: Timetable, durations: Durations) -> list[Timed]:
    """Return the timed actions of all devices, if each begins as soon as it can, sorted by begin time.

    Raises:
        ValueError: If devices would wait for each other forever; the message names the actions.
    """
    ended: dict[StageAction, float] = {}
    parts = {action: len(set(timetable.mapping[action.stage])) for actions in timetable.devices for action in actions}
    place, free = [0] * len(timetable.devices), [0.0] * len(timetable.devices)
    spans: list[Timed] = []
    before = -1
    while len(spans) > before:
        before = len(spans)
        for device, actions in enumerate(timetable.devices):
            while place[device] < len(actions):
                action = actions[place[device]]
                needed = timetable.dependencies(action)
                if any(parts.get(one) for one in needed):
                    break
                begin = max([free[device], *[ended[one] for one in needed]])
                free[device] = begin + durations.get((action.kind, action.stage), float(PARTS.get(action.kind, 1)))
                parts[action] -= 1
                ended[action] = max(ended.get(action, 0.0), free[device])
                spans.append(Timed(device, action, begin, free[device]))
                place[device] += 1
    waiting = [device for device, actions in enumerate(timetable.devices) if place[device] < len(actions)]
    if waiting:
        action = timetable.devices[waiting[0]][place[waiting[0]]]
        lacking = next(one for one in timetable.dependencies(action) if parts.get(one))
        raise ValueError(
            f"devices {waiting} would wait forever: device {waiting[0]} for the {lacking}, before the {action}; "
            "that action must come earlier"
        )
    return in_order(spans)


def in_order(spans: Iterable[Timed]) -> list[Timed]:
    """Return actions sorted by begin time, and then by device."""
    return sorted(spans, key=lambda span: (span.begin_s, span.device, span.end_s))


def bubble_share(spans: Sequence[Timed], num_devices: int) -> float:
    """Return the idle share of the devices' time, from the first begin to the last end."""
    whole = max((span.end_s for span in spans), default=0.0) - min((span.begin_s for span in spans), default=0.0)
    busy = sum(span.end_s - span.begin_s for span in spans)
    return 1 - busy / (whole * num_devices) if whole else 0.0
