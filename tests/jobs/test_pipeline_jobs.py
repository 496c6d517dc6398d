"""Pipelines under poprun and mpirun: the bits of one process whose stages run one after another on one device."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from horovod_installed import needs_horovod
from poprun_jobs import ROOT, start, start_mpirun

MODELS = ("transformer", "batch norm")  # the others: tests/strategies/pipelines/test_pipelining.py, on threads
PROGRAM = (sys.executable, str(Path(__file__).parent / "programs" / "train_pipelines.py"))
LEAVING = (sys.executable, str(Path(__file__).parent / "programs" / "leaving_in_stages.py"))
REPLICAS, LIMIT_S = 4, 250.0

pytestmark = [pytest.mark.complete, pytest.mark.job, pytest.mark.cores(2), pytest.mark.timeout(2 * LIMIT_S + 20)]


def environment(**more):
    """The variables of a process that nobody has launched."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "POPDIST_", "PJRT_", "TF_CONFIG"))}
    return clean | {"PYTHONPATH": str(ROOT)} | more


@functools.cache
def alone(replicas):
    """What one process prints, whose stages are on one device."""
    words = [*PROGRAM, f"--replicas={replicas}", *MODELS]
    ended = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert len(ended.stdout.splitlines()) == len(MODELS)
    return ended.stdout.splitlines()


@pytest.fixture
def expected():
    return alone(REPLICAS)


@pytest.mark.parametrize(
    ("instances", "options"),
    [(2, ["--schedule=zero_bubble", "--recompute"]), (4, ["--schedule=grouped"])],
)
def test_under_poprun(instances, options, expected):
    words = [f"--num-instances={instances}", f"--num-replicas={REPLICAS}", "--ipus-per-replica=4"]
    finished = start(*words, *PROGRAM, *options, *MODELS).finish(LIMIT_S)
    assert finished.status == 0, finished.stderr
    assert finished.lines_of(0) == expected


def test_under_mpirun(expected):
    finished = start_mpirun(2, *PROGRAM, f"--replicas={REPLICAS}", *MODELS).finish(LIMIT_S)
    assert finished.status == 0, finished.stderr
    assert finished.lines_of(0) == expected


def workers(folder, *words):
    """What two workers print that know each other by TF_CONFIG."""
    addresses = [f"unix:{folder}/{rank}" for rank in range(2)]
    started = [
        subprocess.Popen(
            words,
            env=environment(
                TF_CONFIG=json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}})
            ),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [worker.communicate(timeout=LIMIT_S)[0].splitlines() for worker in started]
    finally:
        for worker in started:
            worker.kill()
            worker.wait()
    assert [worker.returncode for worker in started] == [0, 0]
    return printed


def test_workers_that_share_a_network(tmp_path):
    """Each replica spans four devices there, too."""
    words = [*PROGRAM, "--strategy=multi-worker", "--schedule=one_forward_one_backward", *MODELS]
    assert workers(tmp_path, *words) == [alone(2), []]


@needs_horovod
def test_instances_that_horovod_connects():
    """A sum of two is the same in any order."""
    finished = start_mpirun(2, *PROGRAM, "--strategy=horovod", "--replicas=2", "--schedule=grouped", *MODELS).finish(
        LIMIT_S
    )
    assert finished.status == 0, finished.stderr
    assert finished.lines_of(0) == alone(2)


def test_a_pipeline_verifies():
    words = ["--num-replicas=2", "--ipus-per-replica=4", *PROGRAM, "--schedule=zero_bubble", "mlp"]
    finished = start("verify", *words).finish(LIMIT_S)
    assert finished.status == 0, finished.stderr
    assert "equal: 2 runs of" in finished.stdout


# ---- gradients of the last stage are averaged before the first one goes back

AVERAGED = ["0 True True", "1 True True"]


def test_gradients_leave_stage_by_stage_under_poprun():
    words = ["--num-instances=2", "--num-replicas=2", "--ipus-per-replica=4", *LEAVING, "popdist"]
    finished = start(*words).finish(LIMIT_S)
    assert finished.status == 0, finished.stderr
    assert [*finished.lines_of(0), *finished.lines_of(1)] == AVERAGED


def test_gradients_leave_stage_by_stage_over_a_network(tmp_path):
    assert [line for lines in workers(tmp_path, *LEAVING, "multi-worker") for line in lines] == AVERAGED


@needs_horovod
def test_gradients_leave_stage_by_stage_over_horovod():
    finished = start_mpirun(2, *LEAVING, "horovod").finish(LIMIT_S)
    assert finished.status == 0, finished.stderr
    assert [*finished.lines_of(0), *finished.lines_of(1)] == AVERAGED
