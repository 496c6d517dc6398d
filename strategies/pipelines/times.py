"""The times of a pipeline's stages, and the bytes that stages keep for their backward passes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median

from strategies.pipelines.timetable import ActionKind, Durations, StageAction, Timed, Timetable

Average = Callable[[Sequence[float]], float]
"""A function such as `statistics.median`, `fmean` or `min`, which returns one time for several."""


@dataclass(frozen=True)
class StageTimes:
    """The times of each stage for one micro-batch, without recomputation, in seconds or any other unit.

    Attributes:
        forward: The time of each stage's forward pass.
        backward: The time of each stage's whole backward pass.
        weights: The part of `backward` for the weights; half of it by default.
        update: The time of each stage's update, once for all micro-batches; 0 by default.

    Raises:
        ValueError: If the lengths differ, a time is negative or not finite, or a part for the weights is longer than
            the whole backward pass.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weights: tuple[float, ...] = ()
    update: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", tuple(self.weights) or tuple(time / 2 for time in self.backward))
        object.__setattr__(self, "update", tuple(self.update) or (0.0,) * len(self.forward))
        for name in ("forward", "backward", "weights", "update"):
            object.__setattr__(self, name, tuple(map(float, getattr(self, name))))
            self._check(name, getattr(self, name))
        for stage, (part, whole) in enumerate(zip(self.weights, self.backward, strict=True)):
            if part > whole:
                raise ValueError(
                    f"stage {stage} takes {part:g} for the weights' part of its backward pass, but {whole:g} for all "
                    "of it; give the time of the whole backward pass"
                )

    def _check(self, name: str, times: Sequence[float]) -> None:
        if len(times) != len(self.forward):
            raise ValueError(f"there are {len(self.forward)} times of forward passes, but {len(times)} of {name}")
        for stage, time in enumerate(times):
            if not (math.isfinite(time) and time >= 0):
                raise ValueError(f"the time of stage {stage} for {name} is {time:g}; it must be 0 or more, and finite")

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.forward)

    @property
    def whole(self) -> tuple[float, ...]:
        """The times of each stage's forward and backward pass together."""
        return tuple(there + back for there, back in zip(self.forward, self.backward, strict=True))

    def durations(self, recompute: bool = False) -> Durations:
        """Return the duration of each action. With recomputation a backward pass begins with a forward pass."""
        found: dict[tuple[ActionKind, int], float] = {}
        for stage, forward in enumerate(self.forward):
            again = forward if recompute else 0.0
            found[ActionKind.FORWARD, stage] = forward
            found[ActionKind.BACKWARD, stage] = self.backward[stage] + again
            found[ActionKind.BACKWARD_INPUTS, stage] = self.backward[stage] - self.weights[stage] + again
            found[ActionKind.BACKWARD_WEIGHTS, stage] = self.weights[stage]
            found[ActionKind.UPDATE, stage] = self.update[stage]
        return found

    def scaled(self, factors: Sequence[float]) -> StageTimes:
        """Return the times of stages that take `factors` times as long; updates stay."""
        forward, backward, weights = (
            tuple(time * factor for time, factor in zip(times, factors, strict=True))
            for times in (self.forward, self.backward, self.weights)
        )
        return StageTimes(forward, backward, weights, self.update)

    def joined(self, sizes: Sequence[int]) -> StageTimes:
        """Group these stages, as parts, into new stages of neighbours, and return the times of the new stages.

        Args:
            sizes: The number of parts of each new stage.

        Raises:
            ValueError: If a stage has no part, or the sizes do not add up to the number of parts.
        """
        if sum(sizes) != self.num_stages or min(sizes, default=0) < 1:
            raise ValueError(
                f"stages of {list(sizes)} parts cannot be made of {self.num_stages} parts; every stage needs at least "
                "one part, and every part a stage"
            )
        bounds = list(pairwise(accumulate(sizes, initial=0)))
        joined = [
            tuple(sum(times[first:end]) for first, end in bounds)
            for times in (self.forward, self.backward, self.weights, self.update)
        ]
        return StageTimes(*joined)


def equal_times(num_stages: int) -> StageTimes:
    """Return the times of equal stages: forward pass 1, backward pass 2, each of its two parts 1, update 1."""
    return StageTimes((1,) * num_stages, (2,) * num_stages, (1,) * num_stages, (1,) * num_stages)


def measured_times(
    pipelines: Iterable[Sequence[Timed]], recompute: bool = False, average: Average = median
) -> StageTimes:
    """Return the times of measured stages, averaged over micro-batches and replicas.

    A stage on several devices takes as long as the slowest of them.

    Args:
        pipelines: For each replica, the timed actions of its devices.
        recompute: Whether their backward passes recomputed. If so, a forward pass is subtracted from each.
        average: The average of times of one kind. A median ignores a few actions that were interrupted.

    Raises:
        ValueError: If a stage has no forward pass.
    """
    times: dict[tuple[ActionKind, int], list[float]] = defaultdict(list)
    for spans in pipelines:
        longest: dict[StageAction, float] = {}
        for _, action, begin, end in spans:
            longest[action] = max(longest.get(action, 0.0), end - begin)
        for action, time in longest.items():
            times[action.kind, action.stage].append(time)
    stages = range(1 + max((stage for _, stage in times), default=-1))
    if lacking := [stage for stage in stages if (ActionKind.FORWARD, stage) not in times]:
        raise ValueError(f"no forward pass of stages {lacking} was measured; give the actions of a whole pipeline")
    forward, whole, inputs, weights, update = (
        tuple(average(times[kind, stage]) if (kind, stage) in times else 0.0 for stage in stages) for kind in ActionKind
    )
    if recompute:
        whole, inputs = (
            tuple(max(time - again, 0.0) for time, again in zip(of, forward, strict=True)) for of in (whole, inputs)
        )
    if not any((*inputs, *weights)):
        return StageTimes(forward, whole, (), update)
    return StageTimes(forward, tuple(map(sum, zip(inputs, weights, strict=True))), weights, update)


@dataclass(frozen=True)
class StashBytes:
    """The bytes that each stage keeps of one micro-batch until its backward pass, on each of its devices.

    Attributes:
        stashed: For each stage, the bytes of all that the backward pass needs, besides variables.
        inputs: For each stage, the bytes of its inputs, from which the rest can be recomputed.
    """

    stashed: tuple[int, ...]
    inputs: tuple[int, ...]

    def greatest(self, timetable: Timetable, recompute: bool) -> tuple[int, ...]:
        """Return, for each device, the most bytes that it keeps at once.

        With recomputation a device keeps inputs. It keeps all bytes only of micro-batches whose backward pass runs, or
        has run one part and waits for the other.
        """
        if not timetable.training:
            return (0,) * len(timetable.devices)
        kept = self.inputs if recompute else self.stashed
        return tuple(max(self._during(actions, kept, recompute), default=0) for actions in timetable.devices)

    def _during(self, actions: Sequence[StageAction], kept: Sequence[int], recompute: bool) -> Iterator[int]:
        """Yield the number of bytes that a device keeps during each of its actions."""
        total = 0
        for kind, stage in ((action.kind, action.stage) for action in actions):
            again = self.stashed[stage] if recompute else 0
            total += kept[stage] if kind is ActionKind.FORWARD else 0
            total += again if kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUTS) else 0
            yield total
            total -= kept[stage] + again if kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHTS) else 0
