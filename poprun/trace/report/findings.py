"""What a report may find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

LEAST_GAIN = 0.03
"""What would save less of the time is not worth a word."""
LEAST_SHARE = 0.6
"""So much of all lateness, or of all waits for links, has to be due to one of them."""


class Cause(Enum):
    """Why an instance is late."""

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
        instance: which.
        cause: why.
        explained: which part of its lateness the cause explains, 0 to 1.
        last_share: in which part of all steps it held the others up most.
        late_s: for how long, when it did; the median. Others wait for the last one from when the last but one has come.
        gain: which part of the time would be saved if it were never later than the last but one.
        line: of the program, where it mostly was between steps; empty where that is unknown, or not the cause.
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
class Traffic:
    """What was on its way from a host to another one, as the kernel has counted it.

    Attributes:
        source: the host that sent it.
        target: the other one.
        nbytes: how much.
        busy_s: for how long any of it was on its way and the receiver had room for it; positive.
    """

    source: str
    target: str
    nbytes: float
    busy_s: float

    @property
    def rate(self) -> float:
        """How many bytes came in each second in which any were on their way: no link is slower than that."""
        return self.nbytes / self.busy_s


@dataclass(frozen=True)
class SlowTraffic:
    """Links between hosts on which data are far slower than on others.

    Attributes:
        links: they; the first one costs most.
        usual: the rate of the others, the median; None: they are all alike, so this is only the busiest one.
        host: the one where all of these links end and none of the others does; empty if there is none.
        gain: which part of the time would be saved at most if they were as fast as the others, or took no time.
    """

    links: Sequence[Traffic]
    usual: float | None
    host: str
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
