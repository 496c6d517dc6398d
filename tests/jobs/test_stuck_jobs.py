"""Jobs that would never end, because an instance, an agent or mpirun is stopped or blocked.

The rules for blame and timing are tested in tests/poprun/test_job_machine.py; here are real processes and signals.
"""

from __future__ import annotations

import sys

import pytest
from poprun_jobs import run, two
from tiers import also

pytestmark = [pytest.mark.job, pytest.mark.long, pytest.mark.timeout(240)]

HEAD = """\
import os, signal, sys, time
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
agent = os.getppid()
keeper = int(open(f"/proc/{agent}/stat").read().rpartition(")")[2].split()[1])
mpirun = int(open(f"/proc/{keeper}/stat").read().rpartition(")")[2].split()[1])
"""
JOIN = """\
import popdist
popdist.init()
popdist.communicator().barrier(name="all are here")
print("joined", rank, flush=True)
"""
STOPPED = "it is stopped by a signal or a debugger"
SHORT = ("--stuck-timeout-s", "1")


@pytest.mark.parametrize("mode", ["stop", also("shrink"), also("restart")])
@pytest.mark.cores(2)
def test_an_instance_stopped_before_init_is_blamed(mode):
    program = HEAD + "if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n" + JOIN
    finished = run(*two(program, *SHORT, "--on-failure", mode, "--max-restarts", "0"))
    assert finished.status == 124, finished.stderr
    assert finished.own_lines[0].startswith("instance 1 on host ")
    assert finished.own_lines[0].endswith(f": {STOPPED}")


@pytest.mark.complete
@pytest.mark.cores(2)
def test_an_instance_behind_a_shell_stopped_during_imports_is_blamed():
    program = HEAD + "if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n" + JOIN
    words = ("--num-instances", "2", "--num-replicas", "2", *SHORT, "sh", "-c", '"$@"; exit $?', "-")
    finished = run(*words, sys.executable, "-c", program)
    assert finished.status == 124, finished.stderr
    assert finished.own_lines[0].endswith(f": {STOPPED}")


@pytest.mark.cores(2)
def test_an_instance_that_ends_before_init_is_blamed_when_another_waits_there():
    finished = run(*two(HEAD + "if rank == 1: sys.exit(0)\n" + JOIN))
    assert finished.status == 1, finished.stderr
    first, second = finished.own_lines
    assert first.endswith(" ended with exit status 0 too early: instance 0 still needed it")
    assert second == "instance 0 was in popdist.init, waiting for instance 1"


@pytest.mark.cores(2)
def test_the_last_instance_is_blamed_when_stopped_with_none_waiting():
    program = HEAD + JOIN + "popdist.finalizeBackend()\nif rank == 0: os.kill(os.getpid(), signal.SIGSTOP)\n"
    finished = run(*two(program, *SHORT))
    assert finished.status == 124, finished.stderr
    assert finished.own_lines[0].startswith("instance 0 on host ")
    assert finished.own_lines[0].endswith(f": {STOPPED}")


@pytest.mark.parametrize("where", ["before init", also("at the end")])
@pytest.mark.cores(2)
def test_a_stopped_mpirun_is_named(where):
    stop = "if rank == 1: os.kill(mpirun, signal.SIGSTOP)\n"
    finished = run(*two(HEAD + (stop + JOIN if where == "before init" else JOIN + stop), *SHORT))
    assert finished.status == 124, finished.stderr
    assert "mpirun was stopped by a signal or a debugger for 1 s (--stuck-timeout-s)" in finished.own_lines


@pytest.mark.complete
@pytest.mark.cores(2)
def test_an_agent_stopped_after_the_last_results_is_blamed():
    finished = run(*two(HEAD + JOIN + "if rank == 1: os.kill(agent, signal.SIGSTOP)\n", *SHORT))
    assert finished.status == 124, finished.stderr
    assert finished.own_lines[0].startswith("instance 1 on host ")
    assert "its supervisor process has not answered for 10 s" in finished.own_lines[0]


@pytest.mark.complete
@pytest.mark.parametrize("mode", ["shrink", also("restart")])
@pytest.mark.cores(2)
def test_an_mpirun_killed_in_init_blames_no_instance_and_is_restarted(mode, tmp_path):
    """Instance 0 waits in MPI_Init, which fails when mpirun is gone; so the instance ends with 14."""
    told = tmp_path / "pid"
    program = HEAD + (
        f"told = {str(told)!r}\n"
        "if os.environ['POPDIST_RESTART_COUNT'] == '0':\n"
        "    if rank == 0:\n"
        "        with open(told + '.new', 'w') as file: print(os.getpid(), file=file)\n"
        "        os.rename(told + '.new', told)\n"
        "    else:\n"
        "        while not os.path.exists(told): pass\n"
        "        other = int(open(told).read())\n"
        "        while 'libpmix' not in open(f'/proc/{other}/maps').read(): time.sleep(0.01)\n"
        "        naps = 0\n"
        "        while naps < 50: naps += 'nanosleep' in open(f'/proc/{other}/wchan').read()\n"
        "        os.kill(mpirun, signal.SIGKILL)\n"
    )
    finished = run(*two(program + JOIN, "--on-failure", mode, "--restart-backoff-s", "0"))
    assert finished.status == 0, finished.stderr
    assert finished.own_lines[0] == "mpirun ended with 137 before every instance had completed"
    assert "the job completed after 1 restart: mpirun ended with 137" in finished.said[-1]
