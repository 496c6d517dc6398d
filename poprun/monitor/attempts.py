"""Attempts at a job, and their totals. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from popdist.records.progress import Made
from poprun.ipc.facts import Facts, JobEnd

LEAST_DIFFERENCE = 0.03
"""The least share of time by which the slowest instance waits less than the others: less is chance."""


@dataclass(frozen=True)
class Slowest:
    """The instance for which the others waited.

    Attributes:
        instance: which.
        host: its machine.
        waiting_share: how much of the time of its steps it waited for others.
        others_waiting_share: the same of the others, in the median of them.
    """

    instance: int
    host: str
    waiting_share: float
    others_waiting_share: float


@dataclass(frozen=True)
class Attempt:
    """A job from a start to its end.

    Attributes:
        facts: what was known about each instance at last.
        duration_s: how long it took.
        ended: how it ended.
        losses: a line about each instance without which the others went on.
    """

    facts: tuple[Facts, ...]
    duration_s: float
    ended: JobEnd
    losses: tuple[str, ...] = ()

    @property
    def longest(self) -> Made:
        """The counts of the instance that has made most steps: all make the same, until they are lost."""
        return max((each.record.made for each in self.facts), key=lambda made: made.steps, default=Made())

    @property
    def failure(self) -> str:
        """Why it failed; "": it did not."""
        return self.ended.verdict.lines[0] if self.ended.verdict is not None else ""

    @property
    def slowest(self) -> Slowest | None:
        """The instance for which the others waited; None where nobody stands out."""
        most = self.longest.timed_steps
        measured = [each for each in self.facts if 2 * each.record.made.timed_steps >= most > 0]
        shares = {each.index: share for each in measured if (share := waiting_share(each.record.made)) is not None}
        if len(shares) < 2:
            return None
        least = min(shares, key=lambda index: shares[index])
        others = _median([share for index, share in shares.items() if index != least])
        if others - shares[least] < LEAST_DIFFERENCE:
            return None
        return Slowest(least, self.facts[least].host, shares[least], others)


def waiting_share(made: Made) -> float | None:
    """Return the share of its steps' time that an instance waited for others; None before two steps."""
    return _per(made.waited_s, made.timed_s)


@dataclass(frozen=True)
class Totals:
    """The totals of all attempts at a job.

    Attributes:
        steps: how many were made, those twice that were made in two attempts.
        samples: the rows of data of all instances in them.
        steps_per_s: of the steps that are timed; None: none is.
        samples_per_s: the same of rows.
        waiting_share: how much of the time of their steps instances waited for others, all together.
        slowest: the instance for which the others waited in the attempt that made most steps, the last of several.
        peak_memory_bytes: what the instance has had that had most; 0: nothing is known.
        survived: the attempt, what followed, and a line about each fault that did not end the job.
    """

    steps: int
    samples: int
    steps_per_s: float | None
    samples_per_s: float | None
    waiting_share: float | None
    slowest: Slowest | None
    peak_memory_bytes: int
    survived: tuple[tuple[int, str, str], ...]


def add_up(attempts: Sequence[Attempt]) -> Totals:
    """Add up some attempts; each but the last was followed by another one."""
    facts = [each for attempt in attempts for each in attempt.facts]
    made = [each.record.made for each in facts]
    longest = [each.longest for each in attempts]
    timed_s = sum(each.timed_s for each in longest)
    return Totals(
        steps=sum(each.steps for each in longest),
        samples=sum(each.samples for each in made),
        steps_per_s=_per(sum(each.timed_steps for each in longest), timed_s),
        samples_per_s=_per(sum(each.timed_samples for each in made), timed_s),
        waiting_share=_per(sum(each.waited_s for each in made), sum(each.timed_s for each in made)),
        slowest=max(reversed(attempts), key=lambda each: each.longest.steps).slowest if attempts else None,
        peak_memory_bytes=max((each.peak_memory_bytes for each in facts), default=0),
        survived=tuple(_survived(attempts)),
    )


def _survived(attempts: Sequence[Attempt]) -> list[tuple[int, str, str]]:
    found = []
    for number, each in enumerate(attempts):
        found += [(number, "shrink", line) for line in each.losses]
        if number < len(attempts) - 1:
            found.append((number, "restart", each.failure))
    return found


def _median(numbers: Sequence[float]) -> float:
    """Return the median. `statistics` takes too long to load."""
    ordered, middle = sorted(numbers), len(numbers) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _per(amount: float, per_s: float) -> float | None:
    return amount / per_s if per_s > 0 else None
