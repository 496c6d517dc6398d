"""A training job of which one instance fails is over at once, and says which one, where, how and when.

How soon that is, is looked at with `--complete` only: it is a promise about a machine that has nothing else to do.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from horovod_installed import needs_horovod
from poprun_jobs import Finished, Job, start, start_mpirun
from stopwatch import EVERYTHING, Stopwatch

from popdist.instance import this_host

pytestmark = [pytest.mark.job, pytest.mark.cores(2), pytest.mark.timeout(240)]

PROGRAM = Path(__file__).parent / "programs" / "failing_training.py"
THE_REDUCTION = r"ordered_all_reduce 'gradients/float32'"
START_LIMIT_S = 60.0
MPIRUN_LIMIT_S = 5.0  # within which mpirun has ended a job of which one process has ended

over_horovod = pytest.param("IPUHorovodStrategy", marks=needs_horovod)
for_each_strategy = pytest.mark.parametrize("strategy", ["PopDistStrategy", over_horovod])


def train(how: str, strategy: str = "PopDistStrategy", instances: int = 2) -> Job:
    """Instances with two replicas each."""
    places = (f"--num-replicas={2 * instances}", f"--num-instances={instances}")
    return start(*places, sys.executable, str(PROGRAM), how, strategy)


def kill(job: Job) -> None:
    """SIGKILL instance 1 in the middle of the training."""
    job.wait_for(".", START_LIMIT_S)
    os.kill(int(re.search(r"of process (\d+)\.", job.streams[0].text)[1]), signal.SIGKILL)


END_LIMIT_S = {"PopDistStrategy": 1.0, "IPUHorovodStrategy": 2.0}
"""From the last words of an instance; a Python that has loaded torch and Horovod takes most of a second to end."""


def blamed(finished: Finished, status: int) -> str:
    """The line that says what happened: instance 1 is to blame, and no process is left (`finish` looks)."""
    assert finished.status == status, finished.stderr
    assert 1 <= len(finished.own_lines) <= 15
    assert finished.stderr.splitlines()[-1].endswith(finished.own_lines[-1])
    assert finished.own_lines[0].startswith(f"instance 1 on host {this_host()} "), finished.own_text
    return finished.own_lines[0]


def finish(job: Job) -> tuple[Finished, float]:
    """How the job ended, and within how many seconds, as a `Stopwatch` counts them."""
    with Stopwatch() as watch:
        finished = job.finish()
    return finished, watch.seconds


def killed(strategy: str) -> float:
    """Instance 1 is killed in the middle of the training; within how many seconds the job is over."""
    job = train("wait to be killed", strategy)
    kill(job)
    finished, seconds = finish(job)
    line = blamed(finished, 137)
    assert re.search(rf"was killed by SIGKILL,? in step \d+, (inside|after) collective \d+, {THE_REDUCTION}", line)
    assert re.search(rf"instance 0 was in collective \d+, {THE_REDUCTION}, step \d+", finished.own_text)
    return seconds


def raised(strategy: str, instances: int = 2) -> float:
    """Instance 1 raises an exception in step 7; within how many seconds the job is over."""
    job = train("raise", strategy, instances)
    job.wait_for(".", START_LIMIT_S)
    finished, seconds = finish(job)
    line = blamed(finished, 1)
    assert re.search(rf"ended with exit status 1,? in step \d, after collective \d+, {THE_REDUCTION}", line)
    assert finished.stderr.count("<stderr>:ValueError: no such image") == 1
    assert finished.own_lines[-1].endswith(": ValueError: no such image (exit status 1)")
    assert finished.stderr.count("Traceback (most recent call last)") == 1
    return seconds


def test_a_killed_instance_ends_the_training():
    killed("PopDistStrategy")


def test_an_instance_that_raises_ends_the_training():
    raised("PopDistStrategy")


@pytest.mark.complete
@pytest.mark.cores(EVERYTHING)
@for_each_strategy
def test_a_killed_instance_ends_the_training_soon(strategy):
    assert killed(strategy) < END_LIMIT_S[strategy]


@pytest.mark.complete
@pytest.mark.cores(EVERYTHING)
@pytest.mark.parametrize(
    ("strategy", "instances"),
    [("PopDistStrategy", 2), *(pytest.param("IPUHorovodStrategy", count, marks=needs_horovod) for count in (2, 3))],
)
def test_an_instance_that_raises_ends_the_training_soon(strategy, instances):
    assert raised(strategy, instances) < END_LIMIT_S[strategy]


@pytest.mark.complete
@pytest.mark.cores(EVERYTHING)
@for_each_strategy
@pytest.mark.parametrize(("how", "status", "text"), [("exit", 5, "exit status 5"), ("leave", 1, "too early")])
def test_an_instance_that_leaves_ends_the_training_soon(how, status, text, strategy):
    job = train(how, strategy)
    job.wait_for(".", START_LIMIT_S)
    finished, seconds = finish(job)
    assert text in blamed(finished, status)
    assert seconds < END_LIMIT_S[strategy]


@pytest.mark.complete
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


@pytest.mark.complete
def test_a_gradient_that_is_not_finite_is_found_where_it_was():
    finished = train("nan").finish()
    assert finished.status == 1
    wanted = "the gradient of variable ['layer']['w'] on replica 3 is not finite at step 7"
    assert wanted in finished.stderr


@pytest.mark.complete
@pytest.mark.cores(EVERYTHING)
@needs_horovod
class TestUnderMpirunAlone:
    """Nobody names the instance, but the job ends, and no process is left (`finish` looks)."""

    def test_a_killed_instance_ends_the_training(self):
        job = start_mpirun(2, sys.executable, str(PROGRAM), "wait to be killed", "IPUHorovodStrategy")
        kill(job)
        finished, seconds = finish(job)
        assert finished.status not in (0, None)
        assert seconds < MPIRUN_LIMIT_S

    def test_an_instance_that_raises_ends_the_training(self):
        job = start_mpirun(2, sys.executable, str(PROGRAM), "raise", "IPUHorovodStrategy")
        job.wait_for(".", START_LIMIT_S)
        finished, seconds = finish(job)
        assert finished.status == 1
        assert seconds < MPIRUN_LIMIT_S
        assert finished.stderr.count("ValueError: no such image") == 1
        assert finished.stderr.count("Traceback (most recent call last)") == 1
