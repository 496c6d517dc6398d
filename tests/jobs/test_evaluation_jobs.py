"""Evaluating and predicting in real jobs: what one process finds, also where an instance is killed.

On threads `tests/strategies/test_evaluation.py` and `test_surviving_evaluation.py` show the same.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import pytest
from poprun_jobs import start

import strategies

PROGRAM = Path(__file__).parent / "programs" / "evaluating.py"
sys.path.insert(0, str(PROGRAM.parent))
from evaluating import ROWS, work  # noqa: E402

strategies.IPUStrategy(8)  # JAX's devices are fixed when it starts, for the tests of other files too
REPLICAS = 4
LIMIT_S = 150.0

pytestmark = [pytest.mark.complete, pytest.mark.job, pytest.mark.cores(2), pytest.mark.timeout(300)]


@functools.cache
def alone():
    return json.loads(json.dumps(work(strategies.IPUStrategy(REPLICAS))["found"]))


def found_by(*options):
    words = (sys.executable, str(PROGRAM), str(REPLICAS))
    finished = start("--num-instances=2", f"--num-replicas={REPLICAS}", *options, *words).finish(LIMIT_S)
    assert finished.status == 0, finished.stderr
    lines = [line.partition("<stdout>:")[2] for line in finished.stdout.splitlines() if "<stdout>:{" in line]
    return [json.loads(line) for line in lines]


def test_two_instances_find_what_one_process_finds():
    assert [each["rows"] for each in alone()] == [ROWS] * 4
    assert found_by() == [{"found": alone(), "instances": 2}] * 2


def test_the_other_goes_on_where_one_is_killed():
    """While it predicts after the third step: what it computes next is told in an all-gather."""
    fault = "kill:instance=0,step=3,phase=all_gather"
    assert found_by("--on-failure=shrink", f"--inject={fault}") == [{"found": alone(), "instances": 1}]
