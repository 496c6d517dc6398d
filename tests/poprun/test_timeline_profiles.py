"""Profiles of JAX and PyTorch in a trace: clocks, threads, and missing profiles."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest
from strict_trace import read_strictly
from timeline_jobs import MS, Made

from popdist.timeline.clocks import DRIFT
from poprun.trace.merging import profiles_of, put_together
from poprun.trace.profiles import Profile, nested, on_clock_of_recording
from poprun.trace.trace_events import write_trace

AHEAD_NS = 3 * 10**15
MARKED_NS = (1 * MS, 5 * MS, 9 * MS)
HALF_NS = 2000
"""Half the length of the interval in the recording's clock around each marker."""
PROFILE = Profile("jax", "a.profile/b.trace.json.gz", [(at - HALF_NS, at + HALF_NS) for at in MARKED_NS])


def span(name, begin_ns, lasts_ns, thread=7, process=3, faster=0.0, **facts):
    """Return a span from a profiler whose clock is ahead and may run faster."""
    at = AHEAD_NS + begin_ns * (1 + faster)
    return {"ph": "X", "name": name, "pid": process, "tid": thread, "ts": at / 1e3, "dur": lasts_ns / 1e3} | facts


def trace_of(*spans, faster=0.0):
    said = [("process_name", 3, 0, "/host:CPU"), ("thread_name", 3, 7, "python"), ("thread_name", 3, 8, "XLA")]
    named = [{"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": of}} for kind, pid, tid, of in said]
    markers = [span(f"popdist marker {number}", at, 0, faster=faster) for number, at in enumerate(MARKED_NS)]
    return {"traceEvents": [*named, *markers, *spans, {"args": {}}, {"ph": "i", "name": "else", "pid": 3, "tid": 7}]}


class TestAProfile:
    @pytest.mark.parametrize("faster", [0.0, 3e-4, -3e-4])
    def test_a_profile_is_aligned_within_its_stated_uncertainty(self, faster):
        true = np.arange(0, 10 * MS, MS // 3)
        seen = on_clock_of_recording(
            trace_of(*(span("op", at, 10, faster=faster) for at in true), faster=faster), PROFILE
        )
        assert np.abs(seen.begin_ns - true).max() <= seen.uncertainty_ns < HALF_NS + DRIFT * 4 * MS + 100
        assert set((seen.end_ns - seen.begin_ns).tolist()) == {10}

    def test_spans_keep_their_named_threads_and_markers_are_removed(self):
        seen = on_clock_of_recording(
            trace_of(
                span("a", 0, 5, args={"op": "dot"}),
                span("b", 0, 5, thread=8),
                span("c", 0, 5, thread=9),
                span("all", 0, 5, cat="Trace"),
            ),
            PROFILE,
        )
        assert seen.threads == ["jax: python", "jax: XLA", "jax: thread 9"]
        assert (seen.thread.tolist(), seen.names) == ([0, 1, 2], ["a", "b", "c"])
        assert seen.args == ['{"op": "dot"}', "{}", "{}"]

    def test_processes_are_named_if_there_are_several(self):
        seen = on_clock_of_recording(trace_of(span("a", 0, 5), span("b", 0, 5, process=4)), PROFILE)
        assert seen.threads == ["jax: /host:CPU python", "jax: thread 7"]

    def test_a_devices_copy_of_a_marker_is_ignored(self):
        """PyTorch repeats annotations at the time when a GPU reaches them, which is later."""
        late = span("popdist marker 0", 8 * MS, 0, thread=9, cat="gpu_user_annotation")
        seen = on_clock_of_recording(trace_of(span("a", 4 * MS, 5), late), PROFILE)
        assert abs(int(seen.begin_ns[0]) - 4 * MS) <= seen.uncertainty_ns
        assert seen.names == ["a"]

    def test_a_profile_without_markers_is_refused(self):
        with pytest.raises(ValueError, match="none of the markers"):
            on_clock_of_recording(trace_of(), replace(PROFILE, markers=[]))


@pytest.mark.parametrize(
    ("spans", "ends"),
    [
        ([(0, 0, 10), (0, 2, 11), (0, 3, 12)], [10, 10, 10]),
        ([(0, 0, 10), (1, 2, 11), (0, 10, 12)], [10, 11, 12]),
        ([(0, 0, 4), (0, 0, 9), (0, 5, 10)], [4, 9, 9]),
    ],
    ids=["one inside of another", "another thread", "begun together"],
)
def test_inner_spans_of_a_thread_end_no_later_than_outer_ones(spans, ends):
    assert nested(*np.array(spans).T).tolist() == ends


class TestATrace:
    def merged(self, tmp_path, profile, file=b""):
        """Merge a job of two instances; the second one has this profile."""
        (tmp_path / "a.profile").mkdir()
        (tmp_path / PROFILE.file).write_bytes(file)
        first, second = Made(instances=2, steps=3).recordings()
        job = put_together([first, replace(second, profile=profile)])
        found, said = profiles_of(job.aligned, tmp_path)
        counts = write_trace(tmp_path / "trace.json", job.aligned, job.spans, job.meetings, found)
        return read_strictly(tmp_path / "trace.json"), counts, said

    def test_a_profile_becomes_further_threads_of_its_instance(self, tmp_path):
        written = trace_of(span("dot %s", MS, MS), span("tanh", MS + 10, 2 * MS, args={"op": 1}))
        events, counts, said = self.merged(tmp_path, PROFILE, gzip.compress(json.dumps(written).encode()))
        found = [event for event in events if event.get("cat") == "profile"]
        assert [(event["pid"], event["name"], event["args"]) for event in found] == [
            (1, "dot %s", {}),
            (1, "tanh", {"op": 1}),
        ]
        assert abs(1e3 * (found[1]["ts"] - found[0]["ts"]) - 10) <= 1
        assert found[1]["ts"] + found[1]["dur"] == pytest.approx(found[0]["ts"] + found[0]["dur"])
        names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        assert {names[event["pid"], event["tid"]] for event in found} == {"jax: python (+- 2 us)"}
        assert (said, counts.spans) == ([], sum(event["ph"] == "X" for event in events))

    @pytest.mark.parametrize(
        "file",
        [b"", b"no gzip", gzip.compress(b"{}"), gzip.compress(b"{}")[:-9]],
        ids=["empty", "no gzip", "no profile", "cut off"],  # gzip files contain the time, which would change the ids
    )
    def test_an_unreadable_profile_is_reported_with_its_instance(self, tmp_path, file):
        events, _, (said,) = self.merged(tmp_path, PROFILE, file)
        assert not [event for event in events if event.get("cat") == "profile"]
        assert "instance 1 (host0): its profile is left out, " in said
        assert "it is cut off or damaged" in said

    def test_a_missing_profile_is_reported_with_its_instance(self, tmp_path):
        _, _, (said,) = self.merged(tmp_path, replace(PROFILE, file="elsewhere"))
        assert "elsewhere: No such file or directory; if the file was written on another host, copy it there" in said

    def test_a_profile_that_was_never_written_is_reported_with_its_instance(self, tmp_path):
        events, _, (said,) = self.merged(tmp_path, Profile("jax", "", []), b"")
        assert not [event for event in events if event.get("cat") == "profile"]
        assert said.startswith("instance 1 (host0): the profiler of jax had begun, and its profile is lost")
