"""Options of the trainer in real jobs of two instances over MPI.

`tests/strategies` (`test_precision`, `test_sharded_state`, `test_accumulation`) has them on threads.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import pytest
from poprun_jobs import ROOT, start

import strategies
from popdist.examples import digits as train_digits
from popdist.examples.digits_data import load_digits

LIMIT_S = 150
STEPS = 3
WORDS = ["--batch-size", "4", "--max-steps", str(STEPS), "--model", "mlp", "--shard-optimizer-state"]
WORDS += ["--gradient-accumulation-count", "2", "--gradient-transfer-dtype", "bfloat16"]
strategies.IPUStrategy(8)  # JAX's devices are fixed when it starts, for the tests of other files too

pytestmark = [pytest.mark.complete, pytest.mark.job, pytest.mark.cores(2), pytest.mark.timeout(2 * LIMIT_S)]


def alone() -> dict[str, object]:
    """Return the result of the main job in this process."""
    options = train_digits.read_options([*WORDS, "--replicas", "4"])
    data, strategy = load_digits("digits"), strategies.IPUStrategy(4)
    dataset = train_digits.distribute(strategy, data, options)
    training = train_digits.train(strategy, dataset, data, options)
    return asdict(train_digits.result_of(training, strategy, dataset, options))


def test_two_instances_have_the_bits_of_one_process(tmp_path):
    file = tmp_path / "together.json"
    program = [sys.executable, str(ROOT / "popdist" / "examples" / "digits.py")]
    finished = start("--num-instances=2", "--num-replicas=4", *program, *WORDS, "--json", str(file)).finish(LIMIT_S)
    assert finished.status == 0, finished.stderr
    one, two = alone(), json.loads(file.read_text())
    assert (one["instances"], two["instances"]) == (1, 2)
    assert (one["steps"], two["steps"]) == (STEPS, STEPS)
    assert two["variables_sha256"] == one["variables_sha256"]
    assert one["effective_batch_size"] == two["effective_batch_size"] == 4 * 2 * 4
    assert one["final_loss"] == two["final_loss"] > 0
