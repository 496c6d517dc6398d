"""What to look at where two runs differ. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from popdist.records.recording import LOSS, OPTIMIZER, Question
from poprun.verify.comparison import STEPS, RunDifference
from poprun.verify.records import BATCH, GRADIENTS, START, UPDATE, Record, RecordedProcess

_MOST_QUESTIONS = 6
_PARTLY = "IPUHorovodStrategy"
_WHERE = {LOSS: ", in the loss function", OPTIMIZER: ", in the optimizer"}

_LOOK_AT = {
    START: "what changes the variables between two steps: a callback, or values of this instance only",
    BATCH: "where the batch comes from: the order of a set or of a directory, a generator without a seed, a shuffle or "
    "a share for each instance; strategy.distribute_dataset deals by replica",
    GRADIENTS: "what the loss function takes besides its arguments: the instance, the time, np.random, a callback",
    UPDATE: "what the optimizer takes besides gradients and state: a learning rate that depends on the time or on the "
    "instance, np.random, a callback",
    STEPS: "what decides how many steps are made: the time, the length of an instance's own data, a callback",
}
_FIRST_START = "where the first variables come from: a generator without a seed, a file, the time"


@dataclass(frozen=True)
class Evidence:
    """What is known besides the difference itself.

    Attributes:
        one: the record of the first run.
        other: that of the second one; the same where its instances differ.
        is_repeatable: whether runs of the same spread were equal to each other; None: not tried, or not comparable.
    """

    one: Record
    other: Record
    is_repeatable: bool | None = None


def hints(difference: RunDifference, evidence: Evidence) -> list[str]:
    """What to look at, the most telling first."""
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
    """What decides bits and is not the same for all of them; names that some do not know are left out."""
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
    yield "the program gives other bits each time, also with the same spread: something without a seed, or the time"
    is_random = any(process.hashes_randomly for process in (*evidence.one.processes, *evidence.other.processes))
    if is_random and difference.part in (BATCH, START, STEPS):
        yield (
            "is it the order of a set of texts? That is another one in every process, because PYTHONHASHSEED is not "
            "set; sort what comes out of a set"
        )


def _of_questions(difference: RunDifference, evidence: Evidence) -> Iterator[str]:
    if evidence.is_repeatable is False:
        return
    asked = dict.fromkeys((*evidence.other.questions, *evidence.one.questions))
    telling = {GRADIENTS: LOSS, UPDATE: OPTIMIZER}.get(difference.part)
    for question in sorted(asked, key=lambda each: each.where != telling)[:_MOST_QUESTIONS]:
        yield _describe(question)


def _describe(question: Question) -> str:
    place = f"{question.file}:{question.line}{_WHERE.get(question.where, '')}"
    return f"the program asked which instance it is, or how many there are: {question.what} at {place}"


def _general(difference: RunDifference) -> str:
    if difference.part == START and difference.place[1] == 0:
        return _FIRST_START
    return _LOOK_AT.get(difference.part, _LOOK_AT[UPDATE])
