"""Slow links: between instances by their waits, and between hosts by the kernel's counts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from popdist.timeline.gauges import BUSY, SENT, Addresses, ends_in
from poprun.trace.report.findings import LEAST_GAIN, LEAST_SHARE, LinkTraffic, SlowLink, SlowTraffic
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


_SLOWER = 3.0
"""The factor by which a slow link is slower than all others; links of healthy jobs differ by less than two."""
_CARRIES = 0.1
"""The least share of the busiest link's bytes that a link needs to be judged: small messages mostly wait for receipts.
"""
_MUCH = 0.3
"""If all links are alike, the busiest one is reported only if data are in transit for this share of the time."""


def traffic_of(hosts: Sequence[str], spans: Sequence[Spans], begin_ns: int, end_ns: int) -> list[LinkTraffic]:
    """Return the traffic between hosts in a period; `hosts` and `spans` have one entry for each instance."""
    addresses: dict[str, str] = {}
    for host, own in zip(hosts, spans, strict=True):
        addresses |= {ends.local: host for ends in _connections(own)}
    sent: dict[tuple[str, str], float] = {}
    busy: dict[tuple[str, str], float] = {}
    for host, own in zip(hosts, spans, strict=True):
        for ends in _connections(own):
            link = host, addresses.get(ends.peer, host)
            if link[0] != link[1]:
                sent[link] = sent.get(link, 0.0) + _during(own.measured, ends.named(SENT), begin_ns, end_ns)
                lasted = _during(own.measured, ends.named(BUSY), begin_ns, end_ns)
                busy[link] = max(busy.get(link, 0.0), min(lasted, (end_ns - begin_ns) / 1e9))
    most = max(sent.values(), default=0.0)
    return [
        LinkTraffic(*link, sent[link], busy[link]) for link in sent if busy[link] > 0 and sent[link] > _CARRIES * most
    ]


def slow_traffic_of(traffic: Sequence[LinkTraffic], lasted_s: float, exchange: float) -> SlowTraffic | None:
    """Return links that are far slower than all others and cost much; if all are alike, the busiest link.

    Args:
        traffic: The traffic in settled steps.
        lasted_s: The duration of these steps.
        exchange: The share of that time in which instances exchanged data; no link can cost more.
    """
    if not traffic or not lasted_s:
        return None
    by_rate = sorted(traffic, key=lambda each: each.rate)
    ratios = [after.rate / before.rate for before, after in zip(by_rate, by_rate[1:], strict=False)]
    place = int(np.argmax(ratios)) if ratios else 0
    if not ratios or ratios[place] < _SLOWER:
        busiest = max(traffic, key=lambda each: each.busy_s)
        share = min(busiest.busy_s / lasted_s, exchange)
        return SlowTraffic([busiest], None, "", share) if share >= _MUCH else None
    usual = float(np.median([each.rate for each in by_rate[place + 1 :]]))
    slow = sorted(by_rate[: place + 1], key=lambda each: -_lost_s(each, usual))
    gain = min(_lost_s(slow[0], usual) / lasted_s, exchange)
    return SlowTraffic(slow, usual, _common_host(slow, by_rate[place + 1 :]), gain) if gain >= LEAST_GAIN else None


def _connections(spans: Spans) -> list[Addresses]:
    found = (ends_in(name, SENT) for name in spans.measured)
    return [each for each in found if each is not None]


def _during(measured: Mapping[str, tuple[np.ndarray, np.ndarray]], name: str, begin_ns: int, end_ns: int) -> float:
    """Return the growth of a count between two times."""
    times, values = measured[name]
    before, after = np.interp([begin_ns, end_ns], times, values).tolist()
    return max(float(after) - float(before), 0.0)


def _lost_s(traffic: LinkTraffic, usual: float) -> float:
    return traffic.busy_s * (1 - traffic.rate / usual)


def _common_host(slow: Sequence[LinkTraffic], others: Sequence[LinkTraffic]) -> str:
    """Return the only host at which all slow links and no other links end; "" if there is none."""
    common = set.intersection(*({each.source, each.target} for each in slow))
    common -= {host for each in others for host in (each.source, each.target)}
    return common.pop() if len(common) == 1 else ""
