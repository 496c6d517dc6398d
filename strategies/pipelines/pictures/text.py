"""A pipeline in letters: a line for each device and stage, time from left to right."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from strategies.pipelines.pictures.panel import FORWARDS, LETTERS, Panel, Unit, label_of, round_step, unit_of
from strategies.pipelines.timetable import Kind, Timed

COLUMNS = 100
MOST_BANDS = 6
"""Times that do not fit beside each other go below each other; the middle of more than so many is left out."""

IDLE, ELSEWHERE, GOES_ON = ".", " ", "-"
BETWEEN_TICKS = 15


def draw_text(panel: Panel, columns: int = COLUMNS) -> str:
    """Lines of at most so many columns, each for a stage on a device.

    "F3---" is a forward pass for micro-batch 3 that takes five columns; dots are time in which the device does nothing,
    blanks are time in which it is busy with another stage.

    Args:
        panel: what is drawn.
        columns: at least 40.

    Raises:
        ValueError: if there are fewer columns.
    """
    if columns < 40:
        raise ValueError(f"a picture of {columns} columns is asked for; it takes 40 or more")
    names = _names(panel)
    room = columns - max(map(len, [*names, FORWARDS.name])) - 2
    scale, unit = _Scale.of(panel, room), unit_of(panel.length, panel.in_seconds)
    rows = _rows(panel, scale)
    lines = [panel.title]
    for first in _bands(scale):
        if first is None:
            lines += ["", "(the middle is left out)"]
            continue
        end = first + scale.width
        lines += ["", f"{unit.name:{columns - room}}{_ticks(scale, unit, first, end)}"]
        lines += [f"{name:{columns - room}}{row[first:end]}" for name, row in zip(names, rows, strict=True)]
    lines += ["", *textwrap.wrap(_legend(panel), columns)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


@dataclass(frozen=True)
class _Scale:
    """How times become columns.

    Attributes:
        per_time: columns for each unit of time.
        columns: in all.
        width: into pieces of how many columns they are cut.
    """

    per_time: float
    columns: int
    width: int

    @classmethod
    def of(cls, panel: Panel, room: int) -> _Scale:
        """A forward pass has as many columns as its label and one more; more if all fits then."""
        times = [span.end_s - span.begin_s for span in panel.spans if span.action.kind is Kind.FORWARD]
        one = median([time for time in times if time > 0] or [panel.length or 1.0])
        widest = 1 + max((len(label_of(span)) for span in panel.spans), default=1)
        width = max(widest, min(int(room * one / panel.length) if panel.length else widest, 2 * widest))
        all_columns = max(math.ceil(round(panel.length * width / one, 6)), 1)
        return cls(width / one, all_columns, math.ceil(all_columns / math.ceil(all_columns / room)))


def _ticks(scale: _Scale, unit: Unit, first: int, end: int) -> str:
    """Round times above the columns at which they are."""
    per_unit = scale.per_time * unit.size
    step = round_step(BETWEEN_TICKS / per_unit)
    line = ""
    for number in range(math.ceil(first / per_unit / step), math.ceil(end / per_unit / step)):
        longer = line.ljust(round(number * step * per_unit) - first) + f"|{number * step:g}"
        line = longer if len(longer) <= end - first else line
    return line


def _names(panel: Panel) -> list[str]:
    """What stands before the lines: the device at the first of its stages, and the stage."""
    return [
        (f"device {device}" if stage == stages[0] else " " * len(f"device {device}")) + f" stage {stage}"
        for device, stages in panel.lanes.items()
        for stage in stages
    ]


def _rows(panel: Panel, scale: _Scale) -> list[str]:
    """For each stage on a device its line, in one piece."""
    rows = []
    for device, stages in panel.lanes.items():
        cells = {stage: [_placed(span, scale) for span in panel.in_lane(device, stage)] for stage in stages}
        free = [IDLE] * scale.columns
        for first, end, _ in (cell for placed in cells.values() for cell in placed):
            free[first:end] = ELSEWHERE * (end - first)
        for placed in cells.values():
            row = free.copy()
            for first, end, text in placed:
                row[first:end] = text
            rows.append("".join(row))
    return rows


def _placed(span: Timed, scale: _Scale) -> tuple[int, int, str]:
    """The first column of an action, the one behind its last, and what stands there: a label that fits, or a letter."""
    first = min(round(span.begin_s * scale.per_time), scale.columns - 1)
    end = min(max(round(span.end_s * scale.per_time), first + 1), scale.columns)
    label = label_of(span)
    fits = len(label) <= min(end - first, scale.width - first % scale.width)
    return first, end, (label if fits else label[0]).ljust(end - first, GOES_ON)


def _bands(scale: _Scale) -> Iterator[int | None]:
    """The first columns of the pieces into which the lines are cut; None where some are left out."""
    firsts = list(range(0, scale.columns, scale.width))
    if len(firsts) <= MOST_BANDS:
        yield from firsts
        return
    half = MOST_BANDS // 2
    yield from firsts[:half]
    yield None
    yield from firsts[-half:]


def _legend(panel: Panel) -> str:
    letters = [f"{LETTERS[kind]} {kind.value}" for kind in panel.kinds]
    return f"{', '.join(letters)}, each with the number of its micro-batch; {IDLE} nothing to do"
