"""The report of `poprun verify`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poprun.cli.wording import count, draw_rows
from poprun.verify.comparison import STEPS, Distance, RunDifference
from poprun.verify.losses import LossCourse
from poprun.verify.records import BATCH, FINGERPRINT, GRADIENTS, START, UPDATE, Record, name_place
from poprun.verify.running import Run

SHOWN_DIGITS = 16
MOST_ROWS = 12
_COLUMNS = ("run", "instances x replicas", "how", "steps", "fingerprint", "result")

_DIFFERS = {
    START: "variables before it",
    BATCH: "batch",
    GRADIENTS: "gradients",
    UPDATE: "update",
    FINGERPRINT: "fingerprint",
    STEPS: "number of steps",
}
_ORDER = (BATCH, GRADIENTS, UPDATE)


@dataclass(frozen=True)
class RunOutcome:
    """The outcome of a run.

    Attributes:
        run: The run.
        record: Its record.
        exit_status: The exit status of the program; 0 if it is the expected one.
        difference: The difference from the first run, or between its instances; None if there is none.
        metrics: The difference in metrics; None if there is none.
        course: The course of a run with losses; None for other runs.
    """

    run: Run
    record: Record
    exit_status: int = 0
    difference: RunDifference | None = None
    metrics: RunDifference | None = None
    course: LossCourse | None = None

    @property
    def is_well(self) -> bool:
        """Whether the run completed and is equal to the first one, and whether its losses have happened."""
        is_as_asked = self.course is None or self.course.is_as_asked
        return self.difference is None and self.exit_status == 0 and is_as_asked


def draw_table(outcomes: Sequence[RunOutcome], columns: int | None = None) -> str:
    """Draw a table with one row for each run; if `columns` is None, it is as wide as needed."""
    has_trainings = any(training for outcome in outcomes for training, _ in outcome.record.steps)
    rows = [_COLUMNS]
    for number, outcome in enumerate(outcomes, start=1):
        rows.append(
            (
                str(number),
                outcome.run.spread,
                outcome.run.how,
                str(len(outcome.record.steps)),
                outcome.record.last_fingerprint[:SHOWN_DIGITS],
                result_of(outcome, number, has_trainings),
            )
        )
    return draw_rows(rows, columns)


def result_of(outcome: RunOutcome, number: int, has_trainings: bool) -> str:
    """Return the result of a run: whether it is equal to the first one, or the first step that differs.

    Args:
        outcome: The outcome of the run.
        number: The number of the run, from 1.
        has_trainings: Whether the program makes several trainings.
    """
    found = []
    if outcome.difference is not None:
        who = "instances differ" if outcome.difference.is_inside else "differs"
        where = name_place(outcome.difference.place, has_trainings)
        found.append(f"{who} from {where} on: {_DIFFERS[outcome.difference.part]}")
    if outcome.exit_status:
        found.append(f"failed with exit status {outcome.exit_status}")
    if not found and not outcome.is_well:
        found.append("equal, but not as asked")
    return ", ".join(found) or ("first" if number == 1 else "equal")


def describe_difference(
    difference: RunDifference, runs: tuple[str, str], distances: Sequence[tuple[str, Distance | str]], note: str
) -> str:
    """Describe the first difference between two runs.

    Args:
        difference: The difference.
        runs: The names of both runs.
        distances: The distance of each differing value by name, or a remark if there is none.
        note: A note on how the distances were found.
    """
    where = name_place(difference.place, difference.place[0] > 0)
    sides = " and ".join(runs)
    if difference.is_inside:
        sides = "instances {} and {} of {}".format(*difference.instances, runs[0])
    if difference.part == STEPS:
        return f"{sides} make different numbers of steps: one makes {where} (counted from 0), the other does not"
    lines = [f"{sides} differ first at {where} (counted from 0), in the {_words(difference)}:"]
    rows = [(f"  {name or 'all'}", *_cells(found)) for name, found in distances[:MOST_ROWS]]
    if any(found != "" for _, found in distances):
        lines.append(draw_rows([("  name", "elements that differ", "largest difference"), *rows]))
    else:
        lines += [name for name, *_ in rows]
    if len(distances) > MOST_ROWS:
        lines.append(f"  ... and {len(distances) - MOST_ROWS} more")
    lines += [note] if note else []
    before = [_DIFFERS[part] for part in _ORDER[: _ORDER.index(difference.part)]] if difference.part in _ORDER else []
    if before:
        lines.append(f"Equal until then, and in that step: the variables before it, {', '.join(before)}.")
    return "\n".join(lines)


def _words(difference: RunDifference) -> str:
    if difference.part == START:
        return "first variables" if difference.place[1] == 0 else "variables, which changed since the step before"
    if difference.part == UPDATE:
        return "update of the variables"
    return _DIFFERS[difference.part]


def _cells(found: Distance | str) -> tuple[str, str]:
    if isinstance(found, str):
        return found, ""
    elements = f"{found.differing} of {found.elements}"
    return elements, describe_units(found.ulps)


def describe_units(ulps: int | None) -> str:
    """Return a distance in units in the last place as text; None means that one of the values is no number."""
    if ulps is None:
        return "not a number of units"
    return "1 unit in the last place" if ulps == 1 else f"{ulps:,} units in the last place"


def describe_success(outcomes: Sequence[RunOutcome]) -> str:
    """Return the last lines of a report if all runs are equal."""
    first = outcomes[0].record
    steps = count(len(first.steps), "step")
    equal = f"equal: {len(outcomes)} runs of {steps} with the same bits in all batches, gradients and variables"
    return f"{equal if len(outcomes) > 1 else f'one run of {steps}'}\nvariables {first.last_fingerprint}"
