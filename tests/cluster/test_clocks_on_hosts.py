"""The measurement of host clocks that are off by seconds and drift, over slow links."""

from __future__ import annotations

import sys
import time

import numpy as np
import pytest
from looping import run

from poprun.trace.merging import put_together
from poprun.trace.recordings import read_recordings

pytestmark = [pytest.mark.cluster, pytest.mark.complete, pytest.mark.cores(2), pytest.mark.timeout(170)]

SECOND, MS = 10**9, 10**6
CLOCKS = ((0, 0), (5 * SECOND, 200_000), (-3 * SECOND, -300_000))
"""For each instance: the lead over the machine's clock in ns, and the rate difference in ppb."""
STEPS = 100
PROGRAM = f"""
import os, sys, time
from pathlib import Path
import popdist
from popdist.membership.process import process
from popdist.timeline.asked import TimelineOptions
from popdist.timeline.attaching import Timeline
from popdist.timeline.meeting import HostClock

popdist.init()
instance = process.detect()
ahead, faster = {CLOCKS}[instance.index]
began = int(sys.argv[1])

def now_ns():
    now = time.monotonic_ns()
    return now + ahead + (now - began) * faster // {SECOND}

timeline = Timeline(TimelineOptions(Path(sys.argv[2])), instance, os.environ, HostClock(f"clock {{ahead}}", now_ns))
communicator = popdist.context.communicator()
timeline.meet(communicator)
recorder = timeline.instruments[0]
for step in range({STEPS}):
    recorder.step_begins(step)
    communicator.barrier(name="gradients")
    recorder.step_ends(1, 0.5)
timeline.close()
communicator.barrier(name="all have asked")
"""


def at_home(own_ns: np.ndarray, instance: int, began_ns: int) -> np.ndarray:
    """Convert times of an instance's clock to the clock of instance 0, which is the machine's."""
    ahead, faster = CLOCKS[instance]
    return began_ns + (own_ns - ahead - began_ns) / (1 + faster / SECOND)


def test_clock_differences_are_known_to_a_millisecond_and_within_the_reported_bounds(hosts):
    began_ns = time.monotonic_ns()
    folder = hosts.shared / "recordings"
    hosts.link("all", "delay=5ms")
    done = run(hosts, hosts.names[:3], 3, sys.executable, "-c", PROGRAM, str(began_ns), str(folder))
    assert done.returncode == 0, done.stderr
    recordings = read_recordings(folder)
    job = put_together(recordings)
    for instance, (own, aligned) in enumerate(zip(recordings, job.aligned, strict=True)):
        errors = np.abs(aligned.recording.events["when_ns"] - at_home(own.events["when_ns"], instance, began_ns))
        assert len(errors) >= 2 * STEPS
        assert errors.max() <= aligned.uncertainty_ns + 1
        assert errors.max() <= MS
        assert abs(aligned.drift + CLOCKS[instance][1] / SECOND) <= aligned.drift_uncertainty + 1e-6
    assert job.aligned[0].uncertainty_ns == 0
