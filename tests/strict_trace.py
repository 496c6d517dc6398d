"""Reader of traces that checks all assumptions of Perfetto and chrome://tracing.

Perfetto's own reader is fetched by its package from the network, which tests must not use.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest


def read_strictly(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace, after checking all requirements of Perfetto and chrome://tracing."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    trace = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert set(trace) == {"displayTimeUnit", "otherData", "traceEvents"}
    threads: set[Any] = set()
    slices: dict[Any, list[tuple[float, float]]] = {}
    flows: dict[int, dict[str, Any]] = {}
    for event in trace["traceEvents"]:
        assert isinstance(event["pid"], int), event
        assert isinstance(event["tid"], int), event
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                threads.add((event["pid"], event["tid"]))
            continue
        assert event["ts"] >= 0
        where = event["pid"], event["tid"]
        if event["ph"] == "X":
            assert where in threads
            slices.setdefault(where, []).append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "sf":
            flows.setdefault(event["id"], {})[event["ph"]] = (where, event["ts"])
        elif event["ph"] == "i":
            assert event["s"] == "t"
            assert where in threads
        else:
            assert event["ph"] == "C"
            assert isinstance(event["args"]["value"], float)
    for of_thread in slices.values():
        assert_they_nest(sorted(of_thread, key=lambda each: (each[0], -each[1])))
    for ends in flows.values():
        assert set(ends) == {"s", "f"}
        for where, when in ends.values():
            assert any(begin - 1e-3 <= when <= end + 1e-3 for begin, end in slices[where])
    return trace["traceEvents"]


def assert_they_nest(slices: list[tuple[float, float]]) -> None:
    """Check that slices of a thread follow each other or are nested."""
    open_until: list[float] = []
    for begin, end in slices:
        while open_until and open_until[-1] <= begin + 1e-3:
            open_until.pop()
        assert not open_until or end <= open_until[-1] + 1e-3
        open_until.append(end)
