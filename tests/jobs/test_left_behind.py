"""Absence of processes and files after SIGKILL of any process of a job."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from poprun_jobs import MPI_HEAD, Job, await_none, end_all, leftovers, run, start, start_command, two
from tiers import also

from poprun.ipc import wire
from poprun.ipc.processes import parent_of
from poprun.launch.launch import AGENT
from poprun.supervisor.reception import Member, Reception

pytestmark = [pytest.mark.job, pytest.mark.timeout(240)]

FAMILY = "setsid sleep 1000 & sh -c 'setsid sleep 1000 & exec sleep 1000' & echo up; exec sleep 1000"
"""A program whose descendants have separate sessions; only their ancestry reveals their job."""
SHARES_MEMORY = MPI_HEAD + "print('ready', rank, flush=True)\nsignal.pause()\n"
SEGMENT = re.compile(r"/dev/shm/sm_segment[.]\S+")


def segments_of(job: Job) -> set[Path]:
    """Return the files of Open MPI's shared memory that the job's processes have mapped."""
    maps = "".join(Path("/proc", str(pid), "maps").read_text() for pid in leftovers(job.marker))
    return {Path(name) for name in SEGMENT.findall(maps)}


class Instance:
    """An agent with its program; this process plays poprun, and no process above it adopts orphans."""

    def __init__(self) -> None:
        reception = Reception()
        environ = {wire.CONTROL_VARIABLE: f"{reception.contact} -", "OMPI_COMM_WORLD_RANK": "0"}
        self.job = start_command(sys.executable, "-I", "-S", str(AGENT), "any", "sh", "-c", FAMILY, environ=environ)
        member = None
        while member is None:
            member = reception.accept(time.monotonic())
        self._member: Member = member
        self.agent = self._await_start()
        reception.close()

    def _await_start(self) -> int:
        agent, output = 0, b""
        while b"up" not in output:
            for kind, content in self._member.receive():
                if kind == wire.HELLO:
                    found = self._member.meet(content, 1)
                    assert found is not None
                    agent = parent_of(found[0])
                elif kind == wire.STDOUT:
                    output += content
        return agent

    def leave(self) -> None:
        """Close poprun's end of the connection."""
        self._member.close()

    def await_end(self) -> None:
        """Wait until no process is left."""
        try:
            await_none(self.job.marker)
        finally:
            end_all(self.job.marker)
        self.leave()
        self.job.process.wait()
        for stream in self.job.streams:
            stream.close()


@pytest.mark.parametrize("whom", ["agent", "keeper"])
def test_after_sigkill_of_an_instance_s_guard_no_descendant_is_left(whom: str) -> None:
    instance = Instance()
    keeper = parent_of(instance.agent)
    assert keeper == instance.job.process.pid, "the agent has no keeper"
    os.kill(instance.agent if whom == "agent" else keeper, signal.SIGKILL)
    instance.await_end()


def test_a_stopped_agent_ends_on_its_daemon_s_signal() -> None:
    instance = Instance()
    os.kill(instance.agent, signal.SIGSTOP)
    os.kill(instance.job.process.pid, signal.SIGTERM)
    instance.leave()
    instance.await_end()


def start_sharing(folder: Path) -> Job:
    """Start a job whose instances have shared memory; poprun leads a process group of this session."""
    job = start(*two(SHARES_MEMORY), environ={"TMPDIR": str(folder)}, process_group=0)
    for rank in range(2):
        job.wait_for(f"ready {rank}")
    return job


def mpirun_of(folder: Path) -> int:
    (session,) = folder.glob("ompi.*")
    return int(session.suffix[1:])


@pytest.mark.parametrize("whom", ["mpirun", "group", also("poprun")])
@pytest.mark.cores(2)
def test_after_sigkill_no_file_is_left(tmp_path: Path, whom: str) -> None:
    job = start_sharing(tmp_path)
    assert len(segments := segments_of(job)) == 2
    if whom == "mpirun":
        os.kill(mpirun_of(tmp_path), signal.SIGKILL)
        assert job.finish().status != 0
    else:
        (os.killpg if whom == "group" else os.kill)(job.process.pid, signal.SIGKILL)
        job.kill()
    assert list(tmp_path.iterdir()) == []
    assert not any(path.exists() for path in segments)


@pytest.mark.cores(2)
def test_the_next_job_removes_files_of_a_job_whose_processes_were_all_killed_at_once(tmp_path: Path) -> None:
    job = start_sharing(tmp_path)
    assert len(segments := segments_of(job)) == 2
    end_all(job.marker)
    job.kill()
    assert list(tmp_path.iterdir())
    run(*two("pass"), environ={"TMPDIR": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []
    assert not any(path.exists() for path in segments)
