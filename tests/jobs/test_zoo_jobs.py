"""Models of the zoo under poprun: the fingerprints of one process."""

import sys

import pytest
from poprun_jobs import ROOT, start
from zoo import MODELS, fingerprints

import strategies

PROGRAM = (sys.executable, str(ROOT / "tests" / "jobs" / "programs" / "train_zoo.py"))
LIMIT_S = 250
REPLICAS = 4
NAMES = ("batch_norm", "lstm", "experts", "fft")

pytestmark = [pytest.mark.complete, pytest.mark.job, pytest.mark.cores(2), pytest.mark.timeout(LIMIT_S + 20)]


def test_the_fingerprints_are_those_of_one_process():
    """This one."""
    finished = start("--num-instances=2", f"--num-replicas={REPLICAS}", *PROGRAM, *NAMES).finish(LIMIT_S)
    assert finished.status == 0, finished.stderr
    alone = {name: fingerprints(strategies.IPUStrategy(REPLICAS), MODELS[name]) for name in NAMES}
    wanted = [f"{name} {step} {found}" for name in NAMES for step, found in enumerate(alone[name])]
    assert len(wanted) == 5 * len(NAMES)
    assert finished.lines_of(0) == wanted
