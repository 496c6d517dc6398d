"""The benchmark of instruments measures all events in all ways; what they cost is not tested."""

import pytest
from benchmark_runs import run_benchmark

EVENTS = {"operation begins", "data move", "operation ends", "step begins", "step made", "phase"}


@pytest.mark.job
@pytest.mark.complete
def test_all_events_are_measured_in_all_ways(tmp_path):
    figures, table = run_benchmark("instruments.py", tmp_path, "--repeats", "3")
    assert {way: set(events) for way, events in figures["events_ns"].items()} == dict.fromkeys(
        ("nobody", "the page", "two"), EVENTS
    )
    assert set(figures["compared_ns"]) == {
        "a call of an empty function",
        "contextlib.nullcontext",
        "a barrier of one rank",
    }
    assert [line.split("  ")[0] for line in table.splitlines()[1:7]] == [
        "operation begins",
        "data move",
        "operation ends",
        "step begins",
        "step made",
        "phase",
    ]
