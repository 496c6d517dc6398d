"""The compiled path has the bits of the exchange on the host, in processes that JAX's own runtime connects."""

from pathlib import Path

import pytest
from mpi_jobs import in_a_job, mpirun_command, run_job

PROGRAM = Path(__file__).with_name("compiled_job.py")


@in_a_job
@pytest.mark.parametrize("instances", [2, 3])
def test_compiled_means_have_the_bits_of_the_host(instances):
    job = run_job(mpirun_command(instances, PROGRAM))
    assert job.returncode == 0, job.stderr
    own = sorted(line for line in job.stdout.splitlines() if not line.startswith("[Gloo]"))
    assert own == [f"{rank} is done" for rank in range(instances)]
