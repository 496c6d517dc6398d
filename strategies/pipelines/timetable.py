"""The actions of each device of a pipeline in their order, and the schedules that order them.

A schedule makes a timetable, and an engine carries it out. Each device runs its own actions in their order; an action
begins as soon as its `dependencies` are done. A timetable does not depend on the computations of stages.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import chain, zip_longest
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
            self._check_actions(device, actions)
            _check_micro_batch_order(device, actions)
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
        return tuple(simulated(self, durations or {}))

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

    def _check_actions(self, device: int, actions: Sequence[StageAction]) -> None:
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


def _check_micro_batch_order(device: int, actions: Sequence[StageAction]) -> None:
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


# ---- schedules


class PipelineSchedule(Enum):
    """The order in which the stages of a pipeline run.

    Semantics: the original's `PipelineSchedule`, which has the first three.
    """

    Grouped = 0
    Interleaved = 1
    Sequential = 2
    OneForwardOneBackward = 3
    ZeroBubble = 4


@dataclass(frozen=True)
class Schedule:
    """A way to order the actions of a pipeline.

    Attributes:
        name: The name by which `schedule_named` finds it.
        order: (mapping, number of micro-batches, training) -> the actions without updates, always in the same order.
            Raises NotImplementedError if the schedule cannot run this pipeline.
        overlap: (mapping, training) -> a divisor: the original requires that it divides the number of micro-batches.
        in_turn: Whether a micro-batch enters the pipeline only after the one before has left it.
    """

    name: str
    order: Callable[[Places, int, bool], Sequence[StageAction]]
    overlap: Callable[[Places, bool], int] = lambda mapping, training: 1
    in_turn: bool = False

    def timetable(self, mapping: Places, num_micro_batches: int, training: bool) -> Timetable:
        """Return the actions of each device.

        Raises:
            NotImplementedError: If the schedule cannot run this pipeline.
        """
        actions = self.order(mapping, num_micro_batches, training)
        return _from_order(actions, mapping, num_micro_batches, training, self.in_turn)


def schedule_named(name: PipelineSchedule | str) -> Schedule:
    """Return a schedule by its name, as "one_forward_one_backward" or "OneForwardOneBackward", or by its enum member.

    Raises:
        TypeError: If `name` is neither a member of the enum nor a string.
        ValueError: If there is no such schedule; the message lists the known ones.
    """
    if not isinstance(name, PipelineSchedule | str):
        raise TypeError(
            f"the pipeline schedule is {name!r}, a {type(name).__name__}; use a member of PipelineSchedule, or its name"
        )
    word = name.name if isinstance(name, PipelineSchedule) else name
    found = SCHEDULES.get(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", word).lower())
    if found is None:
        raise ValueError(f"there is no pipeline schedule {word!r}; use one of {', '.join(sorted(SCHEDULES))}")
    return found


# ---- in lock-step: a micro-batch visits one stage in each slot


def _grouped(mapping: Places, num_micro_batches: int, training: bool) -> list[StageAction]:
    """Order actions so that all stages work in every slot, each on another micro-batch: backward, then forward.

    It has the shortest time and needs the most memory: a stage with N stages behind it keeps 2N + 1 micro-batches.
    Semantics: the original's `PipelineSchedule.Grouped`.
    """
    return _in_slots(mapping, training, range(num_micro_batches))


def _interleaved(mapping: Places, num_micro_batches: int, training: bool) -> list[StageAction]:
    """Order actions so that a device works on one micro-batch per slot: a forward pass, then a backward pass in turn.

    It needs less memory than Grouped: a stage with N stages behind it keeps N + 1 micro-batches. Semantics: the
    original's `PipelineSchedule.Interleaved`.

    Raises:
        NotImplementedError: In training, if a device has several stages.
    """
    repeated = [device for device, count in Counter(one for each in mapping for one in each).items() if count > 1]
    if training and repeated:
        raise NotImplementedError(
            f"The pipelining schedule 'Interleaved' trains with one stage on each device, but device {repeated[0]} "
            "has several; use 'Grouped', 'Sequential' or 'OneForwardOneBackward', or a device for each stage"
        )
    begins, round_length = offsets(mapping, training), len(visits(mapping, training))
    turns = [divmod(number, len(begins)) for number in range(num_micro_batches)]
    return _in_slots(mapping, training, [whole * round_length + begins[place] for whole, place in turns])


def offsets(mapping: Places, training: bool) -> list[int]:
    """Return the slots of a round in which a micro-batch begins.

    An offset is chosen if its micro-batch never meets, on one device, a micro-batch of an offset chosen before.
    """
    there = visits(mapping, training)
    taken: list[int] = []
    for offset in range(len(there)):
        distances = [(offset - other) % len(there) for other in taken]
        if not any(devices & there[place - one] for one in distances for place, devices in enumerate(there)):
            taken.append(offset)
    return taken


def visits(mapping: Places, training: bool) -> list[frozenset[int]]:
    """Return the devices that a micro-batch visits, in order: forward, and in training back again."""
    there = [frozenset(devices) for devices in mapping]
    return [*there, *reversed(there)] if training else there


def _in_slots(mapping: Places, training: bool, begins: Sequence[int]) -> list[StageAction]:
    """Return the actions in lock-step, for the slots in which the micro-batches begin.

    A device that is visited several times in a slot takes the older micro-batch first. So the memory kept for its
    backward pass is freed before more is kept.
    """
    last = 2 * len(mapping) - 1
    slots: list[tuple[int, int, StageAction]] = []
    for micro_batch, begin in enumerate(begins):
        for stage in range(len(mapping)):
            slots.append((begin + stage, micro_batch, StageAction(ActionKind.FORWARD, stage, micro_batch)))
            if training:
                action = StageAction(ActionKind.BACKWARD, stage, micro_batch)
                slots.append((begin + last - stage, micro_batch, action))
    return [action for *_, action in sorted(slots, key=lambda slot: slot[:2])]


# ---- one micro-batch, or a few, after another


def _sequential(mapping: Places, num_micro_batches: int, training: bool) -> list[StageAction]:
    """Order actions so that each micro-batch passes all stages, forward and back, before the next one begins.

    It needs the least memory, but no two devices work at once: a stage keeps 1 micro-batch. Semantics: the original's
    `PipelineSchedule.Sequential`.
    """
    return _through_all(mapping, num_micro_batches, 1, training)


def serialized(mapping: Places, num_micro_batches: int, training: bool, iterations: int) -> Timetable:
    """Return the timetable of stages that take `iterations` micro-batches one after another in their turn.

    Each stage keeps `iterations` micro-batches. Semantics: the original's `batch_serialization_iterations`.

    Raises:
        NotImplementedError: If the stages are on several devices.
        ValueError: If the number of micro-batches is no multiple of `iterations`.
    """
    if len({device for devices in mapping for device in devices}) > 1:
        raise NotImplementedError(
            f"batch serialization needs all stages on one device, but they are on {list(mapping)}; map all stages to "
            "device 0, or leave batch_serialization_iterations at 1"
        )
    if num_micro_batches % iterations:
        below = num_micro_batches - num_micro_batches % iterations
        raise ValueError(
            f"there are {num_micro_batches} micro-batches, but batch_serialization_iterations is {iterations}; use a "
            f"multiple of it, such as {below or iterations}"
        )
    order = _through_all(mapping, num_micro_batches, iterations, training)
    return _from_order(order, mapping, num_micro_batches, training)


def _through_all(mapping: Places, num_micro_batches: int, iterations: int, training: bool) -> list[StageAction]:
    there = [(ActionKind.FORWARD, stage) for stage in range(len(mapping))]
    back = [(ActionKind.BACKWARD, stage) for stage in reversed(range(len(mapping)))] if training else []
    return [
        StageAction(kind, stage, number)
        for first in range(0, num_micro_batches, iterations)
        for kind, stage in there + back
        for number in range(first, first + iterations)
    ]


# ---- by an order of each stage


def _one_forward_one_backward(mapping: Places, num_micro_batches: int, training: bool) -> list[StageAction]:
    """Order actions by 1F1B: a stage runs as few forward passes ahead as possible, then backward and forward in turn.

    It needs as little memory as Interleaved, and works for any number of stages on a device and of micro-batches. With
    one stage on each device its order is that of Interleaved. Source: PipeDream-flush, Narayanan et al.,
    "Memory-Efficient Pipeline-Parallel DNN Training", 2021.
    """
    backward = [ActionKind.BACKWARD] if training else []
    return _merged(_going_ahead(len(mapping), num_micro_batches, backward), mapping, num_micro_batches, training)


def _zero_bubble(mapping: Places, num_micro_batches: int, training: bool) -> list[StageAction]:
    """Order actions with split backward passes: the weights' part, which no stage waits for, fills bubbles.

    It has a third of the bubbles of 1F1B, if the three parts of a stage take equally long. A stage with k stages before
    it computes the parts for the weights k micro-batches late. So every stage keeps as many micro-batches as there are
    stages. Source: ZB-H1 of Qi et al., "Zero Bubble Pipeline Parallelism", 2023.
    """
    backward = [ActionKind.BACKWARD_INPUTS, ActionKind.BACKWARD_WEIGHTS] if training else []
    return _merged(_going_ahead(len(mapping), num_micro_batches, backward), mapping, num_micro_batches, training)


def _going_ahead(num_stages: int, num_micro_batches: int, backward: Sequence[ActionKind]) -> list[list[StageAction]]:
    """Return each stage's actions: a forward pass per stage from it to the last, then backward and forward in turn.

    Args:
        num_stages: Number of stages.
        num_micro_batches: Number of micro-batches.
        backward: The kinds of a backward pass's parts. Stage k runs the second part, if there is one, k micro-batches
            late.
    """
    sequences = []
    for stage in range(num_stages):
        forward, *parts = (
            [StageAction(kind, stage, number) for number in range(num_micro_batches)]
            for kind in (ActionKind.FORWARD, *backward)
        )
        ahead = min(num_stages - stage, num_micro_batches) if backward else num_micro_batches
        late = [[None] * (place * stage) + part for place, part in enumerate(parts)]
        turns = chain.from_iterable(zip_longest(*late, forward[ahead:]))
        sequences.append([*forward[:ahead], *(action for action in turns if action is not None)])
    return sequences


def _merged(
    sequences: Sequence[Sequence[StageAction]], mapping: Places, num_micro_batches: int, training: bool
) -> list[StageAction]:
    """Merge the sequences of all stages into one order that keeps the order of each stage.

    A device with several stages runs the action that is ready first. If several are, it prefers a backward pass, then
    the oldest micro-batch. If the sequences could run with one device per stage, some action is always ready.
    """
    own = tuple((stage,) for stage in range(len(mapping)))
    apart = _from_order(chain.from_iterable(sequences), own, num_micro_batches, training)
    devices = [0.0] * (1 + max(max(devices) for devices in mapping))
    place = [0] * len(mapping)
    ended: dict[StageAction, float] = {action: float("inf") for sequence in sequences for action in sequence}
    order: list[StageAction] = []
    while len(order) < len(ended):
        ready = []
        for stage, sequence in enumerate(sequences):
            if place[stage] < len(sequence):
                action = sequence[place[stage]]
                times = [ended[one] for one in apart.dependencies(action)]
                begin = max([*times, *[devices[device] for device in mapping[stage]]])
                ready.append((begin, action.kind is ActionKind.FORWARD, action.micro_batch or 0, -stage, action))
        begin, *_, action = min(ready, key=lambda one: one[:4])
        end = begin + PARTS.get(action.kind, 1)
        for device in mapping[action.stage]:
            devices[device] = end
        ended[action] = end
        place[action.stage] += 1
        order.append(action)
    return order


def _from_order(
    actions: Iterable[StageAction], mapping: Places, num_micro_batches: int, training: bool, in_turn: bool = False
) -> Timetable:
    """Return a timetable in which devices have these actions in this order, and updates after them."""
    updates = [StageAction(ActionKind.UPDATE, stage, None) for stage in range(len(mapping))] if training else []
    devices: list[list[StageAction]] = [[] for _ in range(1 + max(max(devices) for devices in mapping))]
    for action in [*actions, *updates]:
        for device in sorted(set(mapping[action.stage])):
            devices[device].append(action)
    return Timetable(tuple(map(tuple, devices)), mapping, num_micro_batches, training, in_turn)


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule("grouped", _grouped, lambda mapping, training: len(visits(mapping, training))),
        Schedule("interleaved", _interleaved, lambda mapping, training: len(offsets(mapping, training))),
        Schedule("sequential", _sequential, in_turn=True),
        Schedule("one_forward_one_backward", _one_forward_one_backward),
        Schedule("zero_bubble", _zero_bubble),
    )
}
