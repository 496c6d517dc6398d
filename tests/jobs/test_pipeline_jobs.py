"""Pipelines over every transport: the bits of one process whose stages run one after another on one device.

Gradients of the last stage are averaged before the first one goes back. More instances, more schedules and models:
`tests/strategies/pipelines/test_pipelining.py`, on threads.
"""

import functools
import json
import os
import sys
from pathlib import Path

import pytest
from horovod_installed import needs_horovod
from poprun_jobs import start, start_command, start_mpirun

import strategies

PROGRAM = (sys.executable, str(Path(__file__).parent / "programs" / "train_pipelines.py"))
LIMIT_S = 250.0
strategies.IPUStrategy(8)  # JAX's devices are fixed when it starts, for the tests of other files too

pytestmark = [pytest.mark.complete, pytest.mark.job, pytest.mark.cores(2), pytest.mark.timeout(2 * LIMIT_S + 20)]


@functools.cache
def alone(replicas, model):
    """Return the output of this process, whose stages share one device."""
    sys.path.insert(0, os.path.dirname(PROGRAM[1]))
    from train_pipelines import line_of

    return line_of(strategies.IPUStrategy(replicas), model)


def averaged(instance, replicas):
    """Return the output of an instance that averaged the last stage's gradients in time for both micro-batches."""
    return " ".join([str(instance), *["True"] * 2 * replicas])


def test_a_pipeline_under_poprun_has_the_bits_of_one_process():
    words = ["--num-instances=2", "--num-replicas=4", "--ipus-per-replica=4"]
    options = ["--schedule=zero_bubble", "--recompute", "--leaving"]
    finished = start(*words, *PROGRAM, *options, "transformer", "batch norm").finish(LIMIT_S)
    assert finished.status == 0, finished.stderr
    assert finished.lines_of(0) == [alone(4, "transformer"), alone(4, "batch norm"), averaged(0, replicas=2)]
    assert finished.lines_of(1) == [averaged(1, replicas=2)]


def test_the_survivor_of_a_killed_instance_has_the_bits_of_one_process():
    """The survivor drives the stages of all replicas on the devices that it had."""
    words = ["--num-instances=2", "--num-replicas=4", "--ipus-per-replica=4", "--on-failure=shrink"]
    finished = start(*words, "--inject=kill:instance=0,step=1", *PROGRAM, "transformer").finish(LIMIT_S)
    assert finished.status == 0, finished.stderr
    assert "was killed by SIGKILL in step 1" in finished.stderr
    assert finished.lines_of(1) == [alone(4, "transformer")]


def workers(folder, *words):
    """Return the output of two workers that know each other by TF_CONFIG."""
    addresses = [f"unix:{folder}/{rank}" for rank in range(2)]
    tasks = [{"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}} for rank in range(2)]
    started = [start_command(*words, environ={"TF_CONFIG": json.dumps(task)}) for task in tasks]
    found = [worker.finish(LIMIT_S) for worker in started]
    assert [each.status for each in found] == [0, 0], found[0].stderr
    return [each.stdout.splitlines() for each in found]


def test_a_pipeline_of_networked_workers_has_the_bits_of_one_process(tmp_path):
    """Each replica spans four devices there, too."""
    options = ["--strategy=multi-worker", "--schedule=one_forward_one_backward", "--leaving"]
    first, second = workers(tmp_path, *PROGRAM, *options, "transformer")
    assert first == [alone(2, "transformer"), averaged(0, replicas=1)]
    assert second == [averaged(1, replicas=1)]


@needs_horovod
def test_a_pipeline_over_horovod_has_the_bits_of_one_process():
    """A sum of two terms is the same in any order; mpirun alone starts the instances."""
    options = ["--strategy=horovod", "--replicas=2", "--schedule=grouped", "--leaving"]
    finished = start_mpirun(2, *PROGRAM, *options, "batch norm").finish(LIMIT_S)
    assert finished.status == 0, finished.stderr
    assert finished.lines_of(0) == [alone(2, "batch norm"), averaged(0, replicas=1)]
    assert finished.lines_of(1) == [averaged(1, replicas=1)]
