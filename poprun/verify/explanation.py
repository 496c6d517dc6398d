"""The explanation of a difference: its place, its size by a repetition of the runs up to that step, and an advice."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from popdist.records.recording import LOSS, OPTIMIZER
from poprun.errors import PopRunError
from poprun.verify.comparison import STEPS, Distance, RunDifference, are_same, distance, first_difference, first_inside
from poprun.verify.records import (
    BATCH,
    FINGERPRINT,
    GRADIENTS,
    METRICS,
    START,
    UPDATE,
    Record,
    RecordedProcess,
    name_place,
)
from poprun.verify.report import RunOutcome, describe_difference, describe_units
from poprun.verify.running import Laboratory

_PARTLY = "IPUHorovodStrategy"
_WHERE = {LOSS: ", in the loss function", OPTIMIZER: ", in the optimizer"}

_FIRST_START = "the source of the first variables: a generator without a seed, a file, the time"
_LOOK_AT = {
    START: "changes of the variables between two steps: by a callback, or from values of one instance only",
    BATCH: "the source of the batch: the order of a set or of a directory, a generator without a seed, a shuffle or "
    "a share for each instance; strategy.distribute_dataset deals by replica",
    GRADIENTS: "what the loss function reads besides its arguments: the instance, the time, np.random, a callback",
    UPDATE: "what the optimizer reads besides gradients and state: a learning rate that depends on the time or on the "
    "instance, np.random, a callback",
    STEPS: "the reason for the number of steps: the time, the length of an instance's own data, a callback",
}


@dataclass(frozen=True)
class Repeated:
    """The result of repeating the differing runs.

    Attributes:
        records: The records of the first and the second run; the same one twice if instances of one run differ.
        is_same: Whether the runs were repeated with the same results; None if they could not be repeated.
        note: Why there is nothing to compare; "" if there is.
    """

    records: tuple[Record, Record]
    is_same: bool | None
    note: str = ""


def explain(laboratory: Laboratory, first: RunOutcome, outcome: RunOutcome, names: tuple[str, str]) -> str:
    """Explain a difference between two runs: its place, its size, and where to look."""
    difference = outcome.difference
    assert difference is not None
    one = outcome if difference.is_inside else first
    repeated = _repeat(laboratory, one, outcome)
    distances, note = _measure(difference, repeated)
    sides = (names[1], names[1]) if difference.is_inside else names
    text = describe_difference(difference, sides, distances, note)
    return f"{text}\nLook at {advice(difference, one.record, outcome.record, repeated.is_same)}"


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


def _measure(difference: RunDifference, repeated: Repeated) -> tuple[list[tuple[str, Distance | str]], str]:
    """Return the distance or a remark for each differing name, and a note on all of them."""
    names = [(name, "") for name in difference.names]
    if repeated.note or difference.part in (STEPS, FINGERPRINT):
        return list(names), repeated.note
    one, other = repeated.records
    found = first_inside(one) if difference.is_inside else first_difference(one, other)
    if found is None or (found.place, found.part) != (difference.place, difference.part):
        what = "equal" if found is None else f"different in another place, step {found.place[1]}, {found.part}"
        return list(names), f"(Repeated, they were {what}; the size of the difference is not known.)"
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
    return distance(mine[0], mine[1], theirs[1]) or "different shapes"


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
    """Describe metrics with different bits; this is only a note, because metrics need not be equal."""
    where = name_place(difference.place, difference.place[0] > 0)
    found = [f"{name} by {_metric_distance(difference, one, other, name)}" for name in difference.names]
    return (
        f"note: metrics of {run} have different bits from {where} on, {', '.join(found)}; "
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
        return "a value that only one of them has"
    one_value, other_value = (array("f", [float.fromhex(str(text))]).tobytes() for text in texts)
    found = distance("float32", one_value, other_value)
    return describe_units(found.ulps if found is not None else None)


def advice(difference: RunDifference, one: Record, other: Record, is_repeatable: bool | None = None) -> str:
    """Return what to look at: the most likely cause of a difference.

    Args:
        difference: The difference.
        one: The record of the first run.
        other: The record of the second run; the same record if the instances of one run differ.
        is_repeatable: Whether repeated runs of the same spread were equal; None if not tried, or not comparable.
    """
    processes = [*one.processes, *other.processes]
    for name, values in differing_facts(processes):
        return f"the instances: {name} differs, {' and '.join(repr(value) for value in values)}"
    if any(process.strategy == _PARTLY for process in processes):
        return f"the strategy: {_PARTLY} adds up in an order of its own and promises closeness; use PopDistStrategy"
    for name in _drawn_from(difference, one, other):
        return f"{name}: its global generator was used, and its state differs; seed it, and draw equally often"
    if is_repeatable is False:
        return "a missing seed, the time, or the order of a set: the same spread gives different bits each time"
    telling = {GRADIENTS: LOSS, UPDATE: OPTIMIZER}.get(difference.part)
    asked = (*other.questions, *one.questions)
    for question in sorted(asked, key=lambda question: question.where != telling):
        place = f"{os.path.relpath(question.file)}:{question.line}{_WHERE.get(question.where, '')}"
        return f"{question.what} at {place}: there the program asks which instance it is, or how many there are"
    if difference.part == START and difference.place[1] == 0:
        return _FIRST_START
    return _LOOK_AT.get(difference.part, _LOOK_AT[UPDATE])


def differing_facts(processes: Sequence[RecordedProcess]) -> list[tuple[str, list[str]]]:
    """Return the facts that decide bits and differ, with their values; ignore instances that lack a fact."""
    names = dict.fromkeys(name for process in processes for name in process.facts)
    found = []
    for name in names:
        values = list(dict.fromkeys(process.facts[name] for process in processes if name in process.facts))
        if len(values) > 1:
            found.append((name, values))
    return found


def _drawn_from(difference: RunDifference, one: Record, other: Record) -> list[str]:
    """Return the global generators whose states differ in the step of the difference."""
    steps = [record.steps.get(difference.place) for record in (one, other)]
    used = [step.random if step is not None else {} for step in steps]
    names = used[0] if used[0].keys() == used[1].keys() else {**used[0], **used[1]}
    return [name for name in names if len(used[0].get(name, set()) | used[1].get(name, set())) > 1]
