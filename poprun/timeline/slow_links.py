"""Whose data are waited for when all have come. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from poprun.timeline.findings import LEAST_GAIN, LEAST_SHARE, SlowLink
from poprun.timeline.matching import Meetings
from poprun.timeline.spans import Sort, Spans


def slow_link_of(spans: Sequence[Spans], meetings: Meetings, settled_ns: float) -> SlowLink | None:
    """A link for which one waits in the middle of exchanges, when all have come."""
    waited: dict[tuple[int, int], float] = {}
    steps = np.unique(meetings.step)
    for target, own in enumerate(spans):
        transfers = own.of(Sort.TRANSFER)
        transfers = transfers[np.isin(transfers["step"], steps)]
        if not len(transfers) or not len(own.waits):
            continue
        place = np.searchsorted(transfers["begin_ns"], own.waits["when_ns"], side="right") - 1
        inside = (place >= 0) & (own.waits["when_ns"] <= transfers["end_ns"][place])
        place, sources = place[inside], own.waits["value"][inside]
        for transfer, source in np.unique(np.stack([place, sources]), axis=1).T.tolist():
            lasted = float(transfers["end_ns"][transfer] - transfers["begin_ns"][transfer])
            waited[source, target] = waited.get((source, target), 0.0) + lasted
    if not waited:
        return None
    (source, target), longest = max(waited.items(), key=lambda item: item[1])
    share, gain = longest / sum(waited.values()), longest / settled_ns
    return SlowLink(source, target, share, gain) if share >= LEAST_SHARE and gain >= LEAST_GAIN else None
