"""A real job whose active instances change on purpose: `poprun resize`."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from poprun_jobs import LIMIT_S, ROOT, start

import strategies

pytestmark = [pytest.mark.job, pytest.mark.cores(2), pytest.mark.timeout(150)]

PROGRAM = ROOT / "tests" / "jobs" / "programs" / "resized_training.py"


def resize(*words: str) -> tuple[int, str]:
    """Run the command; return its status and what it says, without the clock and process of an error."""
    command = [sys.executable, "-m", "poprun", "resize", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return done.returncode, (done.stdout or done.stderr.partition("POPRUN [E] ")[2]).strip()


@pytest.mark.complete
def test_a_job_that_grows_and_shrinks_on_purpose_has_the_bits_of_one_process(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    from resized_training import train

    words = ["-n=2", "--spares=1", "--spares-oversubscribe=yes", "--num-replicas=6"]
    job = start(*words, sys.executable, str(PROGRAM), str(tmp_path / "job"))
    pid = str(job.process.pid)
    job.wait_for("has begun")
    answers = [resize(pid, count) for count in ("4", "3", "1", "3", "2")]
    job.process.send_signal(signal.SIGUSR1)
    finished = job.finish()
    assert [status for status, _ in answers] == [1, 0, 0, 0, 0], answers
    assert "4 instances are wanted, but the job has 2 active instances and 1 spare; ask for at most 3" in answers[0][1]
    texts = ["2 -> 3 instances", "3 -> 1 instance", "1 -> 3 instances", "3 -> 2 instances"]
    assert [text for _, text in answers[1:]] == texts
    assert finished.status == 0, finished.stderr
    [result] = [line for each in range(3) for line in finished.lines_of(each) if len(line.split()) == 4]
    alone = train(strategies.IPUStrategy(num_replicas=6), str(tmp_path / "alone"), int(result.split()[1]))
    assert result == f"result {alone}"
    status, text = resize(pid, "2")
    assert (status, text.partition(" of yours")[0]) == (1, f"no poprun with process {pid}")
