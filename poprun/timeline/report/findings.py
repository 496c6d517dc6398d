"""What a report may find."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

LEAST_GAIN = 0.03
"""What would save less of the time is not worth a word."""
LEAST_SHARE = 0.6
"""So much of all lateness, or of all waits for links, has to be due to one of them."""


class Cause(Enum):
    """Why an instance is late."""

    COMPUTE = "its own compute"
    INPUT = "its input"
    HOST = "the load of its host"
    UNCLEAR = "a reason that the numbers do not show"


@dataclass(frozen=True)
class Culprit:
    """The instance for which the others wait most of the time.

    Attributes:
        instance: which.
        cause: why.
        explained: which part of its lateness the cause explains, 0 to 1.
        last_share: in which part of all steps it held the others up most.
        late_s: for how long, when it did; the median. Others wait for the last one from when the last but one has come.
        gain: which part of the time would be saved if it were never later than the last but one.
    """

    instance: int
    cause: Cause
    explained: float
    last_share: float
    late_s: float
    gain: float


@dataclass(frozen=True)
class SlowLink:
    """A link for whose data an instance waits after all have come.

    Attributes:
        source: the instance that data come from.
        target: the one that waits.
        share: of all such waits.
        gain: which part of the time would be saved without them.
    """

    source: int
    target: int
    share: float
    gain: float


@dataclass(frozen=True)
class Outlier:
    """A step that took much longer than most.

    Attributes:
        step: its number.
        lasted_s: how long it took.
        usual_s: the median of all.
        instance: where most of the difference is.
        category: one of `CATEGORIES`: what took longer there.
        longer_s: by how much.
    """

    step: int
    lasted_s: float
    usual_s: float
    instance: int
    category: str
    longer_s: float


@dataclass(frozen=True)
class Segment:
    """A part of the critical path of a step.

    Attributes:
        instance: the one that everybody waited for; the last one to end for what comes after the last collective.
        what: what it did most of that time, or the name of the exchange.
        lasted_s: how long.
    """

    instance: int
    what: str
    lasted_s: float


@dataclass(frozen=True)
class Change:
    """What could be done.

    Attributes:
        what: in words.
        gain: which part of the time it would save at most, 0 to 1.
    """

    what: str
    gain: float
