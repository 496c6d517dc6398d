"""What an attempt at a job has come to, in numbers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from popdist.records.progress import Made
from poprun.ipc.facts import Ended, Facts

LEAST_DIFFERENCE = 0.03
"""So much less of its time than the others an instance has to wait to be called the slowest: less is chance."""


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
    ended: Ended
    losses: tuple[str, ...] = ()

    @property
    def longest(self) -> Made:
        """What the instance has made that has made most: all make the same steps, until they are lost."""
        return max((each.record.made for each in self.facts), key=lambda made: made.steps, default=Made())

    @property
    def samples(self) -> int:
        """The rows of data of all instances."""
        return sum(each.record.made.samples for each in self.facts)

    @property
    def timed_samples(self) -> int:
        """Those in the steps that are timed."""
        return sum(each.record.made.timed_samples for each in self.facts)

    @property
    def waited_s(self) -> float:
        """How long instances waited for others in the time of their steps, all together."""
        return sum(each.record.made.waited_s for each in self.facts)

    @property
    def timed_s(self) -> float:
        """That time, all together."""
        return sum(each.record.made.timed_s for each in self.facts)

    @property
    def peak_memory_bytes(self) -> int:
        """What the instance has had that had most; 0: nothing is known."""
        return max((each.peak_memory_bytes for each in self.facts), default=0)

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
    """How much of the time of its steps an instance waited for others; None before it has made two."""
    return _per(made.waited_s, made.timed_s)


@dataclass(frozen=True)
class Totals:
    """What all attempts at a job have come to together.

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
    """What some attempts have come to; those but the last were followed by another one."""
    timed_s = sum(each.longest.timed_s for each in attempts)
    return Totals(
        steps=sum(each.longest.steps for each in attempts),
        samples=sum(each.samples for each in attempts),
        steps_per_s=_per(sum(each.longest.timed_steps for each in attempts), timed_s),
        samples_per_s=_per(sum(each.timed_samples for each in attempts), timed_s),
        waiting_share=_per(sum(each.waited_s for each in attempts), sum(each.timed_s for each in attempts)),
        slowest=max(reversed(attempts), key=lambda each: each.longest.steps).slowest if attempts else None,
        peak_memory_bytes=max((each.peak_memory_bytes for each in attempts), default=0),
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
    """The middle one; of two the mean. `statistics` takes too long to load."""
    ordered, middle = sorted(numbers), len(numbers) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _per(amount: float, per_s: float) -> float | None:
    return amount / per_s if per_s > 0 else None
