"""Plans and traces of pipelines: the actions of a replica's devices as text, planned or measured."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from popdist.switches import require_switches
from strategies.argument_checks import positive
from strategies.pipelines.stages import (
    DeviceMapping,
    Stage,
    num_devices,
    places_of,
    schedule_for,
    stages_like,
    timetable_for,
)
from strategies.pipelines.timetable import ActionKind, Durations, PipelineSchedule, Timed, Timetable, bubble_share

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


@dataclass(frozen=True)
class Plan:
    """The planned actions of a replica's devices for one update. Its `str` is a picture; see `draw_text`.

    Attributes:
        schedule: The name of the schedule.
        timetable: The actions of each device, in their order.
        recompute: Whether backward passes recompute forward passes.
    """

    schedule: str
    timetable: Timetable
    recompute: bool = False

    @cached_property
    def spans(self) -> tuple[Timed, ...]:
        """The device, begin and end of each action, if each begins as soon as it can. A forward pass takes 1."""
        durations: Durations = {}
        if self.recompute:
            stages = range(self.timetable.num_stages)
            longer = {ActionKind.BACKWARD: 3.0, ActionKind.BACKWARD_INPUTS: 2.0}
            durations = {(kind, stage): time for kind, time in longer.items() for stage in stages}
        return self.timetable.timed(durations)

    @property
    def length(self) -> float:
        """The length of an update."""
        return max(span.end_s for span in self.spans)

    @property
    def bubble_share(self) -> float:
        """The idle share of the devices' time, 0 to 1."""
        return bubble_share(self.spans, len(_lanes(self.spans)))

    @property
    def stash(self) -> tuple[int, ...]:
        """The largest number of micro-batches for which each stage keeps values at once.

        With recomputation the values are the stage's inputs, otherwise all that the backward pass needs.
        """
        return tuple(self.timetable.stash(stage) for stage in range(self.timetable.num_stages))

    def text(self, columns: int = COLUMNS) -> str:
        """Draw the timetable as lines of at most `columns` columns; see `draw_text`."""
        what = " with recomputation" if self.recompute else "" if self.timetable.training else ", inference"
        title = (
            f"{self.schedule}{what}: {_counted(self.timetable.num_stages, 'stage')} on "
            f"{_counted(len(_lanes(self.spans)), 'device')}, "
            f"{_counted(self.timetable.num_micro_batches, 'micro-batch')}, "
            f"{FORWARDS.said(self.length)} long, {self.bubble_share:.1%} bubbles"
        )
        return draw_text(title, self.spans, FORWARDS, columns)

    def __str__(self) -> str:
        return self.text()


def plan(
    computational_stages: int | Sequence[Stage],
    gradient_accumulation_count: int,
    pipeline_schedule: PipelineSchedule | str | None = None,
    device_mapping: DeviceMapping | None = None,
    *,
    training: bool = True,
    recompute: bool = False,
    batch_serialization_iterations: int = 1,
    ipus_per_replica: int | None = None,
) -> Plan:
    """Plan a pipeline of equal stages with these arguments, without running or compiling anything.

        print(pipelining_ops.plan(4, 8, "one_forward_one_backward"))

    A backward pass takes as long as two forward passes, an update as long as one.

    Args:
        computational_stages: The stages, or their number.
        gradient_accumulation_count: Number of micro-batches of an update.
        pipeline_schedule: A member of the enum, or its name; Grouped by default.
        device_mapping: The device of each stage, or a list of devices for a stage that is a list of functions. By
            default each stage has its own device.
        training: Whether there are backward passes and updates.
        recompute: Whether backward passes begin with the forward pass of their stage.
        batch_serialization_iterations: Number of micro-batches that a stage takes one after another.
        ipus_per_replica: Number of devices; by default as many as the mapping needs.

    Raises:
        TypeError, ValueError, NotImplementedError, FailedPreconditionError: As `pipeline` does.
    """
    require_switches(training=training, recompute=recompute)
    stages = computational_stages
    if not isinstance(stages, Sequence):
        stages = stages_like(device_mapping, positive("computational_stages", stages))
    if ipus_per_replica is None:
        ipus_per_replica = num_devices(device_mapping, len(stages))
    devices = positive("ipus_per_replica", ipus_per_replica)
    places = places_of(stages, device_mapping, devices, batch_serialization_iterations)
    schedule = schedule_for(pipeline_schedule, batch_serialization_iterations)
    count = gradient_accumulation_count
    timetable = timetable_for(schedule, places, count, training, batch_serialization_iterations)
    return Plan(schedule.name, timetable, recompute)


def _counted(number: int, what: str) -> str:
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{number} {what if number == 1 else plural}"


@dataclass(frozen=True)
class Trace:
    """The measured actions of one update, or one round of micro-batches. Its `str` is a picture; see `draw_text`.

    Attributes:
        replicas: For each local replica, by its global index, the timed actions of its devices. Times are in seconds
            from a start that all replicas share.

    Raises:
        ValueError: If there is no replica, or a replica has no action.
    """

    replicas: Mapping[int, Sequence[Timed]]

    def __post_init__(self) -> None:
        if not self.replicas or not all(self.replicas.values()):
            raise ValueError("a trace needs actions; give the timed actions of the devices of at least one replica")
        object.__setattr__(self, "replicas", {number: tuple(self.replicas[number]) for number in sorted(self.replicas)})

    def text(self, columns: int = COLUMNS) -> str:
        """Draw the trace as lines of at most `columns` columns, one replica below another."""
        pictures = []
        for replica, spans in self.replicas.items():
            length, devices = _length(spans), len(_lanes(spans))
            unit = next((unit for unit in SECONDS if length >= unit.size), SECONDS[-1])
            title = (
                f"replica {replica}, measured: {unit.said(length)}, {bubble_share(spans, devices):.1%} bubbles on "
                f"{_counted(devices, 'device')}"
            )
            pictures.append(draw_text(title, spans, unit, columns))
        return "\n".join(pictures)

    def __str__(self) -> str:
        return self.text()


# ---- in letters: a line for each device and stage, time from left to right


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


def draw_text(title: str, spans: Sequence[Timed], unit: Unit, columns: int = COLUMNS) -> str:
    """Draw timed actions as lines of at most `columns` columns, one for each stage on a device.

    "F3---" is a forward pass for micro-batch 3 that takes five columns. Dots are time in which the device is idle,
    blanks are time in which it is busy with another stage.

    Args:
        title: The first line.
        spans: The timed actions of all devices of a replica.
        unit: The unit of the scale.
        columns: The greatest number of columns.

    Raises:
        ValueError: If `columns` is below 40.
    """
    if columns < 40:
        raise ValueError(f"a picture of {columns} columns is too narrow; use 40 or more")
    lanes = _lanes(spans)
    begin = min((span.begin_s for span in spans), default=0.0)
    spans = [span._replace(begin_s=span.begin_s - begin, end_s=span.end_s - begin) for span in spans]
    names = _names(lanes)
    room = columns - max(map(len, [*names, FORWARDS.name])) - 2
    scale = _Scale.of(spans, room)
    rows = _rows(spans, lanes, scale)
    lines = [title]
    for first in _bands(scale):
        if first is None:
            lines += ["", "(the middle is left out)"]
            continue
        end = first + scale.width
        lines += ["", f"{unit.name:{columns - room}}{_ticks(scale, unit, first, end)}"]
        lines += [f"{name:{columns - room}}{row[first:end]}" for name, row in zip(names, rows, strict=True)]
    there = {span.action.kind for span in spans}
    letters = [f"{letter} {kind.value}" for kind, letter in LETTERS.items() if kind in there]
    legend = f"{', '.join(letters)}, each with the number of its micro-batch; {IDLE} nothing to do"
    lines += ["", *textwrap.wrap(legend, columns)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _length(spans: Sequence[Timed]) -> float:
    """Return the time from the first begin to the last end."""
    return max((span.end_s for span in spans), default=0.0) - min((span.begin_s for span in spans), default=0.0)


def _lanes(spans: Sequence[Timed]) -> dict[int, list[int]]:
    """Return the stages of each device, both in ascending order."""
    found: dict[int, list[int]] = {}
    for device, stage in sorted({(span.device, span.action.stage) for span in spans}):
        found.setdefault(device, []).append(stage)
    return found


def _label(span: Timed) -> str:
    """Return the letter and number of an action: "F3" is a forward pass for micro-batch 3, "U" an update."""
    number = span.action.micro_batch
    return LETTERS[span.action.kind] + ("" if number is None else str(number))


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
    def of(cls, spans: Sequence[Timed], room: int) -> _Scale:
        """Choose the scale: a forward pass is as wide as its label plus 1, or up to twice that if all fits one band."""
        length = _length(spans)
        times = [span.end_s - span.begin_s for span in spans if span.action.kind is ActionKind.FORWARD]
        one = median([time for time in times if time > 0] or [length or 1.0])
        widest = 1 + max((len(_label(span)) for span in spans), default=1)
        width = max(widest, min(int(room * one / length) if length else widest, 2 * widest))
        all_columns = max(math.ceil(round(length * width / one, 6)), 1)
        return cls(width / one, all_columns, math.ceil(all_columns / math.ceil(all_columns / room)))


def _ticks(scale: _Scale, unit: Unit, first: int, end: int) -> str:
    per_unit = scale.per_time * unit.size
    step = _round_step(BETWEEN_TICKS / per_unit)
    line = ""
    for number in range(math.ceil(first / per_unit / step), math.ceil(end / per_unit / step)):
        longer = line.ljust(round(number * step * per_unit) - first) + f"|{number * step:g}"
        line = longer if len(longer) <= end - first else line
    return line


def _round_step(at_least: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20, 50, ..., or their decimal fractions, that is not below a number."""
    power = 10.0 ** math.floor(math.log10(at_least))
    return next(step * power for step in (1, 2, 5, 10, 20) if step * power >= at_least * (1 - 1e-9))


def _names(lanes: Mapping[int, Sequence[int]]) -> list[str]:
    """Return the labels of the lines: the device, at the first of its stages only, and the stage."""
    return [
        (f"device {device}" if stage == stages[0] else " " * len(f"device {device}")) + f" stage {stage}"
        for device, stages in lanes.items()
        for stage in stages
    ]


def _rows(spans: Sequence[Timed], lanes: Mapping[int, Sequence[int]], scale: _Scale) -> list[str]:
    """Return the line of each stage on a device, before it is cut into bands."""
    rows = []
    for device, stages in lanes.items():
        cells = {
            stage: [_placed(one, scale) for one in spans if (one.device, one.action.stage) == (device, stage)]
            for stage in stages
        }
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
    label = _label(span)
    fits = len(label) <= min(end - first, scale.width - first % scale.width)
    return first, end, (label if fits else label[0]).ljust(end - first, GOES_ON)


def _bands(scale: _Scale) -> Sequence[int | None]:
    """Return the first column of each band. If there are too many bands, None stands for the middle ones."""
    firsts = list(range(0, scale.columns, scale.width))
    half = MOST_BANDS // 2
    return firsts if len(firsts) <= MOST_BANDS else [*firsts[:half], None, *firsts[-half:]]
