"""Collectives between replicas in jobs of several instances, compared with one process."""

import sys
from pathlib import Path

import numpy as np
import pytest
from poprun_jobs import start

import strategies

strategies.IPUStrategy(8)  # JAX's devices are fixed when it starts, for the tests of other files too
ALONE = strategies.IPUStrategy(4)
PROGRAMS = Path(__file__).parents[1] / "strategies" / "programs"
sys.path.insert(0, str(PROGRAMS))
LIMIT_S = 150

pytestmark = [pytest.mark.job, pytest.mark.cores(2), pytest.mark.timeout(LIMIT_S + 20)]


@pytest.fixture(scope="module")
def alone():
    import every_collective

    return every_collective.found(ALONE)


@pytest.mark.complete
def test_collectives_and_trainings_of_two_instances_have_the_bits_of_one_process(tmp_path, alone, subtests):
    words = ("--num-instances=2", "--num-replicas=4", sys.executable)
    finished = start(*words, str(PROGRAMS / "every_collective.py"), str(tmp_path)).finish(LIMIT_S)
    assert finished.status == 0, finished.stderr
    with subtests.test("all bits are those of one process"):
        found = [dict(np.load(tmp_path / f"{instance}.npz")) for instance in range(2)]
        for part in found:
            assert [name for name in part if part[name].tobytes() != alone[name].tobytes()] == []
        assert set().union(*found) == set(alone)
    with subtests.test("the example with synchronised batch normalisation runs"):
        [line] = finished.lines_of(0)
        assert float(line.split()[1]) > 0.5
