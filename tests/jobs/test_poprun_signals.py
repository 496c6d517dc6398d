"""Signals to poprun, and the end of all processes of the job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from poprun_jobs import MPI_HEAD, leftovers, run, start, start_command, two
from tiers import also

from poprun.ipc.wire import CONTROL_VARIABLE
from poprun.launch.launch import AGENT

pytestmark = [pytest.mark.job, pytest.mark.timeout(240)]

WAITS = "import os, signal\nprint('ready', os.environ['OMPI_COMM_WORLD_RANK'], flush=True)\nsignal.pause()\n"
HAS_CHILDREN = (
    "import os, signal, subprocess\n"
    "subprocess.Popen(['sleep', '100'])\n"
    "subprocess.Popen(['sh', '-c', 'setsid sleep 100 & exec sleep 100'], start_new_session=True)\n"
    "print('ready', os.environ['OMPI_COMM_WORLD_RANK'], flush=True)\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    "while True: signal.pause()\n"
)


def start_two(program: str):
    job = start(*two(program))
    job.wait_for("ready 0")
    job.wait_for("ready 1")
    return job


@pytest.mark.parametrize("number", [signal.SIGTERM, also(signal.SIGINT), also(signal.SIGHUP)])
def test_a_signal_to_poprun_ends_everything(number):
    job = start_two(WAITS)
    job.process.send_signal(number)
    finished = job.finish()
    assert finished.status == 128 + number
    assert number.name in finished.own_lines[-1]
    assert "Traceback" not in finished.stderr


IGNORED_BY_ALL = (
    "import os, signal\n"
    "ends = lambda pid: [line for line in open(f'/proc/{pid}/status') if line.startswith('SigIgn')][0].split()[1]\n"
    "parents, pid = [], os.getpid()\n"
    "for _ in range(3):\n"  # the program, its agent, its keeper
    "    parents.append(int(ends(pid), 16) & 1)\n"
    "    pid = open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[1]\n"
    "print('ignored', parents, flush=True)\n"
    "os.read(0, 1)\n"
)


def test_a_hangup_ignored_at_the_start_stays_ignored_by_all_processes():
    """Under nohup the shell sends SIGHUP to poprun's group when the terminal closes."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        job = start(*two(IGNORED_BY_ALL), start_new_session=True, stdin=subprocess.PIPE)
    finally:
        signal.signal(signal.SIGHUP, before)
    job.wait_for("[1,0]<stdout>:ignored [1, 1, 1]")
    job.wait_for("[1,1]<stdout>:ignored [1, 1, 1]")
    os.killpg(job.process.pid, signal.SIGHUP)
    job.process.stdin.close()
    assert job.finish().status == 0


@pytest.mark.parametrize("number", [signal.SIGINT, also(signal.SIGTERM)])
def test_programs_that_ignore_signals_are_ended(number):
    job = start_two(HAS_CHILDREN)
    job.process.send_signal(number)
    finished = job.finish()
    assert finished.status == 128 + number


@pytest.mark.complete
def test_a_second_signal_ends_programs_without_waiting():
    job = start_two(HAS_CHILDREN)
    job.process.send_signal(signal.SIGINT)
    job.process.send_signal(signal.SIGTERM)
    finished = job.finish()
    assert finished.status in (130, 143)  # the kernel delivers them in any order


def test_a_program_can_use_the_signal_to_save_and_end(tmp_path):
    """Each instance waits for the other one to save, because the end of one shortens the other's time."""
    program = (
        "import os, signal\n"
        "from popdist.records.progress import ProgressPage\n"
        "ProgressPage.from_environ(os.environ).grace(60)\n"
        "rank = int(os.environ['OMPI_COMM_WORLD_RANK'])\n"
        f"saved = [f'{tmp_path}/{{each}}' for each in range(2)]\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "print('ready', rank, flush=True)\n"
        "signal.sigwait([signal.SIGTERM])\n"
        "print('saved', flush=True)\n"
        "open(saved[rank], 'x').close()\n"
        "while not all(map(os.path.exists, saved)): pass\n"
    )
    job = start_two(program)
    job.process.terminate()
    finished = job.finish()
    assert finished.status == 143
    assert finished.stdout.count("saved") == 2


NEEDS_TIME = (
    "import os, signal, time\n"
    "from popdist.records.progress import ProgressPage\n"
    "page = ProgressPage.from_environ(os.environ)\n"
    "rank = os.environ['OMPI_COMM_WORLD_RANK']\n"
    "page.grace(20)\n"
    "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
    "print('ready', rank, flush=True)\n"
    "signal.sigwait([signal.SIGTERM])\n"  # a handler might run just before `signal.pause`, and nothing would end that
    "time.sleep(2 if LEAVES else 100)\n"
    "print('saved', flush=True)\n"
)


@pytest.mark.complete
def test_a_program_gets_the_grace_time_that_it_asked_for():
    job = start_two(NEEDS_TIME.replace("LEAVES", "True"))
    job.process.terminate()
    finished = job.finish()
    assert finished.status == 143
    assert finished.stdout.count("saved") == 2


def test_user_signals_reach_the_programs():
    program = (
        "import os, signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
        "print('ready', os.environ['OMPI_COMM_WORLD_RANK'], flush=True)\n"
        "signal.sigwait([signal.SIGUSR1])\n"
        "print('got it', flush=True)\n"
    )
    job = start_two(program)
    job.process.send_signal(signal.SIGUSR1)
    finished = job.finish()
    assert (finished.status, finished.stdout.count("got it")) == (0, 2)


@pytest.mark.parametrize("program", [also(WAITS), HAS_CHILDREN], ids=["waiting", "with children"])
def test_sigkill_of_poprun_leaves_no_process(program):
    start_two(program).kill()


@pytest.mark.complete
def test_sigkill_during_the_start_leaves_nothing(tmp_path):
    job = start(*two(WAITS), environ={"TMPDIR": str(tmp_path)})
    while len(leftovers(job.marker)) < 2:  # until there is an mpirun
        pass
    job.kill()
    assert poprun_files(tmp_path) == []


def test_an_instance_that_begins_after_poprun_s_end_leaves_nothing():
    program = ["sh", "-c", "setsid sleep 100 & exec sleep 100"]
    agent = [sys.executable, "-I", "-S", str(AGENT), "any"]
    environ = {CONTROL_VARIABLE: f"unix:poprun-gone-{os.getpid()} {'00' * 16} -", "OMPI_COMM_WORLD_RANK": "0"}
    assert start_command(*agent, *program, environ=environ).finish().status == 1  # `finish` fails if a process is left


@pytest.mark.parametrize("ending", [also("pass"), also("os._exit(3)"), "os.kill(os.getpid(), 9)"])
@pytest.mark.cores(2)
def test_ended_jobs_leave_no_file(tmp_path, ending):
    program = MPI_HEAD + f"if rank == 1: {ending}\n"
    run(*two(program), environ={"TMPDIR": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []


def poprun_files(folder: Path) -> list[str]:
    """Return poprun's files; mpirun may leave its own files if killed during the start."""
    return [path.name for path in folder.iterdir() if path.name.startswith("poprun")]


def test_a_closed_reader_ends_the_job():
    job = start(*two("while True: print('x' * 1000)"))
    job.wait_for("x")
    os.dup2(os.open(os.devnull, os.O_RDONLY), job.process.stdout.fileno())
    finished = job.finish()
    assert finished.status == 128 + signal.SIGPIPE
