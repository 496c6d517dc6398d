"""Where a model is cut into stages, and what another cut would gain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from strategies.numbers import at_least
from strategies.pipelines.pictures.panel import unit_of
from strategies.pipelines.times import StageTimes
from strategies.pipelines.timetable import Timetable

WORTH = 0.01
"""Gains of a smaller share are not named: measured times differ by more."""


@dataclass(frozen=True)
class Cut:
    """A better cut, or the same one where none was found.

    Attributes:
        sizes: for each stage how many parts it has.
        length_s: how long an update takes with it, in seconds, as simulated.
        before_s: how long it takes with the cut that there is.
    """

    sizes: tuple[int, ...]
    length_s: float
    before_s: float

    @property
    def gain(self) -> float:
        """By what share an update is shorter, 0 to 1."""
        return 1 - self.length_s / self.before_s if self.before_s else 0.0

    def __str__(self) -> str:
        before, after = (unit_of(time, True).said(time) for time in (self.before_s, self.length_s))
        if self.gain < WORTH:
            return f"no cut of these parts was found with which an update is {WORTH:.0%} shorter than {before}"
        return (
            f"stages of {list(self.sizes)} parts would shorten an update from {before} to {after}, by {self.gain:.0%}"
        )


def slowest(times: StageTimes) -> int:
    """The stage whose forward and backward pass take the longest; the first of several."""
    return max(range(times.num_stages), key=lambda stage: times.whole[stage])


def loads(timetable: Timetable, times: StageTimes) -> list[float]:
    """For each device how long its stages take for one micro-batch."""
    found = [0.0] * len(timetable.devices)
    for devices, time in zip(timetable.mapping, times.whole, strict=True):
        for device in set(devices):
            found[device] += time
    return found


@dataclass(frozen=True)
class Move:
    """Work that goes from a stage to its neighbour when the cut between them moves.

    Attributes:
        giver: the stage that has less to do then.
        taker: its neighbour.
        time: of the forward and backward passes that move, for a micro-batch.
        share: of what the giver has to do, which is above 1 where others give to it.
    """

    giver: int
    taker: int
    time: float
    share: float

    def __str__(self) -> str:
        end = "last" if self.giver < self.taker else "first"
        how = f"the {end} {self.share:.0%}" if self.share <= 1 else "all"
        return f"{how} of stage {self.giver} ({unit_of(self.time, True).said(self.time)}) to stage {self.taker}"


def moves(timetable: Timetable, times: StageTimes) -> tuple[Move, ...]:
    """How the cuts would have to move for all devices to have equally much to do, if work could be cut anywhere.

    The stages of a device keep their shares of what it does. Moves of less than `WORTH` of a stage are left out.
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
    """For each stage by what its times are multiplied where all devices have equally much to do."""
    there = loads(timetable, times)
    mean = sum(there) / len(there)
    return [mean / most if (most := max(there[one] for one in devices)) else 1.0 for devices in timetable.mapping]


def even_length(timetable: Timetable, times: StageTimes, recompute: bool = False) -> float:
    """How long an update would take if all devices had equally much to do, and cutting cost nothing.

    What a real cut can be compared with: where parts cannot be divided none may be as good.
    """
    return timetable.length(times.scaled(_even_factors(timetable, times)).durations(recompute))


def better_cut(timetable: Timetable, parts: StageTimes, sizes: Sequence[int], recompute: bool = False) -> Cut:
    """The cut whose slowest device has the least to do, if an update is shorter with it.

    With a device for each stage no cut has a faster slowest stage. Where devices have several stages, parts are moved
    one at a time between neighbours as long as that helps.

    Args:
        timetable: with which the stages run.
        parts: the times of what stages are made of (layers, blocks), in their order; in seconds.
        sizes: for each stage how many parts it has now.
        recompute: whether backward passes recompute.

    Raises:
        ValueError: if the parts are fewer or more than those of the stages, or the stages not those of the timetable.
    """
    if len(sizes) != timetable.num_stages:
        raise ValueError(f"sizes of {len(sizes)} stages are given, and the pipeline has {timetable.num_stages}")
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
    """The sizes of so many groups of neighbours of which the longest is as short as possible; each has one or more.

    Raises:
        TypeError, ValueError: if the stages are no positive whole number, or more than there are times.
    """
    if at_least(1, "num_stages", num_stages) > len(times):
        raise ValueError(f"{len(times)} parts cannot be cut into {num_stages} stages; use at most as many stages")
    sums = list(accumulate(times, initial=0.0))

    @cache
    def best(end: int, groups: int) -> tuple[float, tuple[int, ...]]:
        """The longest of the groups that the first parts make, and the sizes of all of them."""
        if groups == 1:
            return sums[end], (end,)
        options = (
            (max(best(first, groups - 1)[0], sums[end] - sums[first]), (*best(first, groups - 1)[1], end - first))
            for first in range(groups - 1, end)
        )
        return min(options)

    return best(len(times), num_stages)[1]


def _load(timetable: Timetable, parts: StageTimes, sizes: Sequence[int]) -> tuple[float, float]:
    """What the slowest device has to do for a micro-batch; and by how much the devices differ."""
    there = loads(timetable, parts.joined(sizes))
    return max(there), sum(load**2 for load in there)


def _improved(timetable: Timetable, parts: StageTimes, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Moves single parts as long as that helps."""
    while True:
        best = min(_neighbours(sizes), key=lambda each: _load(timetable, parts, each), default=sizes)
        if _load(timetable, parts, best) >= _load(timetable, parts, sizes):
            return sizes
        sizes = best


def _neighbours(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The cuts that differ in the place of one part."""
    for stage in range(len(sizes) - 1):
        for moved in (-1, 1):
            changed = list(sizes)
            changed[stage] += moved
            changed[stage + 1] -= moved
            if min(changed) > 0:
                yield tuple(changed)
