"""Options of the trainer in real jobs of two instances over MPI.

`tests/strategies` (`test_precision`, `test_sharded_state`, `test_accumulation`) has them on threads.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from poprun_jobs import start

import strategies

sys.path.insert(0, str(Path(__file__).parent / "programs"))
import training_options  # noqa: E402

LIMIT_S = 150
strategies.IPUStrategy(8)  # JAX's devices are fixed when it starts, for the tests of other files too

pytestmark = [pytest.mark.complete, pytest.mark.job, pytest.mark.cores(2), pytest.mark.timeout(2 * LIMIT_S)]


def test_two_instances_have_the_bits_of_one_process(tmp_path):
    file = tmp_path / "together.json"
    program = [sys.executable, training_options.__file__, str(file)]
    finished = start("--num-instances=2", "--num-replicas=4", *program).finish(LIMIT_S)
    assert finished.status == 0, finished.stderr
    one, two = training_options.train(strategies.IPUStrategy(4)), json.loads(file.read_text())
    assert (one["instances"], two["instances"]) == (1, 2)
    assert two["variables"] == one["variables"]
    assert one["loss"] == two["loss"] > 0
