"""Real jobs that train a PyTorch module, over every transport."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys

import pytest
from horovod_installed import needs_horovod
from poprun_jobs import ROOT, run, start, start_command, two

import strategies
from popdist.records.recording import FOLDER_VARIABLE
from poprun.verify.comparison import first_difference
from poprun.verify.explanation import advice
from poprun.verify.records import BATCH, read_record

strategies.IPUStrategy(8)  # JAX's devices are fixed when it starts, for the tests of other files too

pytestmark = [
    pytest.mark.job,
    pytest.mark.long,
    pytest.mark.cores(2),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"),
]

FILE = str(ROOT / "tests" / "jobs" / "programs" / "train_module.py")
PROGRAM = (sys.executable, FILE)
STEPS = 3


@functools.cache
def alone(replicas):
    """Return the fingerprints of this process."""
    return train_here(replicas, STEPS)


def train_here(replicas, *options, way="popdist"):
    import torch

    sys.path.insert(0, os.path.dirname(FILE))
    from train_module import WAYS, train

    with torch.random.fork_rng():
        return WAYS.get(way, train)(strategies.IPUStrategy(replicas), *options)


def test_a_poprun_job_has_the_fingerprints_of_one_process():
    finished = start("--num-instances=2", "--num-replicas=4", *PROGRAM, "popdist", str(STEPS)).finish()
    assert finished.status == 0, finished.stderr
    expected = alone(4)
    assert [json.loads(finished.lines_of(instance)[-1]) for instance in (0, 1)] == [
        [0, 2, *expected],
        [1, 2, *expected],
    ]


@pytest.mark.complete
@pytest.mark.parametrize("way", ["popdist", "loop", "pipeline"])
def test_the_survivor_of_a_killed_instance_has_the_fingerprints_of_one_process(way):
    fault = "--inject=kill:instance=1,step=1,phase=all_reduce"
    words = ["--num-instances=2", "--num-replicas=4", "--on-failure=shrink", fault]
    finished = start(*words, *PROGRAM, way, str(STEPS)).finish()
    assert finished.status == 0, finished.stderr
    assert "was killed by SIGKILL in step 1" in finished.stderr
    expected = train_here(4, STEPS, way=way) if way == "pipeline" else alone(4)
    assert json.loads(finished.lines_of(0)[-1]) == [0, 4, *expected]


@pytest.mark.complete
def test_grpc_workers_have_the_fingerprints_of_one_process(tmp_path):
    cluster = {"worker": [f"unix:{tmp_path}/{rank}" for rank in range(2)]}
    tasks = [{"cluster": cluster, "task": {"type": "worker", "index": rank}} for rank in range(2)]
    workers = [
        start_command(*PROGRAM, "workers", str(STEPS), environ={"TF_CONFIG": json.dumps(task)}) for task in tasks
    ]
    found = [worker.finish() for worker in workers]
    assert [one.status for one in found] == [0, 0], found[0].stderr
    assert [json.loads(one.stdout.splitlines()[-1]) for one in found] == [[0, 2, *alone(4)], [1, 2, *alone(4)]]


@pytest.mark.complete
@needs_horovod
def test_horovod_instances_agree():
    finished = start("--num-instances=2", "--num-replicas=2", *PROGRAM, "horovod", str(STEPS)).finish()
    assert finished.status == 0, finished.stderr
    zero, one = (json.loads(finished.lines_of(instance)[-1]) for instance in (0, 1))
    assert zero[2:] == one[2:]


@pytest.mark.complete
@pytest.mark.timeout(300)
def test_a_torch_training_verifies():
    finished = start("verify", "--num-replicas=2", *PROGRAM, "popdist", str(STEPS)).finish(280)
    assert finished.status == 0, finished.stderr
    assert finished.stdout.count("equal") >= 2


@pytest.mark.complete
def test_a_dataset_with_noise_from_python_s_generator_is_found_guilty(tmp_path, monkeypatch):
    """The records of two runs are compared here; `test_verify.py` has jobs whose runs differ."""
    records = []
    for attempt in ("one", "other"):
        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / attempt))
        train_here(2, 1, True)
        records.append(read_record(tmp_path / attempt))
    difference = first_difference(*records)
    assert (difference.part, difference.place) == (BATCH, (0, 0))
    assert advice(difference, *records).startswith("random: its global generator was used")


TOGETHER = """
import os
import torch
import torch.distributed as distributed
distributed.init_process_group("gloo")
mine = torch.tensor([float(distributed.get_rank() + 1)])
distributed.all_reduce(mine)
print(distributed.get_world_size(), os.environ["LOCAL_RANK"], mine.item(), flush=True)
distributed.destroy_process_group()
"""


@pytest.mark.complete
@pytest.mark.cores(2)
def test_torch_distributed_connects_the_instances_by_its_own_variables():
    finished = run(*two(TOGETHER))
    assert finished.status == 0, finished.stderr
    assert [finished.lines_of(instance) for instance in range(2)] == [["2 0 3.0"], ["2 1 3.0"]]
    assert "poprun:" not in finished.stderr
