"""The removal of files of dead jobs; files of other owners stay."""

from __future__ import annotations

import mmap
import os
import subprocess
from pathlib import Path

import pytest

from poprun.ipc.leavings import folder_of, remove_leavings

HOST = os.uname().nodename.partition(".")[0]
USER = os.geteuid()


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """Provide a temporary folder."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    return folder


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Provide a folder in place of shared memory."""
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def dead() -> int:
    """Provide the pid of a process that has ended."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    return ended.pid


def session(folder: Path, kind: str, pid: int, host: str = HOST) -> Path:
    """Make the session folder of Open MPI's mpirun or daemon with this pid."""
    made = folder / f"{kind}.{pid}"
    (made / "0" / "0").mkdir(parents=True)
    (made / "hwloc.sm").write_text("topology")
    if host:
        (made / f"pmix.{host}.tool.{pid}").touch()
    return made


def segment(folder: Path, host: str = HOST, user: int = USER) -> Path:
    made = folder / f"sm_segment.{host}.{user}.d33d0001.1"
    made.write_bytes(bytes(4096))
    return made


@pytest.mark.parametrize("kind", ["ompi", "prted"])
@pytest.mark.parametrize("host", [HOST, f"{HOST}.cluster.example"])
def test_the_folder_of_a_dead_process_of_this_host_is_removed(
    temporary: Path, shared: Path, dead: int, kind: str, host: str
) -> None:
    made = session(temporary, kind, dead, host)
    assert remove_leavings(str(temporary), (), str(shared)) == [str(made)]
    assert not made.exists()


def test_the_folder_of_a_living_process_stays(temporary: Path, shared: Path) -> None:
    session(temporary, "ompi", os.getpid())
    assert remove_leavings(str(temporary), (), str(shared)) == []


@pytest.mark.parametrize(
    ("host", "removed"),
    [(HOST, True), (f"{HOST}.cluster.example", True), ("elsewhere", False), (f"{HOST}-2", False)],
)
def test_the_folder_of_a_process_killed_at_its_end_is_recognised_by_its_job_data(
    temporary: Path, shared: Path, dead: int, host: str, removed: bool
) -> None:
    """Open MPI removes the file with the host's name first."""
    made = session(temporary, "ompi", dead, host="")
    (made / "1").mkdir()
    (made / "1" / f"pmix-gds-shmem2.{host}-prterun-{host}-{dead}@1.jobdata.{dead}").touch()
    assert remove_leavings(str(temporary), (), str(shared)) == [str(made)] * removed
    assert made.exists() is not removed


@pytest.mark.parametrize("host", ["elsewhere", ""])
def test_a_folder_that_may_belong_to_another_host_stays(temporary: Path, shared: Path, dead: int, host: str) -> None:
    session(temporary, "prted", dead, host)
    assert remove_leavings(str(temporary), (), str(shared)) == []


def test_the_folder_of_a_process_known_to_have_ended_is_removed(temporary: Path, shared: Path, dead: int) -> None:
    made = session(temporary, "ompi", dead, "")
    assert remove_leavings(str(temporary), [dead], str(shared)) == [str(made)]


def test_a_file_that_a_process_has_open_stays(temporary: Path, shared: Path, dead: int) -> None:
    made = session(temporary, "ompi", dead)
    with open(made / "hwloc.sm"), open(segment(shared)):
        assert remove_leavings(str(temporary), [dead], str(shared)) == []
    assert len(remove_leavings(str(temporary), [dead], str(shared))) == 2


def test_a_file_that_a_process_has_mapped_stays(temporary: Path, shared: Path) -> None:
    made = segment(shared)
    with open(made, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 4096)
    assert remove_leavings(str(temporary), (), str(shared)) == []
    memory.close()
    assert remove_leavings(str(temporary), (), str(shared)) == [str(made)]


@pytest.mark.parametrize(
    "name", [f"sm_segment.elsewhere.{USER}.d33d0001.1", f"sm_segment.{HOST}.{USER + 1}.d33d0001.1"]
)
def test_a_segment_of_another_host_or_user_stays(temporary: Path, shared: Path, name: str) -> None:
    (shared / name).touch()
    assert remove_leavings(str(temporary), (), str(shared)) == []


@pytest.mark.skipif(USER != 0, reason="only root can give files away")
def test_files_of_another_user_stay(temporary: Path, shared: Path, dead: int) -> None:
    os.chown(session(temporary, "ompi", dead), 12345, 12345)
    os.chown(segment(shared), 12345, 12345)
    assert remove_leavings(str(temporary), [dead], str(shared)) == []


def test_a_leftover_window_is_removed_once_its_process_is_dead(temporary: Path, shared: Path, dead: int) -> None:
    (shared / f"popdist-{os.getpid()}-0123456789abcdef").touch()
    left = shared / f"popdist-{dead}-0123456789abcdef"
    left.touch()
    assert remove_leavings(str(temporary), (), str(shared)) == [str(left)]


def test_links_and_unrelated_files_stay(temporary: Path, shared: Path, dead: int) -> None:
    elsewhere = temporary / "mine"
    session(temporary, "ompi", dead).rename(elsewhere)
    (temporary / f"ompi.{dead}").symlink_to(elsewhere)
    (temporary / f"prted.{dead}").touch()
    (temporary / f"ompi.{dead}.saved").mkdir()
    (shared / f"sm_segment.{HOST}.{USER}.notes").touch()
    (shared / "psm_1234").touch()
    assert remove_leavings(str(temporary), [dead], str(shared)) == []


def test_missing_folders_are_accepted(tmp_path: Path) -> None:
    assert remove_leavings(str(tmp_path / "none"), (), str(tmp_path / "neither")) == []


def test_the_session_folder_is_the_daemons_or_the_temporary_one() -> None:
    assert folder_of({"PMIX_SERVER_TMPDIR": "/scratch/prted.31", "TMPDIR": "/elsewhere"}) == "/scratch"
    assert folder_of({"PMIX_SERVER_TMPDIR": "/odd", "TMPDIR": "/elsewhere"}) == "/elsewhere"
    assert folder_of({}) == folder_of({"TMPDIR": ""}) == "/tmp"
