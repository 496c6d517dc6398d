"""poprun --executable-cache-path in jobs of two instances."""

import sys
from pathlib import Path

import pytest
from poprun_jobs import LIMIT_S, start

PROGRAM = Path(__file__).parent / "programs" / "counting_compilations.py"
RUN_PROGRAMS = 4  # three of `run`, and the gradients

pytestmark = [pytest.mark.job, pytest.mark.cores(2), pytest.mark.timeout(2 * LIMIT_S + 20)]


def counts(folder):
    """Return (fingerprint, loaded, compiled) of both instances."""
    words = ("--num-instances=2", "--num-replicas=4", f"--executable-cache-path={folder}", sys.executable, str(PROGRAM))
    finished = start(*words).finish()
    assert finished.status == 0, finished.stderr
    lines = [finished.lines_of(instance)[-1].split() for instance in range(2)]
    return [(bits, int(loaded), int(compiled)) for bits, loaded, compiled in lines]


@pytest.mark.complete
def test_one_instance_compiles_and_the_next_job_only_loads(tmp_path):
    first = counts(tmp_path)
    programs = len(list(tmp_path.glob("*/*-cache")))
    assert {loaded + compiled for _, loaded, compiled in first} == {programs}  # the same ones on both
    assert sum(compiled for *_, compiled in first) == programs >= RUN_PROGRAMS  # each of them once
    again = counts(tmp_path)
    assert [(loaded, compiled) for _, loaded, compiled in again] == [(programs, 0)] * 2
    assert {bits for bits, _, _ in first} == {bits for bits, _, _ in again}
