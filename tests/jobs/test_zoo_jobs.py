"""Models of the zoo under poprun: the fingerprints of one process."""

import os
import subprocess
import sys

import pytest
from poprun_jobs import ROOT, start

PROGRAM = (sys.executable, str(ROOT / "tests" / "jobs" / "programs" / "train_zoo.py"))
LIMIT_S = 250

pytestmark = [pytest.mark.complete, pytest.mark.job, pytest.mark.cores(2), pytest.mark.timeout(2 * LIMIT_S + 20)]


NAMES = ("batch_norm", "lstm", "experts", "fft")


def test_the_fingerprints_are_those_of_one_process():
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "POPDIST_", "PJRT_"))}
    words = [*PROGRAM, "--replicas=4", *NAMES]
    alone = subprocess.run(
        words, env=clean | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    finished = start("--num-instances=2", "--num-replicas=4", *PROGRAM, *NAMES).finish(LIMIT_S)
    assert finished.status == 0, finished.stderr
    assert finished.lines_of(0) == alone.stdout.splitlines()
    assert len(finished.lines_of(0)) == 5 * len(NAMES)
