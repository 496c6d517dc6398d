"""The first difference between two runs. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from poprun.verify.records import (
    BATCH,
    FINGERPRINT,
    GRADIENTS,
    METRICS,
    START,
    UPDATE,
    Digests,
    Record,
    RecordedStep,
    StepPlace,
)

COMPARED = (START, BATCH, GRADIENTS, UPDATE, FINGERPRINT)
"""The parts that are promised to be the same, in the order in which they are computed; metrics are not."""
STEPS = "steps"
"""The part in which runs differ of which one has made a step and the other has not."""


@dataclass(frozen=True)
class RunDifference:
    """The first one between two runs, or between the instances of one.

    Attributes:
        place: the training and the step.
        part: one of `records.PARTS`, or STEPS.
        names: of what differs, in order.
        instances: of which instance of the first and of the second run it is.
        is_inside: whether both are of the same run.
    """

    place: StepPlace
    part: str
    names: tuple[str, ...] = ()
    instances: tuple[int, int] = (0, 0)
    is_inside: bool = False


def first_difference(one: Record, other: Record, parts: Sequence[str] = COMPARED) -> RunDifference | None:
    """Return the first difference between two runs, those inside of the second one included; None: all is equal."""
    for place in {**one.steps, **other.steps}:
        mine, theirs = one.steps.get(place), other.steps.get(place)
        if mine is None or theirs is None:
            return RunDifference(place, STEPS)
        for part in parts:
            found = _inside(theirs, place, part) or _between(mine, theirs, place, part)
            if found is not None:
                return found
    return None


def earliest(first: Record, differences: Sequence[RunDifference | None]) -> int | None:
    """Return the number of the earliest difference; None if there is none."""
    places = list(first.steps)

    def order(number: int) -> tuple[int, int]:
        found = differences[number]
        assert found is not None
        when = places.index(found.place) if found.place in first.steps else len(places)
        return when, COMPARED.index(found.part) if found.part in COMPARED else -1

    return min((number for number, found in enumerate(differences) if found is not None), key=order, default=None)


def first_inside(record: Record, parts: Sequence[str] = COMPARED) -> RunDifference | None:
    """Return the first difference between the instances of a run; None: they are equal."""
    for place, step in record.steps.items():
        for part in parts:
            found = _inside(step, place, part)
            if found is not None:
                return found
    return None


def first_of_metrics(one: Record, other: Record) -> RunDifference | None:
    """Return the first metrics that differ between two runs, or inside the second one, or None."""
    made = Record(steps={place: other.steps[place] for place in one.steps if place in other.steps})
    found = first_difference(Record(steps={place: one.steps[place] for place in made.steps}), made, (METRICS,))
    return found or first_inside(other, (METRICS,))


def are_same(one: Record, other: Record, until: StepPlace) -> bool:
    """Return whether two runs of one kind were the same up to a step, also where their instances differ alike."""

    def digests(record: Record) -> dict[tuple[StepPlace, str, str], list[str]]:
        return {
            (place, part, name): sorted(found)
            for place, step in itertools.islice(record.steps.items(), record.steps_until(until))
            for part in COMPARED
            if part != START
            for name, found in step.parts.get(part, {}).items()
        }

    return digests(one) == digests(other)


def _inside(step: RecordedStep, place: StepPlace, part: str) -> RunDifference | None:
    digests = step.parts.get(part, {})
    names = tuple(name for name, found in digests.items() if len(found) > 1)
    if not names:
        return None
    first, second = list(digests[names[0]].values())[:2]
    return RunDifference(place, part, names, (first[0], second[0]), is_inside=True)


def _between(one: RecordedStep, other: RecordedStep, place: StepPlace, part: str) -> RunDifference | None:
    mine, theirs = one.parts.get(part, {}), other.parts.get(part, {})
    if not mine or not theirs:  # of a step after which a run began anew nobody knows what was before
        return None
    names = tuple(name for name in {**mine, **theirs} if not _agree(mine, theirs, name))
    if not names:
        return None
    sides = [next(iter(side.get(names[0], {"": (0,)}).values()))[0] for side in (mine, theirs)]
    return RunDifference(place, part, names, (sides[0], sides[1]))


def _agree(mine: Digests, theirs: Digests, name: str) -> bool:
    return mine.get(name, {}).keys() == theirs.get(name, {}).keys()
