"""Whose data are waited for when all have come. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from poprun.trace.report.findings import LEAST_GAIN, LEAST_SHARE, SlowLink
from poprun.trace.spans import Sort, Spans

_LEAST_STEPS = 0.25
"""In so many of the steps an exchange has to be held up there: one that was held up once shows no slow link."""


def slow_link_of(
    spans: Sequence[Spans], rows: Mapping[int, int], steps: np.ndarray, settled_ns: float
) -> SlowLink | None:
    """A link for which one waits in the middle of exchanges, when all have come.

    Args:
        spans: of each instance.
        rows: the place there of each instance, by its index.
        steps: those that are like most.
        settled_ns: how long all settled steps took.
    """
    waited: dict[tuple[int, int], float] = {}
    where: dict[tuple[int, int], set[int]] = {}
    for target, own in enumerate(spans):
        for step, source, lasted_ns in _waits_inside(own, steps):
            if source in rows:
                link = rows[source], target
                waited[link] = waited.get(link, 0.0) + lasted_ns
                where.setdefault(link, set()).add(step)
    if not waited:
        return None
    link, longest = max(waited.items(), key=lambda item: item[1])
    share, gain = longest / sum(waited.values()), longest / settled_ns
    is_often = len(where[link]) >= _LEAST_STEPS * len(steps)
    return SlowLink(*link, share, gain) if is_often and share >= LEAST_SHARE and gain >= LEAST_GAIN else None


def _waits_inside(spans: Spans, steps: np.ndarray) -> list[tuple[int, int, float]]:
    """Each exchange of some steps with an instance for which there was a wait in it: step, instance and ns."""
    transfers = spans.of(Sort.TRANSFER)
    transfers = transfers[np.isin(transfers["step"], steps)]
    if not len(transfers) or not len(spans.waits):
        return []
    place = np.searchsorted(transfers["begin_ns"], spans.waits["when_ns"], side="right") - 1
    inside = (place >= 0) & (spans.waits["when_ns"] <= transfers["end_ns"][place])
    pairs = np.unique(np.stack([place[inside], spans.waits["value"][inside]]), axis=1)
    found = transfers[pairs[0]]
    lasted = (found["end_ns"] - found["begin_ns"]).astype(np.float64)
    return list(zip(found["step"].tolist(), pairs[1].tolist(), lasted.tolist(), strict=True))
