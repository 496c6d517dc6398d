"""Training jobs in which one instance fails: the job ends, and names the instance, the place, the cause and the
time.

`benchmarks/ends.py` measures how soon. Programs without JAX are tested in the default tier:
`test_poprun_failures.py`, `test_poprun_popdist.py`.
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

from popdist.instance import this_host

pytestmark = [pytest.mark.complete, pytest.mark.job, pytest.mark.cores(2), pytest.mark.timeout(240)]

PROGRAM = Path(__file__).parent / "programs" / "failing_training.py"
THE_REDUCTION = r"ordered_all_reduce 'gradients/float32'"
START_LIMIT_S = 60.0


def train(how: str, strategy: str = "PopDistStrategy", instances: int = 2) -> Job:
    """Start instances with two replicas each."""
    places = (f"--num-replicas={2 * instances}", f"--num-instances={instances}")
    return start(*places, sys.executable, str(PROGRAM), how, strategy)


def kill(job: Job) -> None:
    """SIGKILL instance 1 in the middle of the training."""
    job.wait_for(".", START_LIMIT_S)
    os.kill(int(re.search(r"of process (\d+)\.", job.streams[0].text)[1]), signal.SIGKILL)


def blamed(finished: Finished, status: int) -> str:
    """Return the line that blames instance 1; `finish` has checked that no process is left."""
    assert finished.status == status, finished.stderr
    assert 1 <= len(finished.own_lines) <= 15
    assert finished.stderr.splitlines()[-1].endswith(finished.own_lines[-1])
    assert finished.own_lines[0].startswith(f"instance 1 on host {this_host()} "), finished.own_text
    return finished.own_lines[0]


@needs_horovod
def test_a_killed_instance_ends_the_training():
    job = train("wait to be killed", "IPUHorovodStrategy")
    kill(job)
    finished = job.finish()
    line = blamed(finished, 137)
    assert re.search(rf"was killed by SIGKILL,? in step \d+, (inside|after) collective \d+, {THE_REDUCTION}", line)
    assert re.search(rf"instance 0 was in collective \d+, {THE_REDUCTION}, step \d+", finished.own_text)


@pytest.mark.parametrize(
    ("strategy", "instances"),
    [("PopDistStrategy", 3), pytest.param("IPUHorovodStrategy", 2, marks=needs_horovod)],
)
def test_an_instance_that_raises_ends_the_training(strategy, instances):
    finished = train("raise", strategy, instances).finish()
    line = blamed(finished, 1)
    assert re.search(rf"ended with exit status 1,? in step \d, after collective \d+, {THE_REDUCTION}", line)
    assert finished.stderr.count("<stderr>:ValueError: no such image") == 1
    assert finished.own_lines[-1].endswith(": ValueError: no such image (exit status 1)")
    assert finished.stderr.count("Traceback (most recent call last)") == 1


@needs_horovod
def test_an_instance_that_leaves_too_early_ends_the_training():
    """An instance that waits over Horovod does not know which other is late."""
    assert "too early" in blamed(train("leave", "IPUHorovodStrategy").finish(), 1)


def test_variables_that_differ_between_instances_are_named():
    """Other differences and non-finite gradients are tested on threads, in tests/strategies/test_trainer.py."""
    finished = train("shape").finish()
    assert finished.status == 1
    assert "Tensor layouts did not match on all instances" in finished.stderr
    for fact in ("['layer']['w']", "float32[100,10]", "float32[100,11]"):
        assert fact in finished.stderr
    assert finished.stderr.count("Traceback (most recent call last)") <= 2  # every instance raises it


def test_mpirun_alone_ends_the_job_but_names_no_killed_instance():
    """`finish` checks that no process is left."""
    job = start_mpirun(2, sys.executable, str(PROGRAM), "wait to be killed", "PopDistStrategy")
    kill(job)
    assert job.finish().status not in (0, None)
