"""Jobs that grow back: poprun starts new instances in the places of lost ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from poprun_jobs import Finished, start

import strategies

PROGRAMS = Path(__file__).parent / "programs"
sys.path.insert(0, str(PROGRAMS))
from growing_training import REPLICAS, train  # noqa: E402

strategies.IPUStrategy(REPLICAS)  # JAX's devices are fixed when it starts, for the tests of other files too
LIMIT_S = 100.0

pytestmark = [pytest.mark.job, pytest.mark.long, pytest.mark.cores(2), pytest.mark.timeout(150)]


def grow(program: str, instances: int, replicas: int, *words: str) -> Finished:
    shape = (f"--num-instances={instances}", f"--num-replicas={replicas}")
    new = ("--regrow=yes", "--max-restarts=2", "--restart-backoff-s=0")
    finished = start(*shape, *new, sys.executable, str(PROGRAMS / program), *words).finish(LIMIT_S)
    assert finished.status == 0, finished.stderr
    return finished


def test_after_the_loss_of_the_chief_the_second_new_instance_joins_if_the_first_is_killed_on_its_way():
    finished = grow("growing_back.py", 3, 6, "0,3")
    assert [finished.lines_of(rank) for rank in (1, 2, 4)] == [["3 instances, 2 replicas"]] * 3
    assert finished.lines_of(0) == finished.lines_of(3) == []
    said = "\n".join(finished.said)
    assert said.count("starts on host") == 2
    assert "reserve 3 on host" in said


@pytest.mark.complete
@pytest.mark.parametrize("instances", [2, 3])
def test_a_training_with_a_loss_and_a_new_instance_has_the_bits_of_one_process(instances):
    expected = train(strategies.IPUStrategy(REPLICAS), lambda made: None)
    finished = grow("growing_training.py", instances, REPLICAS)
    found = [json.loads(line) for rank in range(instances + 2) for line in finished.lines_of(rank)]
    assert [replica for each in found for replica in each.pop("replicas")] == list(range(REPLICAS))
    assert found == [expected] * instances
