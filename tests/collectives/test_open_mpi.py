"""The transports that a process leaves Open MPI, by its environment and the devices of its host."""

from __future__ import annotations

import subprocess
import sys

import pytest
from grpc_jobs import environ_with

from collectives.open_mpi import CHOSEN_VARIABLES, transports

WITHIN_A_HOST = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "12", "OMPI_COMM_WORLD_LOCAL_SIZE": "12"}
ACROSS_HOSTS = WITHIN_A_HOST | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
UNDER_SRUN = {"PMIX_RANK": "0"}


@pytest.mark.parametrize("has_fabric", [False, True])
def test_a_job_on_one_host_uses_no_fabric(has_fabric: bool) -> None:
    assert transports(WITHIN_A_HOST, has_fabric) == {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^ofi,uct"}


@pytest.mark.parametrize("environ", [ACROSS_HOSTS, UNDER_SRUN])
def test_a_fabric_between_hosts_is_left_out_only_if_this_host_has_none(environ: dict[str, str]) -> None:
    assert transports(environ, has_fabric=True) == {}
    assert transports(environ, has_fabric=False) == {"OMPI_MCA_btl": "^ofi"}


@pytest.mark.parametrize("environ", [WITHIN_A_HOST, ACROSS_HOSTS, UNDER_SRUN])
@pytest.mark.parametrize("name", CHOSEN_VARIABLES)
def test_transports_named_in_the_environment_are_kept(environ: dict[str, str], name: str) -> None:
    assert transports(environ | {name: "x"}, has_fabric=False) == {}


def test_a_process_without_a_launcher_makes_no_file_in_shared_memory() -> None:
    assert transports({}, has_fabric=True) == {"OMPI_MCA_btl": "^sm,ofi,uct"}
    assert transports({"OMPI_MCA_btl": "self"}, has_fabric=True) == {}


FEW_DESCRIPTORS = """
import resource
from collectives.open_mpi import open_mpi_prepared
resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
with open_mpi_prepared():
    print("began")
"""


def test_mpi_does_not_begin_with_too_few_descriptors() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FEW_DESCRIPTORS], env=environ_with(), capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "MPI needs 18 file descriptors, but this process may open 20 and has" in ended.stderr
    assert "ulimit -n" in ended.stderr
