"""A training job of which one instance fails is over within a second, and says which one, where, how and when."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from poprun_jobs import Finished, Job, allowed_s, start

from popdist.instance import this_host

pytestmark = [pytest.mark.job, pytest.mark.timeout(100)]

PROGRAM = Path(__file__).parent / "programs" / "failing_training.py"
THE_REDUCTION = r"ordered_all_reduce 'gradients/float32'"


def train(how: str) -> Job:
    """Two instances with two replicas each."""
    return start("--num-replicas=4", "--num-instances=2", sys.executable, str(PROGRAM), how)


def blamed(finished: Finished, status: int) -> str:
    """The line that says what happened: instance 1 is to blame, and no process is left (`finish` looks)."""
    assert finished.status == status, finished.stderr
    assert 1 <= len(finished.own_lines) <= 15
    assert finished.stderr.splitlines()[-1].endswith(finished.own_lines[-1])
    assert finished.own_lines[0].startswith(f"instance 1 on host {this_host()} "), finished.own_text
    return finished.own_lines[0]


def test_a_killed_instance_ends_the_training():
    job = train("wait to be killed")
    job.wait_for(".")
    victim = int(re.search(r"of process (\d+)\.", job.streams[0].text)[1])
    os.kill(victim, signal.SIGKILL)
    finished = job.finish()
    line = blamed(finished, 137)
    assert finished.after_event_s < allowed_s(1.0)
    assert re.search(rf"was killed by SIGKILL,? in step \d+, (inside|after) collective \d+, {THE_REDUCTION}", line)
    assert re.search(rf"instance 0 was in collective \d+, {THE_REDUCTION}, step \d+", finished.own_text)


def test_an_instance_that_raises_ends_the_training():
    job = train("raise")
    job.wait_for(".")
    finished = job.finish()
    line = blamed(finished, 1)
    assert finished.after_event_s < allowed_s(1.0)
    assert re.search(rf"ended with exit status 1,? in step \d, after collective \d+, {THE_REDUCTION}", line)
    assert finished.stderr.count("ValueError: no such image") == 1
    assert finished.stderr.count("Traceback (most recent call last)") == 1


@pytest.mark.parametrize(("how", "status", "text"), [("exit", 5, "exit status 5"), ("leave", 1, "too early")])
def test_an_instance_that_leaves_ends_the_training(how, status, text):
    job = train(how)
    job.wait_for(".")
    finished = job.finish()
    assert text in blamed(finished, status)
    assert finished.after_event_s < allowed_s(1.0)


@pytest.mark.parametrize(
    ("how", "facts"),
    [
        ("shape", ["['layer']['w']", "float32[100,10]", "float32[100,11]"]),
        ("dtype", ["['layer']['w']", "float32[100,10]", "bfloat16[100,10]"]),
        ("names", ["['extra']"]),
    ],
)
def test_variables_that_differ_between_instances_are_named(how, facts):
    finished = train(how).finish()
    assert finished.status == 1
    assert "Tensor layouts did not match on all instances" in finished.stderr
    for fact in facts:
        assert fact in finished.stderr
    assert finished.stderr.count("Traceback (most recent call last)") <= 2  # every instance raises it


def test_a_gradient_that_is_not_finite_is_found_where_it_was():
    finished = train("nan").finish()
    assert finished.status == 1
    wanted = "the gradient of variable ['layer']['w'] on replica 3 is not finite at step 7"
    assert wanted in finished.stderr
