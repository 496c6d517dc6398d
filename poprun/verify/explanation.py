"""The explanation of a difference: a repetition of the runs up to that step, and hints where to look."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from popdist.records.recording import LOSS, OPTIMIZER, Question
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

_MOST_QUESTIONS = 6
_PARTLY = "IPUHorovodStrategy"
_WHERE = {LOSS: ", in the loss function", OPTIMIZER: ", in the optimizer"}

_LOOK_AT = {
    START: "changes of the variables between two steps: by a callback, or from values of one instance only",
    BATCH: "the source of the batch: the order of a set or of a directory, a generator without a seed, a shuffle or "
    "a share for each instance; strategy.distribute_dataset deals by replica",
    GRADIENTS: "what the loss function reads besides its arguments: the instance, the time, np.random, a callback",
    UPDATE: "what the optimizer reads besides gradients and state: a learning rate that depends on the time or on the "
    "instance, np.random, a callback",
    STEPS: "the reason for the number of steps: the time, the length of an instance's own data, a callback",
}
_FIRST_START = "the source of the first variables: a generator without a seed, a file, the time"


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
        return f"Repeated, {runs} did the same again: the difference depends on how the replicas are spread.\n"
    return (
        f"Repeated, {runs} did not do the same again. "
        "So the spread of the replicas is at most one cause of the difference.\n"
    )


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


def _readable(record: Record) -> Record:
    """Return the record with the program's paths relative to the current directory."""
    return replace(record, questions=tuple(_from_here(question) for question in record.questions))


def _from_here(question: Question) -> Question:
    path = Path(question.file)
    is_here = path.is_relative_to(Path.cwd())
    return replace(question, file=str(path.relative_to(Path.cwd()))) if is_here else question


@dataclass(frozen=True)
class Evidence:
    """The circumstances of a difference; hints are derived from them.

    Attributes:
        one: The record of the first run.
        other: The record of the second run; the same record if the instances of one run differ.
        is_repeatable: Whether repeated runs of the same spread were equal; None if not tried, or not comparable.
    """

    one: Record
    other: Record
    is_repeatable: bool | None = None


def hints(difference: RunDifference, evidence: Evidence) -> list[str]:
    """Return hints where to look, the strongest first."""
    return [
        *_of_processes(evidence),
        *_of_random(difference, evidence),
        *_of_repetition(difference, evidence),
        *_of_questions(difference, evidence),
        _general(difference),
    ]


def _of_processes(evidence: Evidence) -> Iterator[str]:
    processes = [*evidence.one.processes, *evidence.other.processes]
    for name, values in differing_facts(processes):
        yield f"{name} differs between instances: {' and '.join(repr(value) for value in values)}"
    if any(process.strategy == _PARTLY for process in processes):
        yield f"{_PARTLY} adds up in an order of its own and promises closeness, not bits; use PopDistStrategy"


def differing_facts(processes: Sequence[RecordedProcess]) -> list[tuple[str, list[str]]]:
    """Return the facts that decide bits and differ, with their values; ignore instances that lack a fact."""
    names = dict.fromkeys(name for process in processes for name in process.facts)
    found = []
    for name in names:
        values = list(dict.fromkeys(process.facts[name] for process in processes if name in process.facts))
        if len(values) > 1:
            found.append((name, values))
    return found


def _of_random(difference: RunDifference, evidence: Evidence) -> Iterator[str]:
    steps = [record.steps.get(difference.place) for record in (evidence.one, evidence.other)]
    used = [step.random if step is not None else {} for step in steps]
    for name in used[0] if used[0].keys() == used[1].keys() else {**used[0], **used[1]}:
        if len(used[0].get(name, set()) | used[1].get(name, set())) > 1:
            yield (
                f"{name}: the program has drawn from the global generator, whose state differs; seed it, "
                "and draw equally often in every instance"
            )


def _of_repetition(difference: RunDifference, evidence: Evidence) -> Iterator[str]:
    if evidence.is_repeatable is not False:
        return
    yield "the program gives different bits each time, even with the same spread: look for a missing seed, or the time"
    is_random = any(process.hashes_randomly for process in (*evidence.one.processes, *evidence.other.processes))
    if is_random and difference.part in (BATCH, START, STEPS):
        yield (
            "is it the order of a set of strings? It differs between processes of poprun verify and of other "
            "launchers, and only poprun sets PYTHONHASHSEED=0; sort the items of a set"
        )


def _of_questions(difference: RunDifference, evidence: Evidence) -> Iterator[str]:
    if evidence.is_repeatable is False:
        return
    asked = dict.fromkeys((*evidence.other.questions, *evidence.one.questions))
    telling = {GRADIENTS: LOSS, UPDATE: OPTIMIZER}.get(difference.part)
    for question in sorted(asked, key=lambda each: each.where != telling)[:_MOST_QUESTIONS]:
        place = f"{question.file}:{question.line}{_WHERE.get(question.where, '')}"
        yield f"the program asked which instance it is, or how many there are: {question.what} at {place}"


def _general(difference: RunDifference) -> str:
    if difference.part == START and difference.place[1] == 0:
        return _FIRST_START
    return _LOOK_AT.get(difference.part, _LOOK_AT[UPDATE])
