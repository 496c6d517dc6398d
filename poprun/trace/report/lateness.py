"""Who is late, and why, as far as the numbers say. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from popdist.timeline.gauges import CORE_WAIT
from poprun.trace.report.findings import LEAST_GAIN, LEAST_SHARE, Cause, Culprit
from poprun.trace.report.step_table import BETWEEN, EXCHANGE, INPUT, REST, StepTable
from poprun.trace.spans import Spans

_SURPRISE = 4.0
"""How many standard deviations oftener than by chance somebody has to be the last one."""
_EXPLAINED = 0.5
"""So much of the lateness a cause has to explain to be named."""


@dataclass(frozen=True, eq=False)
class Lateness:
    """What is known of who came late.

    Attributes:
        table: the times of steps.
        usual: which of them are like most.
        spans: of each instance.
        late_ns: for each usual step and instance how long it has held the others up, by being the last one.
        settled_ns: how long all settled steps took.
    """

    table: StepTable
    usual: np.ndarray
    spans: Sequence[Spans]
    late_ns: np.ndarray
    settled_ns: float


def culprit_of(known: Lateness) -> Culprit | None:
    """Whoever is late so often, and by so much, that it is no chance."""
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
    """What an instance does longer than the others, in the middle, and how much of its lateness that explains."""
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
    """Return what of an instance's own work takes longer, if one part of it does; otherwise all of it."""
    parts = {Cause.BETWEEN: longer(table.of[BETWEEN]), Cause.REST: longer(table.of[REST])}
    part, own = max(parts.items(), key=lambda item: item[1])
    return (part, own) if own >= _EXPLAINED * explained else (Cause.COMPUTE, explained)


def _core_wait_ns(spans: Spans) -> float:
    """How long the program was ready to run and had no core."""
    _, values = spans.measured.get(CORE_WAIT, (np.zeros(0), np.zeros(0)))
    return 1e9 * float(values[-1] - values[0]) if len(values) > 1 else 0.0
