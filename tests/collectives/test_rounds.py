"""Repeated reductions into allocated memory that all ranks see."""

from pathlib import Path

import pytest
from mpi_jobs import mpirun_command, run_job

PROGRAM = Path(__file__).with_name("rounds_job.py")


@pytest.mark.complete
@pytest.mark.job
@pytest.mark.cores(2)
@pytest.mark.timeout(120)
def test_results_in_allocated_memory_are_right_every_time():
    job = run_job(mpirun_command(2, PROGRAM))
    assert job.returncode == 0, job.stderr
    counts = [line.split()[0] for line in job.stdout.splitlines()]
    assert counts == ["0"] * 8, job.stdout
