"""Attempts at a job, and their totals. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from popdist.records.progress import Made
from poprun.ipc.facts import Carriers, Facts, JobEnd, Loss

LEAST_DIFFERENCE = 0.03
"""The least difference between the waiting shares of the slowest instance and the others; less may be chance."""


@dataclass(frozen=True)
class Slowest:
    """The instance for which the others waited.

    Attributes:
        instance: The index of the instance.
        host: Its host.
        waiting_share: The share of its steps' time in which it waited for others.
        others_waiting_share: The median share of the other instances.
    """

    instance: int
    host: str
    waiting_share: float
    others_waiting_share: float


@dataclass(frozen=True)
class Attempt:
    """One attempt at a job, from its start to its end.

    Attributes:
        facts: The last facts of each instance.
        duration_s: The duration of the attempt.
        ended: The end of the attempt.
        losses: The lost instances and spares without which the others went on.
        carriers: The instances that drove the replicas, from the start and after each change.
    """

    facts: tuple[Facts, ...]
    duration_s: float
    ended: JobEnd
    losses: tuple[Loss, ...] = ()
    carriers: tuple[Carriers, ...] = ()

    @property
    def spares(self) -> int:
        """The number of spares at the start, without reserves."""
        waiting = [each for each in self.facts if not each.is_reserve]
        return len(waiting) - len(self.carriers[0].instances) if self.carriers else 0

    @property
    def longest(self) -> Made:
        """The counts of the instance with most steps; all instances make the same steps until they are lost."""
        return max((each.record.made for each in self.facts), key=lambda made: made.steps, default=Made())

    @property
    def failure(self) -> str:
        """The reason for its failure; "" if it did not fail."""
        return self.ended.verdict.lines[0] if self.ended.verdict is not None else ""

    @property
    def slowest(self) -> Slowest | None:
        """The instance for which the others waited; None if no instance stands out."""
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
    """Return the share of its steps' time in which an instance waited for others; None before two steps."""
    return _per(made.waited_s, made.timed_s)


@dataclass(frozen=True)
class Totals:
    """The totals of all attempts at a job.

    Attributes:
        steps: The number of steps; a step that was made in two attempts counts twice.
        samples: The number of samples of all instances in these steps.
        steps_per_s: The rate of the timed steps; None without one.
        samples_per_s: The rate of samples in the timed steps; None without one.
        waiting_share: The share of steps' time in which instances waited for others, over all instances.
        slowest: The instance for which the others waited, in the attempt with most steps (the last of several).
        peak_memory_bytes: The largest peak memory of an instance; 0 if unknown.
        survived: For each fault that did not end the job: the attempt, the reaction, and a line about the fault.
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
    """Return the totals of some attempts; each attempt except the last was followed by a restart."""
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
        found += [(number, loss.followed_by, loss.line) for loss in each.losses]
        if number < len(attempts) - 1:
            found.append((number, "restart", each.failure))
    return found


def _median(numbers: Sequence[float]) -> float:
    """Return the median; the module `statistics` takes too long to load."""
    ordered, middle = sorted(numbers), len(numbers) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _per(amount: float, per_s: float) -> float | None:
    return amount / per_s if per_s > 0 else None
