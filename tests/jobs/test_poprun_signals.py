"""Ending poprun ends everything."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from poprun_jobs import MPI_HEAD, allowed_s, leftovers, run, start, two

pytestmark = [pytest.mark.job, pytest.mark.timeout(60)]

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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_poprun_ends_everything_in_two_seconds(number):
    job = start_two(WAITS)
    job.process.send_signal(number)
    finished = job.finish()
    assert finished.status == 128 + number
    assert finished.after_event_s < allowed_s(2)
    assert number.name in finished.own_lines[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_programs_that_do_not_listen_are_ended_all_the_same(number):
    job = start_two(HAS_CHILDREN)
    job.process.send_signal(number)
    finished = job.finish()
    assert finished.status == 128 + number
    assert finished.after_event_s < allowed_s(2)


def test_a_second_signal_does_not_wait():
    job = start_two(HAS_CHILDREN)
    job.process.send_signal(signal.SIGINT)
    job.process.send_signal(signal.SIGTERM)
    finished = job.finish()
    assert finished.status in (130, 143)  # the kernel delivers them in any order
    assert finished.after_event_s < allowed_s(1)


def test_a_program_can_use_the_signal_to_end_well():
    program = (
        "import os, signal, sys\n"
        "def end(*_): print('saved', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print('ready', os.environ['OMPI_COMM_WORLD_RANK'], flush=True)\n"
        "while True: signal.pause()\n"
    )
    job = start_two(program)
    job.process.terminate()
    finished = job.finish()
    assert finished.status == 143
    assert finished.stdout.count("saved") == 2


def test_user_signals_reach_the_programs():
    program = (
        "import os, signal, sys\n"
        "def end(*_): print('got it', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGUSR1, end)\n"
        "print('ready', os.environ['OMPI_COMM_WORLD_RANK'], flush=True)\n"
        "while True: signal.pause()\n"
    )
    job = start_two(program)
    job.process.send_signal(signal.SIGUSR1)
    finished = job.finish()
    assert (finished.status, finished.stdout.count("got it")) == (0, 2)


@pytest.mark.parametrize("program", [WAITS, HAS_CHILDREN], ids=["waiting", "with children"])
def test_after_sigkill_of_poprun_nothing_is_left(program):
    assert start_two(program).kill_and_count(within_s=allowed_s(2.0)) == {}


def test_after_sigkill_of_poprun_busy_mpi_programs_are_gone():
    program = MPI_HEAD + "print('ready', rank, flush=True)\nwhile True: comm.Barrier()\n"
    assert start_two(program).kill_and_count(within_s=allowed_s(2.0)) == {}


def test_after_sigkill_during_the_start_nothing_is_left(tmp_path):
    job = start(*two(WAITS), environ={"TMPDIR": str(tmp_path)})
    while len(leftovers(job.marker)) < 2:  # until there is an mpirun
        pass
    assert job.kill_and_count(within_s=allowed_s(2.0)) == {}


@pytest.mark.parametrize("ending", ["pass", "os._exit(3)", "os.kill(os.getpid(), 9)"])
def test_no_file_is_left(tmp_path, ending):
    program = MPI_HEAD + f"if rank == 1: {ending}\n"
    run(*two(program), environ={"TMPDIR": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []


def test_no_file_of_poprun_is_left_even_by_sigkill(tmp_path):
    job = start(*two(WAITS), environ={"TMPDIR": str(tmp_path)})
    job.wait_for("ready 0")
    job.wait_for("ready 1")
    assert job.kill_and_count(within_s=allowed_s(2.0)) == {}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("poprun")] == []


def test_the_long_way_to_the_socket_is_cut_short(tmp_path):
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    finished = run("echo", "hello", environ={"TMPDIR": str(deep)})
    assert (finished.status, finished.stdout) == (0, "[1,0]<stdout>:hello\n")
    assert not list(Path("/tmp").glob(f"poprun-{os.getpid()}-*"))


def test_a_reader_that_leaves_ends_the_job():
    job = start(*two("while True: print('x' * 1000)"))
    job.wait_for("x")
    os.dup2(os.open(os.devnull, os.O_RDONLY), job.process.stdout.fileno())
    finished = job.finish()
    assert finished.status == 128 + signal.SIGPIPE
