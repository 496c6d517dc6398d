"""Options of the trainer in real jobs: the same bits from one process and from two instances over MPI.

`tests/strategies` (`test_precision`, `test_sharded_state`, `test_accumulation`) has them on threads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from poprun_jobs import ROOT, start

LIMIT_S = 150
TRAIN = [
    sys.executable,
    str(ROOT / "launch_scripts" / "train_digits.py"),
    *("--batch-size", "4", "--max-steps", "8", "--model", "mlp"),
]

pytestmark = [pytest.mark.complete, pytest.mark.job, pytest.mark.cores(2), pytest.mark.timeout(2 * LIMIT_S)]


OPTIONS = ["--shard-optimizer-state", "--gradient-accumulation-count", "2", "--gradient-transfer-dtype", "int8"]


def test_two_instances_have_the_bits_of_one_process(tmp_path):
    alone, together = tmp_path / "alone.json", tmp_path / "together.json"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "POPDIST_", "PJRT_"))}
    command = [*TRAIN, *OPTIONS, "--strategy", "ipu", "--replicas", "4", "--json", str(alone)]
    subprocess.run(command, check=True, timeout=LIMIT_S, env=clean | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE)
    job = start("--num-instances=2", "--num-replicas=4", *TRAIN, *OPTIONS, "--json", str(together))
    job.process.wait(LIMIT_S)
    finished = job.finish()
    assert finished.status == 0, finished.stderr
    one, two = read(alone), read(together)
    assert (one["instances"], two["instances"]) == (1, 2)
    assert two["variables_sha256"] == one["variables_sha256"]
    assert one["effective_batch_size"] == two["effective_batch_size"] == 4 * 2 * 4
    assert one["final_loss"] == two["final_loss"] > 0


def read(path: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(path.read_text())
    return found
