"""What is drawn of a pipeline: who does what when, and under which words."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from strategies.pipelines.timetable import Kind, Timed

LETTERS = {
    Kind.FORWARD: "F",
    Kind.BACKWARD: "B",
    Kind.BACKWARD_INPUTS: "I",
    Kind.BACKWARD_WEIGHTS: "W",
    Kind.UPDATE: "U",
}
"""How actions are marked where there is no room for words."""


@dataclass(frozen=True)
class Unit:
    """In what times are said.

    Attributes:
        name: as it is written behind a number.
        size: by how much times are divided.
    """

    name: str
    size: float

    def said(self, time: float) -> str:
        """A length of time with its unit, to three digits: "12.3 ms"."""
        return f"{time / self.size:.3g} {self.name}"


SECONDS = (Unit("s", 1.0), Unit("ms", 1e-3), Unit("us", 1e-6))
FORWARDS = Unit("forward passes", 1.0)


def unit_of(length: float, in_seconds: bool) -> Unit:
    """The unit in which a length of time has a number that is not too small."""
    if not in_seconds:
        return FORWARDS
    return next((unit for unit in SECONDS if length >= unit.size), SECONDS[-1])


def round_step(at_least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, 50, ... and their fractions that is not smaller than a positive number."""
    power = 10.0 ** math.floor(math.log10(at_least))
    return next(step * power for step in (1, 2, 5, 10, 20) if step * power >= at_least * (1 - 1e-9))


@dataclass(frozen=True)
class Panel:
    """What the devices of one replica did, or would do.

    Attributes:
        title: a line that says what it is.
        spans: who does what when.
        in_seconds: whether times are seconds. Otherwise one is that of a forward pass.
    """

    title: str
    spans: tuple[Timed, ...]
    in_seconds: bool

    @cached_property
    def begin(self) -> float:
        """When the first action begins."""
        return min((span.begin_s for span in self.spans), default=0.0)

    @cached_property
    def length(self) -> float:
        """From the first begin to the last end."""
        return max((span.end_s for span in self.spans), default=0.0) - self.begin

    @cached_property
    def lanes(self) -> dict[int, list[int]]:
        """For each device the stages that it has, both in their order."""
        devices: dict[int, set[int]] = {}
        for span in self.spans:
            devices.setdefault(span.device, set()).add(span.action.stage)
        return {device: sorted(devices[device]) for device in sorted(devices)}

    def in_lane(self, device: int, stage: int) -> Iterator[Timed]:
        """What a device does with a stage; times begin at 0."""
        for span in self.spans:
            if (span.device, span.action.stage) == (device, stage):
                yield span._replace(begin_s=span.begin_s - self.begin, end_s=span.end_s - self.begin)

    @cached_property
    def kinds(self) -> list[Kind]:
        """The kinds of actions that there are, in the order of the enum."""
        there = {span.action.kind for span in self.spans}
        return [kind for kind in Kind if kind in there]


def label_of(span: Timed) -> str:
    """The letter and the number of an action: "F3" is a forward pass for micro-batch 3, "U" an update."""
    number = span.action.micro_batch
    return LETTERS[span.action.kind] + ("" if number is None else str(number))
