"""Jobs that are told to end or killed while saving; they resume on another number of instances."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from poprun_jobs import Job, leftovers, start

import strategies

pytest.importorskip("orbax.checkpoint")
pytestmark = [pytest.mark.job, pytest.mark.cores(2), pytest.mark.timeout(500)]

PROGRAM = Path(__file__).parent / "programs" / "saved_training.py"
sys.path.insert(0, str(PROGRAM.parent))
from saved_training import train as train_here  # noqa: E402

strategies.IPUStrategy(8)  # JAX's devices are fixed when it starts, for the tests of other files too
LIMIT_S = 150.0
ENDLESS = 10**6


def train(folder: Path, until: int, how: str = "plain", *options: str) -> Job:
    """Start four replicas on two instances."""
    program = (sys.executable, str(PROGRAM), str(folder), str(until), how)
    return start("--num-instances=2", "--num-replicas=4", *options, *program)


@pytest.mark.complete
def test_a_terminated_job_saves_a_checkpoint_from_which_one_process_resumes(tmp_path):
    """The resumed training has the bits of an uninterrupted one."""
    folder = tmp_path / "saved"
    job = train(folder, ENDLESS)
    job.wait_for("in step 5", LIMIT_S)
    job.process.terminate()
    finished = job.finish(LIMIT_S)
    assert finished.status == 143, finished.stderr
    [step] = {int(step) for step in re.findall(rf"SIGTERM: leaving after step (\d+); see {folder}", finished.stderr)}
    assert step >= 5
    assert [path.name for path in folder.iterdir()] == [f"step_{step:08d}"]
    resumed_at, fingerprint = train_here(strategies.IPUStrategy(4), folder, step + 7)
    assert resumed_at == step
    assert (0, fingerprint) == train_here(strategies.IPUStrategy(4), tmp_path / "other", step + 7)


@pytest.mark.complete
def test_a_terminated_job_saves_even_while_an_instance_is_lost(tmp_path):
    folder = tmp_path / "saved"
    job = train(folder, ENDLESS, "plain", "--on-failure=shrink")
    job.wait_for("in step 5", LIMIT_S)
    job.process.send_signal(signal.SIGSTOP)  # poprun learns of both at once
    [victim] = [pid for pid, words in leftovers(job.marker).items() if is_first(pid, words)]
    os.kill(victim, signal.SIGKILL)
    job.process.terminate()
    job.process.send_signal(signal.SIGCONT)
    finished = job.finish(LIMIT_S)
    assert finished.status == 143, finished.stderr
    assert "POPRUN [W] instance 0 on host " in finished.stderr
    [step] = re.findall(rf"SIGTERM: leaving after step (\d+); see {folder}", finished.stderr)
    assert f"step_{int(step):08d}" in [path.name for path in folder.iterdir()]


@pytest.mark.complete
def test_the_next_instance_saves_when_the_first_is_lost_while_leaving(tmp_path):
    folder = tmp_path / "saved"
    job = train(folder, ENDLESS, "plain", "--on-failure=shrink", "--inject=kill:instance=0,phase=checkpoint")
    job.wait_for("in step 5", LIMIT_S)
    job.process.terminate()
    finished = job.finish(LIMIT_S)
    assert finished.status == 143, finished.stderr
    [step] = re.findall(rf"\[1,1\].*SIGTERM: leaving after step (\d+); see {folder}", finished.stderr)
    assert [path.name for path in folder.iterdir()] == [f"step_{int(step):08d}"]


def is_first(pid: int, words: str) -> bool:
    """Return whether a process of a job is the program of instance 0."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return words.startswith(f"{sys.executable} {PROGRAM}") and b"OMPI_COMM_WORLD_RANK=0" in variables


@pytest.mark.complete
def test_a_job_killed_while_saving_resumes_from_the_previous_checkpoint(tmp_path, caplog):
    """One process resumes."""
    folder = tmp_path / "saved"
    killed = train(folder, 9, "die").finish(LIMIT_S)
    assert killed.status == 128 + signal.SIGKILL
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000003", "step_00000006.incomplete"]

    resumed_at, fingerprint = train_here(strategies.IPUStrategy(4), folder, 5)
    assert resumed_at == 3
    assert caplog.text.count("step_00000006.incomplete is incomplete, because its writer died") == 1
    assert (0, fingerprint) == train_here(strategies.IPUStrategy(4), tmp_path / "other", 5)
