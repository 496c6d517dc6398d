"""`poprun top` and the summary of a job on several hosts."""

from __future__ import annotations

import json
import os
import sys

import pytest
from looping import await_value, words

pytestmark = [pytest.mark.cluster, pytest.mark.complete, pytest.mark.cores(2), pytest.mark.timeout(170)]

PORT = 7070
PROGRAM = """
import os, sys, popdist
popdist.init()
communicator = popdist.context.communicator()
for step in range(5):
    communicator.instruments.step_begins(step)
    communicator.barrier(name="gradients")
    communicator.instruments.steps_made(1, 8, lambda: 0.5)
if popdist.getInstanceIndex() == 0:
    sys.stdin.read()
communicator.barrier(name="the last one")
"""


def top(hosts, token, *options):
    return hosts.on(
        "h2", sys.executable, "-m", "poprun", "top", f"--address=h0:{PORT}", *options, POPDIST_JOB_TOKEN=token
    )


def waits_at_last(shown):
    """Return whether the last wait has become long; on a busy machine a wait in an earlier barrier may be long too."""
    return "waits for instance 0" in shown and "barrier 'the last one'" in shown.splitlines()[-1]


def test_a_third_host_sees_the_job_only_with_the_token(hosts):
    file = hosts.shared / "job.json"
    reader, writer = os.pipe()
    options = (f"--top-address=h0:{PORT}", "--summary", f"json:{file}")
    job = words(hosts.names[:2], 2, *options)
    process = hosts.start(
        "h0", *job, sys.executable, "-c", PROGRAM, environ={"POPDIST_JOB_TOKEN": "secret"}, stdin=reader
    )
    os.close(reader)
    try:
        seen = await_value(lambda: top(hosts, "secret", "--once"), lambda done: waits_at_last(done.stdout))
        assert "instance 1 waits for instance 0" in seen.stdout, seen.stderr
        assert seen.stdout.splitlines()[-1].split()[:3] == ["1", "h1", "4"]
        refused = top(hosts, "another", "--once")
        assert refused.returncode == 1
        assert f"h0:{PORT} has refused our token" in refused.stderr
        assert "secret" not in "".join(hosts.processes("h0").values())
    finally:
        os.close(writer)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, out + err
    instances = json.loads(file.read_text())["attempts"][0]["instances"]
    assert [(each["host"], each["steps"]) for each in instances] == [("h0", 5), ("h1", 5)]
    gone = top(hosts, "secret", "--once")
    assert f"h0:{PORT} cannot be reached: Connection refused" in gone.stderr
