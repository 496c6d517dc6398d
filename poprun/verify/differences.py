"""Looking into a difference: the runs are repeated up to that step, and keep its values."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from pathlib import Path

from popdist.records.recording import Question
from poprun.errors import PopRunError
from poprun.verify.comparison import STEPS, RunDifference, are_same, first_difference, first_inside
from poprun.verify.hints import Evidence, hints
from poprun.verify.records import FINGERPRINT, METRICS, Record
from poprun.verify.report import RunOutcome, describe_difference, describe_units, name_place
from poprun.verify.running import Laboratory
from poprun.verify.ulps import Distance, distance


@dataclass(frozen=True)
class Repeated:
    """What came of repeating the runs that differ.

    Attributes:
        records: of the first and of the second one; twice the same where instances of one run differ.
        is_same: whether they were what they were before; None: they could not be repeated.
        note: why there is nothing to compare; empty: there is.
    """

    records: tuple[Record, Record]
    is_same: bool | None
    note: str = ""


def explain(laboratory: Laboratory, first: RunOutcome, outcome: RunOutcome, names: tuple[str, str]) -> str:
    """What differs between two runs, how much, and what to look at.

    Args:
        laboratory: repeats runs.
        first: the run with which others are compared.
        outcome: one that differs.
        names: of the two runs.
    """
    difference = outcome.difference
    assert difference is not None
    one = outcome if difference.is_inside else first
    repeated = _repeat(laboratory, one, outcome)
    distances, note = _measure(difference, repeated)
    sides = (names[1], names[1]) if difference.is_inside else names
    text = describe_difference(difference, sides, distances, note)
    evidence = Evidence(_readable(one.record), _readable(outcome.record), repeated.is_same)
    ways = "\n".join(f"  * {hint}" for hint in hints(difference, evidence))
    return f"{text}\n{_repetition(repeated, names, difference)}What to look at:\n{ways}"


def _repeat(laboratory: Laboratory, one: RunOutcome, other: RunOutcome) -> Repeated:
    difference = other.difference
    assert difference is not None
    before = (one.record, other.record)
    outcomes = [other] if difference.is_inside else [one, other]
    steps = max(each.record.steps_until(difference.place) for each in outcomes)
    try:
        made = [
            laboratory.make(each.run, f"repeated-{number}", difference.place, steps).record
            for number, each in enumerate(outcomes)
        ]
    except PopRunError as error:
        return Repeated(before, None, f"(The runs could not be repeated: {error})")
    was = [each.record for each in outcomes]
    is_same = all(are_same(mine, own, difference.place) for mine, own in zip(made, was, strict=True))
    return Repeated((made[0], made[-1]), is_same)


def _repetition(repeated: Repeated, names: tuple[str, str], difference: RunDifference) -> str:
    if repeated.is_same is None:
        return ""
    runs = names[1] if difference.is_inside else f"{names[0]} and {names[1]}"
    if repeated.is_same:
        return f"Repeated, {runs} did the same again: it depends on how the replicas are spread.\n"
    return f"Repeated, {runs} did not do the same again: it does not depend on the spread alone, if at all.\n"


def _measure(difference: RunDifference, repeated: Repeated) -> tuple[list[tuple[str, Distance | str]], str]:
    """How much differs, by name; and what there is to say about that."""
    names = [(name, "") for name in difference.names]
    if repeated.note or difference.part in (STEPS, FINGERPRINT):
        return list(names), repeated.note
    one, other = repeated.records
    found = first_inside(one) if difference.is_inside else first_difference(one, other)
    if found is None or (found.place, found.part) != (difference.place, difference.part):
        what = "equal" if found is None else f"different in another place, step {found.place[1]}, {found.part}"
        return list(names), f"(Repeated, they were {what}; by how much they differed is not known.)"
    return [(name, _distance(found, one, other, name)) for name in found.names], ""


def _distance(difference: RunDifference, one: Record, other: Record, name: str) -> Distance | str:
    mine, theirs = (
        _value(record, difference, name, instance)
        for record, instance in zip((one, other), _instances_of(difference, one, other, name), strict=True)
    )
    if mine is None or theirs is None:
        return "not kept"
    if mine[0] != theirs[0]:
        return f"dtypes {mine[0]} and {theirs[0]}"
    return distance(mine[0], mine[1], theirs[1]) or "other shapes"


def _instances_of(difference: RunDifference, one: Record, other: Record, name: str) -> tuple[int, int]:
    mine, theirs = (record.steps[difference.place].parts[difference.part].get(name, {}) for record in (one, other))
    if difference.is_inside:
        first, second = list(mine.values())[:2]
        return first[0], second[0]
    return _any_of(mine), _any_of(theirs)


def _any_of(digests: dict[str, tuple[int, ...]]) -> int:
    return next((instances[0] for instances in digests.values()), 0)


def _value(record: Record, difference: RunDifference, name: str, instance: int) -> tuple[str, bytes] | None:
    values = record.values.get((difference.part, instance))
    return values.read(name) if values is not None and name in values.places else None


def describe_metrics(difference: RunDifference, one: Record, other: Record, run: str) -> str:
    """Which metrics have other bits, and by how much; a note, because nothing is promised of them."""
    where = name_place(difference.place, difference.place[0] > 0)
    found = [f"{name} by {_metric_distance(difference, one, other, name)}" for name in difference.names]
    return (
        f"note: metrics of {run} have other bits from {where} on, {', '.join(found)}; "
        "only the variables are promised to be equal"
    )


def _metric_distance(difference: RunDifference, one: Record, other: Record, name: str) -> str:
    records = (other, other) if difference.is_inside else (one, other)
    texts = [
        next(
            (
                text
                for text, who in record.steps[difference.place].parts[METRICS].get(name, {}).items()
                if instance in who
            ),
            None,
        )
        for record, instance in zip(records, difference.instances, strict=True)
    ]
    if None in texts:
        return "a value that one of them lacks"
    one_value, other_value = (array("f", [float.fromhex(str(text))]).tobytes() for text in texts)
    found = distance("float32", one_value, other_value)
    return describe_units(found.ulps if found is not None else None)


def _readable(record: Record) -> Record:
    """The record with the paths of the program as the user writes them."""
    return replace(record, questions=tuple(_from_here(question) for question in record.questions))


def _from_here(question: Question) -> Question:
    path = Path(question.file)
    is_here = path.is_relative_to(Path.cwd())
    return replace(question, file=str(path.relative_to(Path.cwd()))) if is_here else question
