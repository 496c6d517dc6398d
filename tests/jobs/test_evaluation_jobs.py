"""Evaluating and predicting in real jobs: what one process finds, before and after an instance is killed.

On threads `tests/strategies/test_evaluation.py` and `test_surviving_evaluation.py` show the same.
"""

from __future__ import annotations

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


def test_two_instances_and_the_one_that_is_left_find_what_one_process_finds():
    """One is killed while it predicts after the third step: what it computes next is told in an all-gather."""
    words = (sys.executable, str(PROGRAM), str(REPLICAS))
    options = ("--on-failure=shrink", "--inject=kill:instance=0,step=3,phase=all_gather")
    finished = start("--num-instances=2", f"--num-replicas={REPLICAS}", *options, *words).finish(LIMIT_S)
    assert finished.status == 0, finished.stderr
    alone = json.loads(json.dumps([*work(strategies.IPUStrategy(REPLICAS))]))
    assert [each["rows"] for each in alone] == [ROWS] * 4
    lost, left = ([json.loads(line) for line in finished.lines_of(instance)] for instance in range(2))
    assert lost == [[2, found] for found in alone[:2]]
    assert left == [*lost, *([1, found] for found in alone[2:])]
