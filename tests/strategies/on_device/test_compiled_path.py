"""Compiled collectives in processes connected by JAX's own runtime: the bits of the exchange on the host."""

import sys
from pathlib import Path

import poprun_jobs
import pytest
from mpi_jobs import in_a_job, mpirun_command, run_job

PROGRAM = Path(__file__).with_name("compiled_job.py")
TRAINING = Path(__file__).with_name("trained_job.py")


@in_a_job
@pytest.mark.parametrize("instances", [pytest.param(2, marks=pytest.mark.complete), 3])
def test_compiled_means_have_the_bits_of_the_host(instances):
    job = run_job(mpirun_command(instances, PROGRAM))
    assert job.returncode == 0, job.stderr
    own = sorted(line for line in job.stdout.splitlines() if not line.startswith("[Gloo]"))
    assert own == [f"{rank} is done" for rank in range(instances)]


@pytest.mark.job
@pytest.mark.cores(2)
@pytest.mark.timeout(200)
@pytest.mark.parametrize("instances", [2, pytest.param(3, marks=pytest.mark.complete)])
def test_a_training_by_compiled_collectives_has_the_fingerprint_of_the_host(tmp_path, instances):
    where = f"--num-instances={instances}", "--num-replicas=6"  # three of six replicas are no node of the tree
    proxy = {"http_proxy": "http://127.0.0.1:1"}  # nothing listens there, so a use of the proxy would fail
    job = poprun_jobs.run(*where, sys.executable, str(TRAINING), str(tmp_path), environ=proxy)
    assert job.status == 0, job.stderr
    lines = [[line.split() for line in job.lines_of(instance) if "Gloo" not in line] for instance in range(instances)]
    assert {word for own in lines for word, *_ in own} == {"compiled", "host"}
    [(fingerprint, restored, _)] = {tuple(found) for own in lines for _, *found in own}
    assert fingerprint == restored
