"""`poprun top` and the summary of a job on several hosts."""

from __future__ import annotations

import json
import os
import shlex
import sys

import pytest
from beds import ROOT
from looping import await_value, words

pytestmark = [pytest.mark.cluster, pytest.mark.complete, pytest.mark.cores(2), pytest.mark.timeout(170)]

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


def top(hosts):
    """Run `poprun top` on h0 from h2, over ssh."""
    words = shlex.join(["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "poprun", "top", "--once"])
    return hosts.on("h2", "ssh", *hosts.ssh_arguments, "h0", words)


def waits_at_last(shown):
    """Return whether the last wait has become long; on a busy machine a wait in an earlier barrier may be long too."""
    return "waits for instance 0" in shown and "barrier 'the last one'" in shown.splitlines()[-1]


def test_a_third_host_sees_the_job_over_ssh(hosts):
    file = hosts.shared / "job.json"
    reader, writer = os.pipe()
    job = words(hosts.names[:2], 2, "--summary", f"json:{file}")
    process = hosts.start("h0", *job, sys.executable, "-c", PROGRAM, stdin=reader)
    os.close(reader)
    try:
        seen = await_value(lambda: top(hosts), lambda done: waits_at_last(done.stdout))
        assert "instance 1 waits for instance 0" in seen.stdout, seen.stderr
        assert seen.stdout.splitlines()[-1].split()[:3] == ["1", "h1", "4"]
    finally:
        os.close(writer)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, out + err
    instances = json.loads(file.read_text())["attempts"][0]["instances"]
    assert [(each["host"], each["steps"]) for each in instances] == [("h0", 5), ("h1", 5)]
    gone = top(hosts)
    assert (gone.returncode, "no job of yours runs on h0" in gone.stderr) == (1, True), gone.stderr
