"""Restarts of failed jobs, up to the number that the user allows."""

from __future__ import annotations

import os
import re
import signal
import sys

import pytest
from poprun_jobs import PROGRESS_HEAD, run, start, two
from tiers import also

pytestmark = [pytest.mark.job, pytest.mark.long, pytest.mark.timeout(240)]

RESTART = ("--on-failure", "restart", "--restart-backoff-s", "0")
HEAD = PROGRESS_HEAD + "restarts = int(os.environ['POPDIST_RESTART_COUNT'])\n"


def warnings(finished):
    return [line.partition(" POPRUN [W] ")[2] for line in finished.stderr.splitlines() if " POPRUN [W] " in line]


@pytest.mark.complete
def test_a_job_completes_after_failures_of_different_kinds():
    program = HEAD + (
        "print('attempt', restarts, flush=True)\n"
        "if rank == 1 and restarts == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "if rank == 0 and restarts == 1: raise ValueError('bad')\n"
        "if restarts < 2: signal.pause()\n"
    )
    finished = run(*two(program, *RESTART))
    assert finished.status == 0, finished.stderr
    assert finished.lines_of(0)[-1] == "attempt 2"
    killed, failed, cause = finished.own_lines
    assert re.fullmatch(r"first cause: instance 0 on host \S+: ValueError: bad \(exit status 1\)", cause)
    assert killed.startswith("instance 1 on host ")
    assert killed.endswith(" was killed by SIGKILL")
    assert failed.startswith("instance 0 on host ")
    first, second, last = warnings(finished)
    assert first.startswith("restart 1 of 3: 2 instances on ")
    assert second.startswith("restart 2 of 3: 2 instances on ")
    assert last == f"the job completed after 2 restarts: {killed}; {failed}"
    assert finished.stderr.endswith(f"{last}\n")


@pytest.mark.parametrize(("number", "status"), [also(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_job_that_the_user_ends_is_not_restarted(number, status):
    job = start(*RESTART, sys.executable, "-c", "import time; print('begins', flush=True); time.sleep(50)")
    job.wait_for("begins")
    job.process.send_signal(number)
    finished = job.finish()
    assert finished.status == status
    assert finished.stdout.count("begins") == 1
    assert warnings(finished) == []


@pytest.mark.complete
def test_a_job_that_leaves_on_a_forwarded_signal_is_not_restarted():
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda number, _: sys.exit(128 + number))\n"
        "print('begins', flush=True); time.sleep(50)\n"
    )
    job = start(*RESTART, sys.executable, "-c", program)
    job.wait_for("begins")
    job.process.send_signal(signal.SIGUSR1)
    finished = job.finish()
    assert finished.status == 128 + signal.SIGUSR1
    assert finished.stdout.count("begins") == 1


def test_standard_input_goes_to_the_first_attempt():
    program = "import os, sys\nread = sys.stdin.read()\nprint('read', repr(read), flush=True)\n"
    program += "sys.exit(os.environ['POPDIST_RESTART_COUNT'] == '0')\n"
    reader, writer = os.pipe()
    os.write(writer, b"words")
    os.close(writer)
    finished = run(*RESTART, sys.executable, "-c", program, stdin=reader)
    os.close(reader)
    assert finished.status == 0, finished.stderr
    assert finished.lines_of(0) == ["read 'words'", "read ''"]


@pytest.mark.complete
def test_output_of_all_attempts_is_kept(tmp_path):
    program = HEAD + "print('attempt', restarts, flush=True)\nsys.exit(1 - restarts)\n"
    finished = run(*RESTART, "--output-dir", str(tmp_path / "out"), sys.executable, "-c", program)
    assert finished.status == 0, finished.stderr
    kept = [path.read_text() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert any("attempt 0\n" in text and "attempt 1\n" in text for text in kept), kept


@pytest.mark.parametrize(
    ("how", "where"),
    [
        ("stop()", "stopped by a signal or a debugger"),
        ("forever()", "at <string>, line {line}, in forever"),
        also("slow()", "at <string>, line {line}, in slow"),
    ],
)
@pytest.mark.cores(2)
def test_a_stuck_instance_is_named_with_its_line(how, where, tmp_path):
    """The other instance waits only once the first is stuck."""
    begun = str(tmp_path / "begun")
    program = PROGRESS_HEAD + (
        "from popdist.records.watched import show_stack_when_asked\n"
        "show_stack_when_asked(os.environ)\n"
        "def forever():\n"
        f"    open({begun!r}, 'x').close(); any(iter(int, 1))  # forever is here\n"
        "def slow():  # to show its stack\n"
        f"    import time; open({begun!r}, 'x').close()\n"
        "    asked = {int(os.environ['POPRUN_STACK'].partition(':')[2])}\n"
        "    signal.pthread_sigmask(signal.SIG_BLOCK, asked)\n"
        "    while not signal.sigpending(): pass\n"
        "    time.sleep(0.5); signal.pthread_sigmask(signal.SIG_UNBLOCK, asked)  # slow is here\n"
        "    signal.pause()\n"
        "def stop():\n"
        "    if os.fork(): os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    while open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[0] != 'T': pass\n"
        f"    open({begun!r}, 'x').close(); os._exit(0)\n"
        "page.step_begins(4)\n"
        "enter(4, b'barrier'); page.operation_ends()\n"
        f"if rank == 1: {how}\n"
        f"while not os.path.exists({begun!r}): pass\n"
        "enter(5, b'barrier'); page.waiting_for([1]); signal.pause()\n"
    )
    marked = f"# {how.removesuffix('()')} is here"
    line = next((number for number, text in enumerate(program.splitlines(), start=1) if text.endswith(marked)), None)
    finished = run(*two(program, "--stuck-timeout-s", "1"))
    assert finished.status == 124, finished.stderr
    first, second = finished.own_lines
    assert first.startswith("instance 1 on host ")
    assert first.endswith(
        " has made no progress for 1 s (--stuck-timeout-s) in step 4, after collective 4, barrier: "
        f"it is {where.format(line=line)}"
    )
    assert second == "instance 0 was in collective 5, barrier, step 4, waiting for instance 1"


PLAIN_TRAINING = """\
import numpy as np, popdist
from collectives.instruments import UPDATE
popdist.init()
communicator = popdist.communicator()
for step in range(4):
    communicator.instruments.step_begins(step)
    communicator.all_reduce(np.ones(3), "sum", name="gradients")
    with communicator.instruments.during[UPDATE]:
        pass
"""


@pytest.mark.parametrize(
    ("kind", "phase", "status", "fact"),
    [
        also("kill", "forward", 137, "was killed by SIGKILL in step 2, after collective 2, all_reduce 'gradients'"),
        ("kill", "all_reduce", 137, "was killed by SIGKILL in step 2, inside collective 3, all_reduce 'gradients'"),
        also("exit", "update", 3, "ended with exit status 3 in step 2, after collective 3, all_reduce 'gradients'"),
        also(
            "raise", "all_reduce", 1, "ended with exit status 1 in step 2, inside collective 3, all_reduce 'gradients'"
        ),
        also(
            "stop",
            "forward",
            124,
            "after collective 2, all_reduce 'gradients': it is stopped by a signal or a debugger",
        ),
        also("cut", "all_reduce", 137, "was lost: its supervisor process was killed or cut off"),
    ],
)
@pytest.mark.cores(2)
def test_an_injected_fault_happens_in_its_step_and_phase(kind, phase, status, fact):
    fault = f"{kind}:instance=1,step=2,phase={phase}"
    limit = ("--stuck-timeout-s", "2") if kind == "stop" else ()
    finished = run(*two(PLAIN_TRAINING, "--inject", fault, *limit))
    assert finished.status == status, finished.stderr
    assert finished.own_lines[0].startswith("instance 1 on host ")
    said, _, place = finished.own_lines[0].partition(
        "; last heard of "
    )  # present if poprun heard from it before the cut
    assert said.endswith(fact)
    assert not place or kind == "cut"


@pytest.mark.parametrize("kind", ["kill", also("cut")])
@pytest.mark.cores(2)
def test_a_job_is_restarted_without_the_injected_fault(kind):
    finished = run(*two(PLAIN_TRAINING, *RESTART, "--inject", f"{kind}:instance=1,step=2"))
    assert finished.status == 0, finished.stderr
    assert warnings(finished)[-1].startswith("the job completed after 1 restart: instance 1 on host ")


def test_an_invalid_fault_starts_nothing():
    finished = run(*two(PLAIN_TRAINING, "--inject", "melt:instance=0"))
    assert (finished.status, finished.stdout) == (2, "")
    assert finished.own_lines == [
        "--inject 'melt:instance=0': 'melt' is not a kind of fault; use one of "
        "kill, exit, raise, stop, delay, cut, flip-bit"
    ]
