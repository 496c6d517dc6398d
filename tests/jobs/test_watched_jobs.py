"""Summaries of finished jobs, and `poprun top` beside running ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from poprun_jobs import LIMIT_S, ROOT, Finished, start, two
from terminal_jobs import on_terminal

from poprun.monitor.attempts import LEAST_DIFFERENCE

pytestmark = [pytest.mark.job, pytest.mark.cores(2), pytest.mark.timeout(150)]

STEPS = """\
import time
import popdist
popdist.init()
communicator = popdist.context.communicator()
instruments = communicator.instruments
inside_s = 0.0
for step in range(20):
    instruments.step_begins(step)
    with instruments.during["exchange"]:
        begun_s = time.monotonic()
        communicator.barrier(name="gradients")
        inside_s += time.monotonic() - begun_s
    instruments.steps_made(1, 8, lambda: 0.5)
print(inside_s)
"""
STANDS_STILL = """\
import os, popdist
popdist.init()
communicator = popdist.context.communicator()
instruments = communicator.instruments
for step in range(3):
    instruments.step_begins(step)
    communicator.barrier(name="gradients")
    instruments.steps_made(1, 8, lambda: 0.25)
if popdist.getInstanceIndex() == 0:
    print("stands still", flush=True)
    os.read(0, 1)
communicator.barrier(name="the last one")
"""


def summary_of(file: Path, finished: Finished, status: int = 0) -> dict[str, Any]:
    assert finished.status == status, finished.stderr
    read: dict[str, Any] = json.loads(file.read_text())
    assert (read["version"], read["exit_status"]) == (1, status)
    return read


def test_the_summary_has_steps_and_waiting_times(tmp_path):
    file = tmp_path / "job.json"
    # More than the wait below: on a busy machine instance 0 is late itself in some steps, and does not wait in them.
    delays = [f"--inject=delay:instance=1,step={step},seconds=0.3" for step in range(5, 10)]
    job = start("--summary", f"json:{file}", *delays, *two(STEPS), environ={"POPDIST_VERIFY_RECORD": ""})
    finished = job.finish()
    read = summary_of(file, finished)
    assert (read["steps"], read["samples"], read["failure"], read["faults_survived"]) == (20, 320, None, [])
    first, second = read["attempts"][0]["instances"]
    first_inside_s, second_inside_s = (float(finished.lines_of(instance)[0]) for instance in range(2))
    assert 0.5 < first["waited_s"] <= first_inside_s
    assert second["waited_s"] <= second_inside_s
    shares = [each["waited_s"] / each["timed_s"] for each in (first, second)]
    slowest = shares.index(min(shares)) if max(shares) - min(shares) >= LEAST_DIFFERENCE else None
    assert (read["slowest"] or {"instance": None})["instance"] == slowest
    assert first["waited_s"] <= first["timed_s"] <= read["duration_s"]
    assert (first["steps"], first["timed_steps"], first["samples"], first["loss"]) == (20, 19, 160, 0.5)
    assert first["end"] == second["end"] == "ended with exit status 0"
    assert min(first["peak_memory_bytes"], second["peak_memory_bytes"]) > 10 * 2**20


@pytest.mark.complete
def test_the_summary_of_a_restarted_job_without_steps_names_the_fault(tmp_path):
    file = tmp_path / "job.json"
    fails = "import os, sys; held = os.urandom(100 << 20); sys.exit(3 * (os.environ['POPDIST_RESTART_COUNT'] == '0'))"
    words = ["--summary", f"json:{file}", "--on-failure=restart", "--restart-backoff-s=0", *two(fails)]
    finished = start(*words).finish()
    read = summary_of(file, finished)
    assert [each["exit_status"] for each in read["attempts"]] == [3, 0]
    (fault,) = read["faults_survived"]
    assert (fault["attempt"], fault["followed_by"]) == (0, "restart")
    assert fault["fault"].endswith("ended with exit status 3")
    assert (read["steps"], read["steps_per_s"], read["waiting_share"]) == (0, None, None)
    assert read["peak_memory_bytes"] > 100 << 20
    assert "summary" not in finished.stderr


@pytest.mark.complete
def test_the_summary_names_an_instance_lost_during_training(tmp_path):
    file = tmp_path / "job.json"
    program = ROOT / "tests" / "jobs" / "programs" / "surviving_training.py"
    words = ["-n=2", "--num-replicas=4", "--on-failure=shrink", "--inject=kill:instance=1,step=2"]
    finished = start(*words, "--summary", f"json:{file}", sys.executable, str(program), "2").finish()
    read = summary_of(file, finished)
    (fault,) = read["faults_survived"]
    assert (fault["attempt"], fault["followed_by"]) == (0, "shrink")
    assert fault["fault"].startswith("instance 1 on host ")
    instances = read["attempts"][0]["instances"]
    assert [each["is_given_up"] for each in instances] == [False, True]
    assert instances[1]["steps"] < instances[0]["steps"] == read["steps"]
    assert instances[0]["loss"] is not None


@pytest.mark.parametrize("asked", [[], ["--summary=no"]], ids=["as usual", "no"])
def test_summary_lines_come_last_on_a_terminal_unless_declined(asked):
    status, shown = on_terminal(
        "print('done')",
        *asked,
        environ={"TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout="terminal",
        stderr="terminal",
    )
    lines = shown.decode().splitlines()
    assert status == 0
    assert [line.startswith("summary: ") for line in lines[-2:]] == [not asked] * 2 or lines[-1].endswith("done")
    assert any("summary" in line for line in lines) is not bool(asked)


def top(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "poprun", "top", *words]
    return subprocess.run(
        command, env=os.environ | environ, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def test_poprun_top_shows_a_stalled_instance_and_the_end_of_the_job(tmp_path):
    file = tmp_path / "job.json"
    job = start("--summary", f"json:{file}", *two(STANDS_STILL), stdin=subprocess.PIPE)
    job.wait_for("stands still")
    which = f"--job={job.process.pid}"
    lines: list[str] = []
    # Until its last wait has become long: a busy poprun may still show a long wait in an earlier barrier.
    while not (lines[2:3] == ["instance 1 waits for instance 0"] and "barrier 'the last one'" in lines[-1]):
        lines = top(which, "--once", "--plain").stdout.splitlines()
    assert lines[0].startswith(f"poprun {job.process.pid} on {os.uname().nodename}: ")
    assert lines[-1].split()[:3] == ["1", os.uname().nodename, "2"]
    said = json.loads(top(which, "--once", "--json").stdout)
    assert [each["step"] for each in said["instances"]] == [2, 2]
    assert [each["loss"] for each in said["instances"]] == [0.25, 0.25]
    following = subprocess.Popen(
        [sys.executable, "-m", "poprun", "top", which], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert following.stdout is not None
    assert following.stdout.readline().startswith("poprun ")
    job.process.stdin.close()
    assert "the job has ended; it ran for" in following.communicate(timeout=LIMIT_S)[0]
    assert following.returncode == 0
    assert summary_of(file, job.finish())["steps"] == 3
    gone = top(which, "--once")
    assert (gone.returncode, "of yours runs on" in gone.stderr) == (1, True)


@pytest.mark.complete
def test_stopped_or_killed_viewers_do_not_disturb_the_job(tmp_path):
    job = start("--summary=yes", *two(STANDS_STILL), stdin=subprocess.PIPE)
    job.wait_for("stands still")
    command = [sys.executable, "-m", "poprun", "top", f"--job={job.process.pid}", "--plain"]
    # own process groups: the kernel may hang up on pytest's group if one of its members is stopped
    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "text": True, "process_group": 0}
    viewers = [subprocess.Popen(command, **options) for _ in range(3)]
    for number, viewer in zip((signal.SIGSTOP, signal.SIGKILL, signal.SIGINT), viewers, strict=True):
        assert viewer.stdout is not None
        assert viewer.stdout.readline().startswith("poprun ")
        viewer.send_signal(number)
    assert viewers[2].wait(LIMIT_S) == 0
    job.process.stdin.close()
    finished = job.finish()
    assert finished.status == 0
    assert "summary: 2 instances ran for" in finished.stderr
    for viewer in viewers:
        viewer.kill()
        viewer.communicate(timeout=LIMIT_S)
