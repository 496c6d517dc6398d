"""Pictures of a planned or measured pipeline: as text for a terminal, and as a file for Perfetto."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from strategies.pipelines.timetable import ActionKind, Timed, bubble_share

LETTERS = {
    ActionKind.FORWARD: "F",
    ActionKind.BACKWARD: "B",
    ActionKind.BACKWARD_INPUTS: "I",
    ActionKind.BACKWARD_WEIGHTS: "W",
    ActionKind.UPDATE: "U",
}
"""The letters that stand for actions."""

COLUMNS = 100
MOST_BANDS = 6
"""The most bands of lines that are drawn below each other; of more bands, those in the middle are left out."""

IDLE, ELSEWHERE, GOES_ON = ".", " ", "-"
BETWEEN_TICKS = 15

MICROSECONDS = 1e6

Event = Mapping[str, object]


@dataclass(frozen=True)
class Unit:
    """A unit of time.

    Attributes:
        name: The name, written behind a number.
        size: The divisor that turns a time into this unit.
    """

    name: str
    size: float

    def said(self, time: float) -> str:
        """Return a length of time with its unit, to three digits: "12.3 ms"."""
        return f"{time / self.size:.3g} {self.name}"


SECONDS = (Unit("s", 1.0), Unit("ms", 1e-3), Unit("us", 1e-6))
FORWARDS = Unit("forward passes", 1.0)


def unit_of(length: float, in_seconds: bool) -> Unit:
    """Return the unit for a length of time: the largest in which it is 1 or more."""
    if not in_seconds:
        return FORWARDS
    return next((unit for unit in SECONDS if length >= unit.size), SECONDS[-1])


def said_s(seconds: float) -> str:
    """Return a length of time in the unit that fits it."""
    return unit_of(seconds, True).said(seconds)


def round_step(at_least: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20, 50, ..., or their decimal fractions, that is not below a number."""
    power = 10.0 ** math.floor(math.log10(at_least))
    return next(step * power for step in (1, 2, 5, 10, 20) if step * power >= at_least * (1 - 1e-9))


@dataclass(frozen=True)
class Panel:
    """The measured or planned actions of one replica's devices, for a picture.

    Attributes:
        title: The first line of the picture.
        spans: The timed actions of all devices.
        in_seconds: Whether times are seconds. If not, 1 is the time of a forward pass.
    """

    title: str
    spans: tuple[Timed, ...]
    in_seconds: bool

    @cached_property
    def begin(self) -> float:
        """The time when the first action begins."""
        return min((span.begin_s for span in self.spans), default=0.0)

    @cached_property
    def length(self) -> float:
        """The time from the first begin to the last end."""
        return max((span.end_s for span in self.spans), default=0.0) - self.begin

    @property
    def bubble_share(self) -> float:
        """The idle share of the devices' time, 0 to 1."""
        return bubble_share(self.spans, len(self.lanes))

    @cached_property
    def lanes(self) -> dict[int, list[int]]:
        """The stages of each device, both in ascending order."""
        found: dict[int, list[int]] = {}
        for device, stage in sorted({(span.device, span.action.stage) for span in self.spans}):
            found.setdefault(device, []).append(stage)
        return found

    def in_lane(self, device: int, stage: int) -> Iterator[Timed]:
        """Yield a device's actions for a stage, with times that begin at 0."""
        for span in self.spans:
            if (span.device, span.action.stage) == (device, stage):
                yield span._replace(begin_s=span.begin_s - self.begin, end_s=span.end_s - self.begin)


def label_of(span: Timed) -> str:
    """Return the letter and number of an action: "F3" is a forward pass for micro-batch 3, "U" an update."""
    number = span.action.micro_batch
    return LETTERS[span.action.kind] + ("" if number is None else str(number))


# ---- in letters: a line for each device and stage, time from left to right


def draw_text(panel: Panel, columns: int = COLUMNS) -> str:
    """Draw the actions as lines of at most `columns` columns, one for each stage on a device.

    "F3---" is a forward pass for micro-batch 3 that takes five columns. Dots are time in which the device is idle,
    blanks are time in which it is busy with another stage.

    Raises:
        ValueError: If `columns` is below 40.
    """
    if columns < 40:
        raise ValueError(f"a picture of {columns} columns is too narrow; use 40 or more")
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
    """The scale that turns times into columns.

    Attributes:
        per_time: Columns for each unit of time.
        columns: Number of columns of the whole picture, before it is cut into bands.
        width: Number of columns of each band.
    """

    per_time: float
    columns: int
    width: int

    @classmethod
    def of(cls, panel: Panel, room: int) -> _Scale:
        """Choose the scale: a forward pass is as wide as its label plus 1, or up to twice that if all fits one band."""
        times = [span.end_s - span.begin_s for span in panel.spans if span.action.kind is ActionKind.FORWARD]
        one = median([time for time in times if time > 0] or [panel.length or 1.0])
        widest = 1 + max((len(label_of(span)) for span in panel.spans), default=1)
        width = max(widest, min(int(room * one / panel.length) if panel.length else widest, 2 * widest))
        all_columns = max(math.ceil(round(panel.length * width / one, 6)), 1)
        return cls(width / one, all_columns, math.ceil(all_columns / math.ceil(all_columns / room)))


def _ticks(scale: _Scale, unit: Unit, first: int, end: int) -> str:
    per_unit = scale.per_time * unit.size
    step = round_step(BETWEEN_TICKS / per_unit)
    line = ""
    for number in range(math.ceil(first / per_unit / step), math.ceil(end / per_unit / step)):
        longer = line.ljust(round(number * step * per_unit) - first) + f"|{number * step:g}"
        line = longer if len(longer) <= end - first else line
    return line


def _names(panel: Panel) -> list[str]:
    """Return the labels of the lines: the device, at the first of its stages only, and the stage."""
    return [
        (f"device {device}" if stage == stages[0] else " " * len(f"device {device}")) + f" stage {stage}"
        for device, stages in panel.lanes.items()
        for stage in stages
    ]


def _rows(panel: Panel, scale: _Scale) -> list[str]:
    """Return the line of each stage on a device, before it is cut into bands."""
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
    """Return an action's first column, the column after its last, and its label (a letter if space is short)."""
    first = min(round(span.begin_s * scale.per_time), scale.columns - 1)
    end = min(max(round(span.end_s * scale.per_time), first + 1), scale.columns)
    label = label_of(span)
    fits = len(label) <= min(end - first, scale.width - first % scale.width)
    return first, end, (label if fits else label[0]).ljust(end - first, GOES_ON)


def _bands(scale: _Scale) -> Sequence[int | None]:
    """Return the first column of each band. If there are too many bands, None stands for the middle ones."""
    firsts = list(range(0, scale.columns, scale.width))
    half = MOST_BANDS // 2
    return firsts if len(firsts) <= MOST_BANDS else [*firsts[:half], None, *firsts[-half:]]


def _legend(panel: Panel) -> str:
    there = {span.action.kind for span in panel.spans}
    letters = [f"{letter} {kind.value}" for kind, letter in LETTERS.items() if kind in there]
    return f"{', '.join(letters)}, each with the number of its micro-batch; {IDLE} nothing to do"


# ---- for Perfetto


def perfetto(replicas: Mapping[int, Sequence[Timed]]) -> str:
    """Return JSON with an event for each action, in microseconds, and a thread for each device.

    Source: "Trace Event Format", Google, 2016: the object with `traceEvents`, complete events (X), metadata (M).
    """
    events = [event for replica, spans in sorted(replicas.items()) for event in _events(replica, spans)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _events(replica: int, spans: Sequence[Timed]) -> Iterator[Event]:
    yield _named("process_name", replica, 0, f"replica {replica}")
    for device in sorted({span.device for span in spans}):
        yield _named("thread_name", replica, device, f"device {device}")
    for span in sorted(spans, key=lambda span: (span.begin_s, span.device)):
        yield {
            "name": f"{label_of(span)} stage {span.action.stage}",
            "cat": span.action.kind.value,
            "ph": "X",
            "ts": span.begin_s * MICROSECONDS,
            "dur": (span.end_s - span.begin_s) * MICROSECONDS,
            "pid": replica,
            "tid": span.device,
            "args": {
                "kind": span.action.kind.value,
                "stage": span.action.stage,
                "micro_batch": span.action.micro_batch,
            },
        }


def _named(what: str, replica: int, device: int, name: str) -> Event:
    return {"name": what, "ph": "M", "pid": replica, "tid": device, "args": {"name": name}}
