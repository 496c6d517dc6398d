"""Steps that differ from most, and what a step could not have been shorter than. Pure."""

from __future__ import annotations

import numpy as np

from poprun.trace.matching import Meetings
from poprun.trace.report.findings import Outlier, Segment
from poprun.trace.report.step_table import BETWEEN, CHECKPOINT, COMPUTE, INPUT, REST, WAITING, StepTable
from poprun.trace.spans import COMPILE

_OF_MEDIAN, _DEVIATIONS, _OF_ALL = 1.0, 5.0, 0.01
"""By how much an outlier is longer at least: in parts of the median, in standard deviations, in parts of all steps."""
_MOST_OUTLIERS = 5


def are_outliers(table: StepTable) -> np.ndarray:
    """Which settled steps took far longer than the median."""
    settled = table.is_settled
    lasted = np.where(settled, table.lasted_ns.max(axis=0), 0).astype(np.float64)
    usual = float(np.median(lasted[settled]))
    deviation = 1.4826 * float(np.median(np.abs(lasted[settled] - usual)))
    longer: np.ndarray = lasted - usual > max(
        _OF_MEDIAN * usual, _DEVIATIONS * deviation, _OF_ALL * float(lasted.sum())
    )
    return longer


def outliers_of(table: StepTable) -> list[Outlier]:
    """The steps that took far longer than the median, the worst first."""
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


def path_of(table: StepTable, meetings: Meetings, column: int) -> tuple[int, list[Segment]]:
    """What a step could not have been shorter than, as it was: from one collective to the next by whoever came last."""
    step = int(table.steps[column])
    rows = np.flatnonzero(meetings.step == step)
    now = float(table.begin_ns[:, column].max())
    path: list[Segment] = []
    for row in rows.tolist():
        last = int(meetings.last[row])
        came, left = float(meetings.came_ns[row, last]), float(meetings.left_ns[row].max())
        path.append(Segment(last, _mostly(table, last, column, is_first=row == rows[0]), max(came - now, 0.0) / 1e9))
        path.append(Segment(last, f"exchange of {meetings.names[meetings.name[row]]}", max(left - came, 0.0) / 1e9))
        now = max(now, left)
    row = int(np.argmax(table.end_ns[:, column]))
    what = "update and rest" if len(rows) else _mostly(table, row, column, True)
    path.append(Segment(row, what, max(float(table.end_ns[row, column]) - now, 0.0) / 1e9))
    return step, path


def _mostly(table: StepTable, row: int, column: int, is_first: bool) -> str:
    """What an instance did most of the time before it came to a collective."""
    possible = (COMPUTE, INPUT, CHECKPOINT, COMPILE, BETWEEN, REST) if is_first else (COMPUTE, REST)
    return max(possible, key=lambda category: float(table.of[category][row, column]))
