"""The choice of the fastest schedule for measured stages (schedule="auto"), and of better cuts into stages."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate

import jax
import jax.numpy as jnp
import numpy as np

from strategies.argument_checks import at_least
from strategies.errors import FailedPreconditionError
from strategies.jax.replicas.replicas import Replicas
from strategies.pipelines.mapping import timetable_for
from strategies.pipelines.pictures import said_s
from strategies.pipelines.running.replica_run import ReplicaStages, StashPolicy, StepArguments
from strategies.pipelines.running.stage_plan import StagePlan
from strategies.pipelines.running.staged import StageArray
from strategies.pipelines.schedules import PipelineSchedule, schedule_named
from strategies.pipelines.times import StageTimes, StashBytes, measured_times
from strategies.pipelines.timetable import ActionKind, Places, StageAction, Timed, Timetable

DIGITS = 6
"""Lengths that agree in this number of digits are equal; then less memory decides."""

ROUNDS = 4
"""The number of times that a micro-batch goes through all stages; the first time, with compilation, does not count."""

WORTH = 0.01
"""The smallest gain of a cut that is reported, as a share. Measured times differ by about as much."""

MIB = 2**20
SIZES = (("GiB", 2**30), ("MiB", MIB), ("KiB", 2**10))

# ---- the choice of a schedule


@dataclass(frozen=True)
class Candidate:
    """A way to run a pipeline.

    Attributes:
        schedule: The name of the schedule.
        recompute: Whether backward passes recompute forward passes.
        length_s: The simulated time of an update, in seconds.
        kept_bytes: For each device, the most bytes that it keeps for backward passes.
    """

    schedule: str
    recompute: bool
    length_s: float
    kept_bytes: tuple[int, ...]

    @cached_property
    def most_bytes(self) -> int:
        """The bytes kept on the device that keeps the most."""
        return max(self.kept_bytes)

    def __str__(self) -> str:
        return self.schedule + (" with recomputation" if self.recompute else "")


@dataclass(frozen=True)
class Choice:
    """The chosen candidate, and the reason.

    Attributes:
        chosen: The chosen candidate.
        others: All other candidates, the best first, whether they fit or not.
        reason: A sentence with the numbers that decided.
    """

    chosen: Candidate
    others: tuple[Candidate, ...]
    reason: str


def choose(
    times: StageTimes, stash: StashBytes, mapping: Places, num_micro_batches: int, memory_limit_bytes: int | None = None
) -> Choice:
    """Return the fitting schedule, with or without recomputation, that has the shortest simulated update.

    Among equally long ones, the candidate that keeps less is chosen; then the one without recomputation; then the first
    in `PipelineSchedule`. This is a pure function: with the same arguments all instances choose the same. So callers
    must first agree on times and bytes, as instance 0 measured them.

    Args:
        times: The times of the stages, in seconds, without recomputation.
        stash: The bytes that the stages keep.
        mapping: The devices of each stage.
        num_micro_batches: Number of micro-batches of an update. Schedules that cannot run it are left out.
        memory_limit_bytes: Limit of the bytes that a device keeps for backward passes, besides variables and other
            lasting memory; None for no limit.

    Raises:
        ValueError: If no candidate fits, or times and bytes are not given for every stage.
    """
    if {times.num_stages, len(stash.stashed), len(stash.inputs)} != {len(mapping)}:
        raise ValueError(
            f"there are {len(mapping)} stages, but times of {times.num_stages}, and bytes of {len(stash.stashed)} and "
            f"{len(stash.inputs)}; give all of them for each stage"
        )
    every = sorted(_candidates(times, stash, mapping, num_micro_batches), key=_order)
    fitting = [one for one in every if memory_limit_bytes is None or one.most_bytes <= memory_limit_bytes]
    if not fitting:
        least = min(every, key=lambda one: one.most_bytes)
        raise ValueError(
            f"no pipeline schedule keeps at most {_said(memory_limit_bytes or 0)} on a device: {least} keeps "
            f"the least, {_said(least.most_bytes)}; allow as much, make micro-batches smaller, or cut the model "
            "into more stages"
        )
    others = tuple(one for one in every if one is not fitting[0])
    return Choice(fitting[0], others, _reason(fitting[0], every, len(fitting), memory_limit_bytes))


def _candidates(times: StageTimes, stash: StashBytes, mapping: Places, count: int) -> Iterator[Candidate]:
    """Yield all candidates that can run, in the order of the enum."""
    for member in PipelineSchedule:
        schedule = schedule_named(member)
        try:
            timetable = timetable_for(schedule, mapping, count)
        except (FailedPreconditionError, NotImplementedError):
            continue
        for recompute in (False, True):
            length = timetable.length(times.durations(recompute))
            yield Candidate(schedule.name, recompute, length, stash.greatest(timetable, recompute))


def _order(one: Candidate) -> tuple[float, int, bool]:
    return float(f"{one.length_s:.{DIGITS}g}"), one.most_bytes, one.recompute


def _reason(chosen: Candidate, every: Sequence[Candidate], num_fitting: int, limit: int | None) -> str:
    """Return a sentence with the numbers that decided."""
    which = f"{len(every)} ways to run it"
    if limit is not None:
        which = f"{num_fitting} of {len(every)} ways to run it that keep at most {_said(limit)} on a device"
    words = (
        f"{chosen} was chosen: {said_s(chosen.length_s)} for an update is the shortest of {which}, and it keeps "
        f"{_said(chosen.most_bytes)}"
    )
    other = next((one for one in every if one.schedule != chosen.schedule), None)
    if other is None:
        return words
    keeps = f"keep {_said(other.most_bytes)}"
    if limit is not None and other.most_bytes > limit:
        return f"{words}; {other} would take {said_s(other.length_s)}, but {keeps}"
    return f"{words}; {other} would take {said_s(other.length_s)} and {keeps}"


def _said(number: int) -> str:
    name, size = next((unit for unit in SIZES if number >= unit[1]), ("bytes", 1))
    return f"{number / size:.4g} {name}"


# ---- measuring, for schedule="auto"


def choose_for(replicas: Replicas, plan: StagePlan, memory_limit_bytes: int | None) -> Choice:
    """Choose the schedule for the stages of a plan from measurements of instance 0. Collective.

    Raises:
        ValueError: If no candidate fits into the limit.
    """
    times, stash = measured(plan, [column.device_of(0) for column in replicas.grid.columns])
    numbers = np.array([times.forward, times.backward, times.weights, stash.stashed, stash.inputs], np.float64)
    numbers = replicas.communicator.broadcast(numbers, name="times of the stages of a pipeline")
    forward, backward, weights, stashed, inputs = (tuple(of.tolist()) for of in numbers)
    return choose(
        StageTimes(forward, backward, weights),
        StashBytes(tuple(map(int, stashed)), tuple(map(int, inputs))),
        plan.timetable.mapping,
        plan.timetable.num_micro_batches,
        memory_limit_bytes,
    )


def measured(plan: StagePlan, devices: Sequence[jax.Device]) -> tuple[StageTimes, StashBytes]:
    """Measure the times of the stages with one micro-batch of zeros, and the bytes that they keep of it."""
    rounds = [_round(plan, devices, StashPolicy()) for _ in range(ROUNDS)][1:]
    _, inputs = _round(plan, devices, StashPolicy(recomputes=True))
    return measured_times(spans for spans, _ in rounds), StashBytes(rounds[0][1], inputs)


def _round(plan: StagePlan, devices: Sequence[jax.Device], keeping: StashPolicy) -> tuple[list[Timed], tuple[int, ...]]:
    """Run one micro-batch forward and backward; return the timed actions, and the bytes that each stage kept."""
    mapping = plan.timetable.mapping
    run = ReplicaStages(plan.staged, plan.stages, mapping, devices, keeping)
    run.prepare(StepArguments({place: _zeros(shape) for place, shape in enumerate(plan.staged.arguments)}, {}, {}))
    spans: list[Timed] = []

    def perform(kind: ActionKind, stage: int) -> None:
        for device in sorted(set(mapping[stage])):
            action = StageAction(kind, stage, 0)
            begin_s = time.perf_counter()
            run.perform(device, action)
            spans.append(Timed(device, action, begin_s, time.perf_counter()))

    stages = range(len(mapping))
    for stage in stages:
        perform(ActionKind.FORWARD, stage)
    kept = tuple(
        max(sum(run.kept_bytes(one, 0) for one in run.segments_of(device, stage)) for device in mapping[stage])
        for stage in stages
    )
    for stage in reversed(stages):
        perform(ActionKind.BACKWARD_INPUTS, stage)
        perform(ActionKind.BACKWARD_WEIGHTS, stage)
    return spans, kept


def _zeros(shape: jax.ShapeDtypeStruct) -> StageArray:
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jnp.zeros(shape.shape, shape.dtype)
    return np.zeros(shape.shape, shape.dtype)


# ---- cuts


@dataclass(frozen=True)
class Cut:
    """A better cut into stages, or the present one if no better one was found.

    Attributes:
        sizes: The number of parts of each stage.
        length_s: The simulated time of an update with this cut, in seconds.
        before_s: The simulated time with the present cut.
    """

    sizes: tuple[int, ...]
    length_s: float
    before_s: float

    @property
    def gain(self) -> float:
        """The share by which an update is shorter, 0 to 1."""
        return 1 - self.length_s / self.before_s if self.before_s else 0.0

    def __str__(self) -> str:
        before, after = said_s(self.before_s), said_s(self.length_s)
        if self.gain < WORTH:
            return f"no cut of these parts was found that makes an update {WORTH:.0%} shorter than {before}"
        return (
            f"stages of {list(self.sizes)} parts would shorten an update from {before} to {after}, by {self.gain:.0%}"
        )


def slowest(times: StageTimes) -> int:
    """Return the stage with the longest forward and backward pass; the first of several."""
    return max(range(times.num_stages), key=lambda stage: times.whole[stage])


def loads(timetable: Timetable, times: StageTimes) -> list[float]:
    """Return, for each device, the time that its stages take for one micro-batch."""
    found = [0.0] * len(timetable.devices)
    for devices, took in zip(timetable.mapping, times.whole, strict=True):
        for device in set(devices):
            found[device] += took
    return found


@dataclass(frozen=True)
class Move:
    """Work that goes from a stage to its neighbour when the cut between them moves.

    Attributes:
        giver: The stage that has less work then.
        taker: The neighbour that has more.
        time: The time of the work that moves, for the forward and backward pass of a micro-batch.
        share: The share of the giver's own work. It is above 1 if other stages give work to the giver.
    """

    giver: int
    taker: int
    time: float
    share: float

    def __str__(self) -> str:
        end = "last" if self.giver < self.taker else "first"
        how = f"the {end} {self.share:.0%}" if self.share <= 1 else "all"
        return f"{how} of stage {self.giver} ({said_s(self.time)}) to stage {self.taker}"


def moves(timetable: Timetable, times: StageTimes) -> tuple[Move, ...]:
    """Return the moves of cuts that would give all devices equal loads, if work could be cut anywhere.

    The stages of a device keep their shares of its work. Moves of less than `WORTH` of a stage are left out.
    """
    factors = _even_factors(timetable, times)
    surplus = accumulate(whole * (1 - factor) for whole, factor in zip(times.whole, factors, strict=True))
    found = []
    for stage, more in enumerate(list(surplus)[:-1]):
        giver, taker = (stage, stage + 1) if more > 0 else (stage + 1, stage)
        own = times.whole[giver]
        if own and abs(more) >= WORTH * own:
            found.append(Move(giver, taker, abs(more), abs(more) / own))
    return tuple(found)


def _even_factors(timetable: Timetable, times: StageTimes) -> list[float]:
    there = loads(timetable, times)
    mean = sum(there) / len(there)
    return [mean / most if (most := max(there[one] for one in devices)) else 1.0 for devices in timetable.mapping]


def even_length(timetable: Timetable, times: StageTimes, recompute: bool = False) -> float:
    """Return the time of an update if all devices had equal loads and cutting cost nothing.

    It is a bound for real cuts: if parts cannot be divided, every cut may be slower.
    """
    return timetable.length(times.scaled(_even_factors(timetable, times)).durations(recompute))


def better_cut(timetable: Timetable, parts: StageTimes, sizes: Sequence[int], recompute: bool = False) -> Cut:
    """Return the cut with the least load on the slowest device, if it shortens an update.

    If each stage has its own device, no cut has a faster slowest stage. If devices have several stages, parts are moved
    one at a time between neighbours as long as that helps.

    Args:
        timetable: The timetable of the stages.
        parts: The times of the parts of stages (layers, blocks), in their order, in seconds.
        sizes: The present number of parts of each stage.
        recompute: Whether backward passes recompute forward passes.

    Raises:
        ValueError: If the sizes do not add up to the number of parts, or the timetable has other stages.
    """
    if len(sizes) != timetable.num_stages:
        raise ValueError(f"sizes of {len(sizes)} stages are given, but the pipeline has {timetable.num_stages}")
    before = parts.joined(sizes)
    starts = [tuple(sizes), evenest(parts.whole, len(sizes))]
    found = min(
        (_improved(timetable, parts, start) for start in starts), key=lambda each: _load(timetable, parts, each)
    )
    lengths = [timetable.length(times.durations(recompute)) for times in (parts.joined(found), before)]
    if lengths[0] >= lengths[1]:
        return Cut(tuple(sizes), lengths[1], lengths[1])
    return Cut(found, *lengths)


def evenest(times: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Return the sizes of `num_stages` groups of neighbours whose longest group is as short as possible.

    Raises:
        TypeError, ValueError: If `num_stages` is no positive whole number, or there are fewer times than stages.
    """
    if at_least(1, "num_stages", num_stages) > len(times):
        raise ValueError(f"{len(times)} parts cannot be cut into {num_stages} stages; use at most as many stages")
    sums = list(accumulate(times, initial=0.0))

    @cache
    def best(end: int, groups: int) -> tuple[float, tuple[int, ...]]:
        """Return the time of the longest group of the first `end` parts, and the sizes of all groups."""
        if groups == 1:
            return sums[end], (end,)
        options = (
            (max(best(first, groups - 1)[0], sums[end] - sums[first]), (*best(first, groups - 1)[1], end - first))
            for first in range(groups - 1, end)
        )
        return min(options)

    return best(len(times), num_stages)[1]


def _load(timetable: Timetable, parts: StageTimes, sizes: Sequence[int]) -> tuple[float, float]:
    """Return the load of the slowest device for a micro-batch, and the sum of the squares of all loads."""
    there = loads(timetable, parts.joined(sizes))
    return max(there), sum(load**2 for load in there)


def _improved(timetable: Timetable, parts: StageTimes, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Move single parts between neighbours as long as that helps."""
    while True:
        best = min(_neighbours(sizes), key=lambda each: _load(timetable, parts, each), default=sizes)
        if _load(timetable, parts, best) >= _load(timetable, parts, sizes):
            return sizes
        sizes = best


def _neighbours(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for stage in range(len(sizes) - 1):
        for moved in (-1, 1):
            changed = list(sizes)
            changed[stage] += moved
            changed[stage + 1] -= moved
            if min(changed) > 0:
                yield tuple(changed)
