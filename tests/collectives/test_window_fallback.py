"""The fallback of all ranks to the ring if shared memory is missing or too small."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mpi_jobs import HERE, in_a_job, mpirun_command, run_job

from collectives import Communicator, Settings, run_on_threads

RANKS = 3
RING = ["rank: ring"] * RANKS


def lines_of(command: list[str]) -> list[str]:
    job = run_job(command)
    assert job.returncode == 0, job.stderr
    return [line for line in job.stdout.splitlines() if line.startswith("rank: ")]


def job(mechanism: str, directory: Path, scarcity: str, *hosts: str) -> list[str]:
    return mpirun_command(RANKS, HERE / "window_job.py", mechanism, str(directory), scarcity, *hosts)


def on_a_file_system_of_one_megabyte(command: list[str], directory: Path) -> list[str]:
    """Return the command with a private, small file system at `directory`."""
    can_mount = shutil.which("unshare") and os.geteuid() == 0
    if not can_mount or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root and mount namespaces")
    mount = f"mount -t tmpfs -o size=1m tmpfs {shlex.quote(str(directory))}"
    return ["unshare", "-m", "sh", "-c", f"{mount} && exec {shlex.join(command)}"]


def assert_refused(lines: list[str], directory: Path) -> None:
    assert len(lines) == RANKS
    assert len(set(lines)) == 1
    assert f"RuntimeError: mechanism 'window' needs ranks that share a host and enough room in {directory}" in lines[0]


@in_a_job
@pytest.mark.parametrize(
    ("hosts", "scarcity", "mechanism"),
    [
        (("here", "there", "here"), "plenty", "window and ring"),
        *(
            pytest.param(*case, marks=pytest.mark.complete)
            for case in (
                ((), "plenty", "window"),
                ((), "small files", "ring"),
                ((), "no file on one rank", "ring"),
                (("here", "there", "there"), "no file on one rank", "ring"),
            )
        ),
    ],
)
def test_all_ranks_use_the_window_if_there_is_room_and_leave_no_file(
    tmp_path: Path, hosts: tuple[str, ...], scarcity: str, mechanism: str
) -> None:
    assert lines_of(job("auto", tmp_path, scarcity, *hosts)) == [f"rank: {mechanism}"] * RANKS
    assert list(tmp_path.iterdir()) == []


def test_ranks_on_different_hosts_need_no_window(tmp_path: Path) -> None:
    """Ranks that remain after a loss, or that form a subgroup, go on without a window."""
    settings = Settings(mechanism="window", shared_memory_dir=tmp_path)

    def program(communicator: Communicator) -> tuple[str, str]:
        apart = [0, 1] if communicator.rank < 2 else [2]
        return communicator.mechanism, communicator.subgroup(apart).mechanism

    both, one = ("window and ring", "ring"), ("window and ring", "window")
    assert run_on_threads(3, program, settings, ["here", "there", "here"]) == [both, both, one]


def test_threads_on_several_hosts_without_room_get_an_error(tmp_path: Path) -> None:
    settings = Settings(mechanism="window", shared_memory_dir=tmp_path / "missing")
    with pytest.raises(RuntimeError, match="use 'auto' or 'ring'"):
        run_on_threads(3, lambda _: None, settings, ["here", "there", "here"])


@in_a_job
def test_a_full_file_system_leads_to_the_ring(tmp_path: Path) -> None:
    command = on_a_file_system_of_one_megabyte(job("auto", tmp_path, "no room"), tmp_path)
    assert lines_of(command) == RING


@in_a_job
@pytest.mark.complete
def test_a_full_file_system_is_an_error_if_the_window_is_required(tmp_path: Path) -> None:
    command = on_a_file_system_of_one_megabyte(job("window", tmp_path, "no room"), tmp_path)
    assert_refused(lines_of(command), tmp_path)


@pytest.mark.complete
@in_a_job
@pytest.mark.parametrize("scarcity", ["small files", "no file on one rank"])
def test_a_limit_of_the_process_is_an_error_if_the_window_is_required(tmp_path: Path, scarcity: str) -> None:
    assert_refused(lines_of(job("window", tmp_path, scarcity)), tmp_path)
    assert list(tmp_path.iterdir()) == []


@in_a_job
@pytest.mark.complete
def test_a_missing_directory_leads_to_the_ring(tmp_path: Path) -> None:
    assert lines_of(job("auto", tmp_path / "missing", "plenty")) == RING


def test_threads_without_room_get_an_error(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(RuntimeError, match=f"room in {missing}; use 'auto' or 'ring'"):
        run_on_threads(2, lambda _: None, Settings(mechanism="window", shared_memory_dir=missing))


def test_a_window_in_use_leaves_no_file(tmp_path: Path) -> None:
    def program(communicator: Communicator) -> list[Path]:
        communicator.allocate((70_000,), np.float64)
        communicator.barrier()
        return list(tmp_path.iterdir())

    assert run_on_threads(3, program, Settings(mechanism="window", shared_memory_dir=tmp_path)) == [[]] * 3


_ALLOCATE_TOO_MUCH = """\
import resource, sys
from pathlib import Path
import numpy as np
from collectives import Settings
from collectives import run_on_threads

def program(communicator):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    out = communicator.allocate((1_000_003,), np.float32)
    communicator.ordered_all_reduce([np.full(1_000_003, communicator.rank, np.float32)], out)
    assert (out == 1).all()
    return communicator.mechanism

settings = Settings(mechanism="window", shared_memory_dir=Path(sys.argv[1]))
assert run_on_threads(2, program, settings) == ["window", "window"]
assert list(Path(sys.argv[1]).iterdir()) == []
"""


def test_results_without_room_go_to_private_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _ALLOCATE_TOO_MUCH, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
