"""How fast data get from host to host, and which links are slower than others. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from popdist.timeline.connections import BUSY, SENT, Addresses, ends_in
from poprun.trace.report.findings import LEAST_GAIN, SlowTraffic, Traffic
from poprun.trace.spans import Spans

_SLOWER = 3.0
"""So many times slower than all others a link has to be: those of healthy jobs differ by less than two."""
_CARRIES = 0.1
"""Links with less than this part of the busiest one's bytes say nothing: small messages mostly wait for receipts."""
_MUCH = 0.3
"""Where all links are alike, data have to be on their way for so much of the time to be worth a word."""


def traffic_of(hosts: Sequence[str], spans: Sequence[Spans], begin_ns: int, end_ns: int) -> list[Traffic]:
    """What was on its way between hosts in some time.

    Args:
        hosts: of each instance.
        spans: of each instance.
        begin_ns: when the time begins.
        end_ns: when it ends.
    """
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
    return [Traffic(*link, sent[link], busy[link]) for link in sent if busy[link] > 0 and sent[link] > _CARRIES * most]


def slow_traffic_of(traffic: Sequence[Traffic], lasted_s: float, exchange: float) -> SlowTraffic | None:
    """The links that are far slower than all others, if that costs much; or the busiest, where there are no others.

    Args:
        traffic: what was on its way in settled steps.
        lasted_s: how long those took.
        exchange: the part of that in which instances exchanged data: no link can cost more.
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
    """By how much a count has grown between two times."""
    times, values = measured[name]
    before, after = np.interp([begin_ns, end_ns], times, values).tolist()
    return max(float(after) - float(before), 0.0)


def _lost_s(traffic: Traffic, usual: float) -> float:
    return traffic.busy_s * (1 - traffic.rate / usual)


def _common_host(slow: Sequence[Traffic], others: Sequence[Traffic]) -> str:
    """The one host where all slow links end, and no other does; empty if there is none."""
    common = set.intersection(*({each.source, each.target} for each in slow))
    common -= {host for each in others for host in (each.source, each.target)}
    return common.pop() if len(common) == 1 else ""
