"""The course of a run with losses: who was lost, who joined, and who drove which replicas. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from popdist.records.faults import parse_fault
from poprun.cli.wording import draw_rows, list_ranges
from poprun.verify.records import Record, StepPlace, name_place
from poprun.verify.running import Run

_WITHOUT_SURVIVORS = "IPUHorovodStrategy"
_SURVIVED = ("delay", "flip-bit")
"""The kinds of faults that lose no instance."""


def longest_training(record: Record) -> int:
    """Return the number of steps of the longest training in a run."""
    return max(Counter(training for training, _ in record.steps).values(), default=0)


def obstacle_to_losses(record: Record, spares: int) -> str:
    """Return why a run with losses cannot be made, and what to do; "" if nothing is known against it.

    Args:
        record: The record of a run of the program without losses.
        spares: The number of spares of the run with losses.
    """
    reason = next(iter(record.obstacles), "")
    if any(process.strategy == _WITHOUT_SURVIVORS for process in record.processes):
        reason = f"with {_WITHOUT_SURVIVORS} the job ends if an instance is lost; use PopDistStrategy"
    if reason:
        return (
            f"the program cannot go on without a lost instance: {reason}. Verify it without --with-losses, and "
            "start it with --on-failure restart, which goes on from a checkpoint"
        )
    if spares and (reason := next(iter(record.obstacles_to_joins), "")):
        return (
            f"no spare can take the place of a lost instance: {reason}. The others can go on without it: verify that "
            "with --spares 0, and start the program with --on-failure shrink"
        )
    return ""


@dataclass(frozen=True)
class StepsAlike:
    """Consecutive steps in which the same instances drove the same replicas.

    Attributes:
        first: The first step.
        last: The last step.
        carried: The replicas of each instance, by its index. Spares have the indices after those of the instances.
    """

    first: StepPlace
    last: StepPlace
    carried: Mapping[int, range]


def periods_of(record: Record, replicas: int) -> list[StepsAlike]:
    """Return the periods of a run.

    If an instance has the result of a step from another one, its record lacks the step. Such a step counts for the
    period before it.
    """
    found: list[StepsAlike] = []
    for place, step in record.steps.items():
        is_complete = sum(map(len, step.carried.values())) == replicas
        if found and (found[-1].carried == step.carried or not is_complete):
            found[-1] = StepsAlike(found[-1].first, place, found[-1].carried)
        else:
            found.append(StepsAlike(place, place, step.carried))
    return found


@dataclass(frozen=True)
class LossCourse:
    """The course of a run with faults: who was lost, who joined, and who drove which replicas.

    Attributes:
        instances: The number of instances at the start.
        lost: The first step without each lost instance, by its index.
        joined: The first step of each spare that has joined, by its index.
        spared: The instances that were to be lost and made all steps.
        asleep: The number of spares that did not join although there was a place.
        periods: The periods of the run.
    """

    instances: int
    lost: Mapping[int, StepPlace]
    joined: Mapping[int, StepPlace]
    spared: tuple[int, ...]
    asleep: int
    periods: Sequence[StepsAlike]

    @property
    def is_as_asked(self) -> bool:
        """Whether every loss has happened, and a spare has joined for each loss while there were spares."""
        return not self.spared and not self.asleep

    def describe(self, has_trainings: bool, columns: int | None = None) -> str:
        """Return a line for each loss and each join, and a table of the replicas of each instance."""
        lines = [f"{self._name(each)} was lost in {name_place(at, has_trainings)}" for each, at in self.lost.items()]
        lines += [f"{self._name(each)} joined in {name_place(at, has_trainings)}" for each, at in self.joined.items()]
        lines += [
            f"{self._name(each)} was not lost: the fault did not happen; name a step and a phase that the run reaches"
            for each in self.spared
        ]
        if self.asleep:
            lines.append(
                f"{self.asleep} of the spares did not take the place of a lost instance; the reason is above, on "
                "standard error"
            )
        names = sorted({each for period in self.periods for each in period.carried})
        rows = [("  steps", *map(self._name, names))]
        for period in self.periods:
            first, last = (name_place(place, has_trainings, "") for place in (period.first, period.last))
            cells = (list_ranges(period.carried[each]) if each in period.carried else "-" for each in names)
            rows.append((f"  {first if first == last else f'{first} to {last}'}", *cells))
        return "\n".join([*lines, "replicas of each instance:", draw_rows(rows, columns)])

    def _name(self, index: int) -> str:
        return f"{'instance' if index < self.instances else 'spare'} {index}"


def course_of(record: Record, run: Run) -> LossCourse:
    """Return the course of a run with faults."""
    places = list(record.steps)
    made = {
        each: [number for number, place in enumerate(places) if each in record.steps[place].carried]
        for each in sorted({each for step in record.steps.values() for each in step.carried})
    }
    parsed = map(parse_fault, run.faults)
    doomed = dict.fromkeys(fault.instance for fault in parsed if fault.kind not in _SURVIVED)
    ends = {each: made[each][-1] + 1 if each in made else 0 for each in doomed}
    lost = {each: places[end] for each, end in ends.items() if end < len(places)}
    joined = {each: places[numbers[0]] for each, numbers in made.items() if each >= run.instances}
    spared = tuple(each for each, end in ends.items() if end == len(places))
    asleep = max(min(len(lost), run.spares) - len(joined), 0)
    return LossCourse(run.instances, lost, joined, spared, asleep, periods_of(record, run.replicas))
