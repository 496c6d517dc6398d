"""Pipelines under poprun and mpirun: the bits of one process whose stages run one after another on one device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from poprun_jobs import ROOT, start, start_mpirun

MODELS = ("mlp", "cnn", "transformer", "batch norm")
PROGRAM = (sys.executable, str(Path(__file__).parent / "programs" / "train_pipelines.py"))
REPLICAS, LIMIT_S = 4, 250.0

pytestmark = [pytest.mark.complete, pytest.mark.job, pytest.mark.cores(2), pytest.mark.timeout(2 * LIMIT_S + 20)]


@pytest.fixture(scope="module")
def expected():
    """What one process prints."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "POPDIST_", "PJRT_"))}
    words = [*PROGRAM, f"--replicas={REPLICAS}", *MODELS]
    alone = subprocess.run(
        words, env=clean | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert len(alone.stdout.splitlines()) == len(MODELS)
    return alone.stdout.splitlines()


@pytest.mark.parametrize(
    ("instances", "options"),
    [(1, ["--schedule=grouped"]), (2, ["--schedule=zero_bubble", "--recompute"]), (4, ["--schedule=grouped"])],
)
def test_under_poprun(instances, options, expected):
    words = [f"--num-instances={instances}", f"--num-replicas={REPLICAS}", "--ipus-per-replica=4"]
    finished = start(*words, *PROGRAM, *options, *MODELS).finish(LIMIT_S)
    assert finished.status == 0, finished.stderr
    assert finished.lines_of(0) == expected


@pytest.mark.parametrize("ranks", [2, 4])
def test_under_mpirun(ranks, expected):
    finished = start_mpirun(ranks, *PROGRAM, f"--replicas={REPLICAS}", *MODELS).finish(LIMIT_S)
    assert finished.status == 0, finished.stderr
    assert finished.lines_of(0) == expected
