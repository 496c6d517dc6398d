"""Slow links between instances, by their waits. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from poprun.trace.report.findings import LEAST_GAIN, LEAST_SHARE, SlowLink
from poprun.trace.spans import Sort, Spans

_LEAST_STEPS = 0.25
"""The least share of steps with an exchange in which a slow link causes waits; a single wait proves nothing."""


def slow_link_of(
    spans: Sequence[Spans], rows: Mapping[int, int], steps: np.ndarray, settled_ns: float
) -> SlowLink | None:
    """Return the link that causes most waits in exchanges of `steps` to which all have come, or None."""
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
    """Return each wait for an instance inside an exchange of some steps, as (step, instance, ns of the exchange)."""
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
