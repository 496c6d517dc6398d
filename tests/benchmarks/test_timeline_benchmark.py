"""The benchmark of timelines measures what it says; what that costs is not tested."""

import pytest
from benchmark_runs import run_benchmark


@pytest.mark.job
@pytest.mark.complete
def test_events_a_step_and_a_merge_are_measured(tmp_path):
    figures, table = run_benchmark("timeline.py", tmp_path, "--repeats", "4", "--events", "2000", "--seconds", "0.3")
    assert figures["event_ns"] > 0
    assert figures["step"]["events"] > 10
    assert figures["share"] > 0
    assert figures["merge"]["trace_MB"] > figures["merge"]["recorded_MB"] > 0
    for found in figures["connections"].values():
        assert found["share"] == pytest.approx(found["asking_s"] / found["every_s"])
    for found in figures["clocks"].values():
        assert 0 <= found["error_us"] <= found["uncertainty_us"]
    assert "2,000 events are merged" in table
