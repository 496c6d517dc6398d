"""The measurement of clock differences between hosts during a job."""

from __future__ import annotations

import time

import numpy as np
import pytest

from collectives.backends.thread import run_on_threads
from collectives.calls import Call
from popdist import Instance
from popdist.timeline import meeting
from popdist.timeline.asked import TimelineOptions
from popdist.timeline.attaching import Timeline
from popdist.timeline.meeting import HostClock
from poprun.trace.merging import put_together
from poprun.trace.recordings import read_recordings

SECOND = 10**9
LIMIT_S = 60.0
AHEAD_NS = {0: 0, 1: 0, 2: 5 * SECOND, 3: -400 * SECOND}
"""Instances 0 and 1 are on one host, 2 and 3 on others."""
CALL = Call("barrier", "meeting")


def clock_of(rank):
    ahead = AHEAD_NS[rank]
    return HostClock(f"host {ahead}", lambda: time.monotonic_ns() + ahead)


def record(folder):
    """Record some barriers of four instances, one in each thread."""

    def work(communicator):
        rank = communicator.rank
        timeline = Timeline(TimelineOptions(folder), Instance(rank, 4, 1, rank, 4, 0), {}, clock_of(rank))
        timeline.meet(communicator)
        recorder = timeline.instruments[0]
        for step in range(20):
            recorder.step_begins(step)
            recorder.operation_begins(step + 1, CALL)
            communicator.barrier(name="meeting")
            recorder.data_moves(0)
            recorder.operation_ends()
            recorder.step_ends(1, 0.0)
        if timeline._asking is not None:
            timeline._asking.close()
            timeline._asking._thread.join(LIMIT_S)  # `close` waits for 5 s
        communicator.barrier(name="all have asked")
        timeline.close()

    run_on_threads(4, work)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Record with a limit for answers that a busy machine keeps, too."""
    folder = tmp_path_factory.mktemp("recordings")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "_ANSWER_LIMIT_S", LIMIT_S)
        record(folder)
    return put_together(read_recordings(folder))


def test_the_difference_is_known_within_the_reported_uncertainty(job):
    for rank, aligned in enumerate(job.aligned):
        assert aligned.is_measured
        assert abs(aligned.ahead_ns + AHEAD_NS[rank]) <= aligned.uncertainty_ns
    assert [aligned.uncertainty_ns for aligned in job.aligned[:2]] == [0, 0]


def test_no_instance_sees_an_arrival_before_it_happened(job):
    uncertain = np.array([aligned.uncertainty_ns for aligned in job.aligned])
    meetings = job.meetings
    assert len(meetings.step) == 20
    for sender in range(4):
        early = meetings.came_ns[:, [sender]] - meetings.moved_ns
        assert np.all(early <= uncertain + uncertain[sender])


def test_recordings_of_one_job_are_recognised(job):
    assert len({aligned.recording.job for aligned in job.aligned}) == 1
    assert all(aligned.recording.is_complete for aligned in job.aligned)
