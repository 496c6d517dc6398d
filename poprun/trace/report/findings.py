"""Findings of a report: late instances and their causes, outliers among steps, and critical paths. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from popdist.timeline.gauges import CORE_WAIT
from poprun.trace.report.step_table import BETWEEN, CHECKPOINT, COMPUTE, EXCHANGE, INPUT, REST, WAITING, StepTable
from poprun.trace.spans import COMPILE, MatchedCollectives, Spans

LEAST_GAIN = 0.03
"""The least share of the time that a finding must cost."""
LEAST_SHARE = 0.6
"""The least share of all lateness, or of all waits for links, that must be due to one instance or link."""


class Cause(Enum):
    """Reasons why an instance is late."""

    COMPUTE = "its own compute"
    BETWEEN = "your code between its steps"
    REST = "code inside of its steps that is in no phase, such as callbacks"
    INPUT = "its input"
    LINK = "its link: data of exchanges take longer to and from it"
    HOST = "the load of its host"
    UNCLEAR = "a reason that the numbers do not show"


@dataclass(frozen=True)
class Culprit:
    """The instance for which the others wait most of the time.

    Attributes:
        instance: The row of the instance.
        cause: The reason for its lateness.
        explained: The share of the lateness that the cause explains, 0 to 1.
        last_share: The share of steps in which it held the others up more than any other instance did.
        late_s: The median of its lateness in these steps: the time from the last but one arrival to its own.
        gain: The share of the time that would be saved if it were never later than the last but one.
        line: The line of the program at which it mostly was between steps; "" if unknown, or if that is not the cause.
    """

    instance: int
    cause: Cause
    explained: float
    last_share: float
    late_s: float
    gain: float
    line: str = ""


@dataclass(frozen=True)
class SlowLink:
    """A slow link: an instance waits for its data in exchanges to which all instances have come.

    Attributes:
        source: The instance that sends the data.
        target: The instance that waits.
        share: The link's share of all such waits.
        gain: The share of the time that these exchanges take.
    """

    source: int
    target: int
    share: float
    gain: float


@dataclass(frozen=True)
class Outlier:
    """A step that took much longer than most.

    Attributes:
        step: The number of the step.
        lasted_s: The duration of the step.
        usual_s: The median duration of all settled steps.
        instance: The row of the instance with most of the difference.
        category: The category with the largest excess in that instance, one of `CATEGORIES`.
        longer_s: The excess of that category.
    """

    step: int
    lasted_s: float
    usual_s: float
    instance: int
    category: str
    longer_s: float


@dataclass(frozen=True)
class PathSegment:
    """A part of the critical path of a step.

    Attributes:
        instance: The row of the instance for which all others waited; after the last collective, the last one to end.
        what: The activity that took most of the time, or the name of the exchange.
        lasted_s: The duration of the part.
    """

    instance: int
    what: str
    lasted_s: float


@dataclass(frozen=True)
class Change:
    """A change that would save time.

    Attributes:
        what: The change in words.
        gain: The largest share of the time that it could save, 0 to 1.
    """

    what: str
    gain: float


_SURPRISE = 4.0
"""A culprit is the last one more often than chance explains, by at least this number of standard deviations."""
_EXPLAINED = 0.5
"""The least share of the lateness that a named cause must explain."""


@dataclass(frozen=True, eq=False)
class Lateness:
    """The lateness of instances in usual steps, and the times from which its cause follows.

    Attributes:
        table: The times of steps.
        usual: A mask of the settled steps that are no outliers.
        spans: The spans of each instance.
        late_ns: For each usual step and instance, how long it has held the others up as the last one to come.
        settled_ns: The duration of all settled steps.
    """

    table: StepTable
    usual: np.ndarray
    spans: Sequence[Spans]
    late_ns: np.ndarray
    settled_ns: float


def culprit_of(known: Lateness) -> Culprit | None:
    """Return the instance whose lateness is too frequent and too large to be chance, or None."""
    late, instances = known.late_ns, len(known.spans)
    if not late.size or not late.sum():
        return None
    sums = late.sum(axis=0)
    row = int(np.argmax(sums))
    own = late.argmax(axis=1) == row
    expected = len(late) / instances
    deviation = np.sqrt(expected * (1 - 1 / instances))
    gain = float(sums[row] / known.settled_ns)
    is_chance = np.count_nonzero(own) - expected < _SURPRISE * deviation
    if is_chance or gain < LEAST_GAIN or sums[row] < LEAST_SHARE * sums.sum():
        return None
    cause, explained = _cause(known, row, float(sums[row]))
    return Culprit(row, cause, explained, float(own.mean()), float(np.median(late[own, row])) / 1e9, gain)


def _cause(known: Lateness, row: int, late_ns: float) -> tuple[Cause, float]:
    """Return the part of an instance's time that is longer than the others', and the share of lateness it explains."""
    table, spans = known.table, known.spans
    others = [each for each in range(len(spans)) if each != row]

    def longer(category_ns: np.ndarray) -> float:
        difference = category_ns[row] - np.median(category_ns[others], axis=0)
        return float(difference[known.usual].sum()) / late_ns

    possible = {
        Cause.COMPUTE: longer(table.own_work_ns()),
        Cause.INPUT: longer(table.of[INPUT]),
        Cause.LINK: longer(table.of[EXCHANGE]),
    }
    cause, explained = max(possible.items(), key=lambda item: item[1])
    if explained < _EXPLAINED:
        return Cause.UNCLEAR, min(max(explained, 0.0), 1.0)
    if cause is Cause.COMPUTE:
        cause, explained = _which_work(longer, table, explained)
        waited = [_core_wait_ns(own) for own in spans]
        of_cores = (waited[row] - float(np.median([waited[each] for each in others]))) / late_ns
        if of_cores >= _EXPLAINED * explained:
            return Cause.HOST, min(of_cores, 1.0)
    return cause, min(explained, 1.0)


def _which_work(longer: Callable[[np.ndarray], float], table: StepTable, explained: float) -> tuple[Cause, float]:
    """Return the one part of an instance's own work that takes longer, or `Cause.COMPUTE` for all of it."""
    parts = {Cause.BETWEEN: longer(table.of[BETWEEN]), Cause.REST: longer(table.of[REST])}
    part, own = max(parts.items(), key=lambda item: item[1])
    return (part, own) if own >= _EXPLAINED * explained else (Cause.COMPUTE, explained)


def _core_wait_ns(spans: Spans) -> float:
    """Return how long the program was ready to run without a core."""
    _, values = spans.measured.get(CORE_WAIT, (np.zeros(0), np.zeros(0)))
    return 1e9 * float(values[-1] - values[0]) if len(values) > 1 else 0.0


_OF_MEDIAN, _DEVIATIONS, _OF_ALL = 1.0, 5.0, 0.01
"""The three limits that an outlier's excess over the median must exceed: in parts of the median, in standard
deviations, and in parts of the time of all settled steps.
"""
_MOST_OUTLIERS = 5


def are_outliers(table: StepTable) -> np.ndarray:
    """Return a mask of the settled steps that took far longer than the median."""
    settled = table.is_settled
    lasted = np.where(settled, table.lasted_ns.max(axis=0), 0).astype(np.float64)
    usual = float(np.median(lasted[settled]))
    deviation = 1.4826 * float(np.median(np.abs(lasted[settled] - usual)))
    longer: np.ndarray = lasted - usual > max(
        _OF_MEDIAN * usual, _DEVIATIONS * deviation, _OF_ALL * float(lasted.sum())
    )
    return longer


def outliers_of(table: StepTable) -> list[Outlier]:
    """Return the steps that took far longer than the median, the longest first."""
    lasted = table.lasted_ns.max(axis=0).astype(np.float64)
    usual = float(np.median(lasted[table.is_settled]))
    columns = np.flatnonzero(are_outliers(table))
    found = []
    for column in columns[np.argsort(-lasted[columns], kind="stable")][:_MOST_OUTLIERS].tolist():
        longer = {
            (row, category): float(times[row, column] - np.median(times[row]))
            for category, times in table.of.items()
            if category != WAITING
            for row in range(len(times))
        }
        (row, category), most = max(longer.items(), key=lambda item: item[1])
        step = int(table.steps[column])
        found.append(Outlier(step, float(lasted[column]) / 1e9, usual / 1e9, row, category, most / 1e9))
    return found


def path_of(table: StepTable, meetings: MatchedCollectives, column: int) -> tuple[int, list[PathSegment]]:
    """Return a step and its critical path, which follows the last instance to come to each collective."""
    step = int(table.steps[column])
    rows = np.flatnonzero(meetings.step == step)
    now = float(table.begin_ns[:, column].max())
    path: list[PathSegment] = []
    for row in rows.tolist():
        last = int(meetings.last[row])
        came, left = float(meetings.came_ns[row, last]), float(meetings.left_ns[row].max())
        path.append(
            PathSegment(last, _mostly(table, last, column, is_first=row == rows[0]), max(came - now, 0.0) / 1e9)
        )
        path.append(PathSegment(last, f"exchange of {meetings.names[meetings.name[row]]}", max(left - came, 0.0) / 1e9))
        now = max(now, left)
    row = int(np.argmax(table.end_ns[:, column]))
    what = "update and rest" if len(rows) else _mostly(table, row, column, True)
    path.append(PathSegment(row, what, max(float(table.end_ns[row, column]) - now, 0.0) / 1e9))
    return step, path


def _mostly(table: StepTable, row: int, column: int, is_first: bool) -> str:
    """Return the activity that took most of an instance's time before a collective."""
    possible = (COMPUTE, INPUT, CHECKPOINT, COMPILE, BETWEEN, REST) if is_first else (COMPUTE, REST)
    return max(possible, key=lambda category: float(table.of[category][row, column]))
