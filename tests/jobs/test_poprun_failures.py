"""Failures of real processes: the job ends, nothing is left, and the right instance is blamed.

The rules for blame and timing are tested in tests/poprun/test_job_machine.py; here are real processes.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from poprun_jobs import LIMIT_S, MPI_HEAD, PROGRESS_HEAD, Finished, run, start, start_command, two
from tiers import also

pytestmark = [pytest.mark.job, pytest.mark.timeout(240)]

WAIT_FOR_EVER = "signal.pause()\n"
SAY_READY = "print('ready', rank, flush=True)\n"
NEED_MEMORY = "held = []\n    while True: held.append(bytearray(1 << 24))\n"
POPRUN = (sys.executable, "-m", "poprun")


@pytest.fixture
def little_memory():
    """Provide a file; a process that writes its number there shares 512 MiB with its descendants."""
    path = "/sys/fs/cgroup/memory" + own_cgroups().get("memory", "")
    limit = "memory.limit_in_bytes"
    if not os.path.exists(path):
        path, limit = "/sys/fs/cgroup" + own_cgroups().get("", ""), "memory.max"
    cgroup = Path(path, f"poprun-test-{os.getpid()}")
    try:
        cgroup.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        (cgroup / limit).write_text(str(512 << 20))
        yield cgroup / "cgroup.procs"
    except OSError as error:
        pytest.skip(f"no memory cgroup can be limited here: {error}")
    finally:
        cgroup.rmdir()


def own_cgroups() -> dict[str, str]:
    """Return the path of this process's cgroup by controller; see cgroups(7)."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    return {name: path for _, names, path in lines for name in names.split(",")}


def check(finished: Finished, status: int, blamed: int, *facts: str) -> None:
    assert finished.status == status, finished.stderr
    assert 1 <= len(finished.own_lines) <= 15
    assert finished.stderr.splitlines()[-1].endswith(finished.own_lines[-1])
    assert finished.own_lines[0].startswith(f"instance {blamed} on host "), finished.stderr
    for fact in facts:
        assert fact in finished.own_text


class TestPlainPrograms:
    """Programs that do not use popdist."""

    @pytest.mark.cores(2)
    def test_an_exception_is_blamed_while_the_others_wait_in_mpi(self):
        program = MPI_HEAD + (
            "if rank == 1:\n    print('failing', flush=True)\n    raise ValueError('no such data')\ncomm.Barrier()\n"
        )
        job = start(*two(program))
        job.wait_for("failing")
        finished = job.finish()
        check(finished, 1, 1, "ended with exit status 1")
        assert finished.stderr.count("<stderr>:ValueError: no such data") == 1
        assert finished.own_lines[-1].endswith(": ValueError: no such data (exit status 1)")
        assert "[1,1]<stderr>:Traceback (most recent call last):" in finished.stderr
        assert "prterun" not in finished.stderr

    @pytest.mark.parametrize("leave", ["sys.exit(3)", also("os._exit(3)")])
    @pytest.mark.cores(2)
    def test_exit_status_is_that_of_the_failed_instance(self, leave):
        finished = run(*two(MPI_HEAD + f"if rank == 0:\n    {leave}\ncomm.Barrier()\n"))
        check(finished, 3, 0, "ended with exit status 3")

    @pytest.mark.parametrize("number", [signal.SIGKILL, also(signal.SIGSEGV), also(signal.SIGTERM)])
    @pytest.mark.cores(2)
    def test_exit_status_after_a_signal_is_128_plus_its_number(self, number):
        program = MPI_HEAD + f"if rank == 1:\n    os.kill(os.getpid(), {int(number)})\ncomm.Barrier()\n"
        finished = run(*two(program))
        check(finished, 128 + number, 1, f"was killed by {number.name}")

    @pytest.mark.complete
    def test_a_kill_for_lack_of_memory_is_named(self, little_memory):
        program = PROGRESS_HEAD + (
            f"enter(7, b'barrier')\nif rank == 1:\n    page.operation_ends(); {SAY_READY}    {NEED_MEMORY}"
            + WAIT_FOR_EVER
        )
        job = start_command("sh", "-c", f'echo $$ > {little_memory}; exec "$@"', "-", *POPRUN, *two(program))
        job.wait_for("ready 1")
        fact = "was killed by SIGKILL for lack of memory, after collective 7, barrier"
        check(job.finish(), 137, 1, fact)

    @pytest.mark.cores(2)
    def test_mpi_abort_is_blamed_on_its_caller(self):
        finished = run(*two(MPI_HEAD + "if rank == 1:\n    comm.Abort(5)\ncomm.Barrier()\n"))
        check(finished, 5, 1, "ended with exit status 5")

    def test_an_unexecutable_program_is_named(self, tmp_path):
        script = tmp_path / "broken"
        script.write_text("neither a program nor a script that names its interpreter\n")
        script.chmod(0o755)
        finished = run(str(script))
        check(finished, 127, 0, "ended with exit status 127")
        assert f"cannot start {script}" in finished.stderr

    @pytest.mark.cores(2)
    def test_an_instance_may_end_early_when_none_waits_for_it(self):
        program = "import os, sys\nif os.environ['OMPI_COMM_WORLD_RANK'] == '1': print(sum(range(10**7)))\n"
        finished = run(*two(program))
        assert (finished.status, finished.said) == (0, [])

    def test_children_of_failed_and_other_instances_are_ended(self):
        program = (
            "import os, subprocess, sys\n"
            "subprocess.Popen(['sleep', '100'])\n"
            "subprocess.Popen(['sh', '-c', 'setsid sleep 100 & exec sleep 100'], start_new_session=True)\n"
            "if os.environ['OMPI_COMM_WORLD_RANK'] == '1': os._exit(9)\n"
            "os.wait()\n"
        )
        check(run(*two(program)), 9, 1)

    def test_children_of_a_successful_program_are_ended(self):
        finished = run("sh", "-c", "sleep 100 & setsid sleep 100 & echo done")
        assert (finished.status, finished.stdout) == (0, "done\n")


class TestProgramsWithProgressPage:
    """Programs that record their collectives, as popdist does."""

    def test_the_collective_of_waiting_instances_is_named(self, tmp_path):
        entered = tmp_path / "entered"
        program = PROGRESS_HEAD + (
            "page.step_begins(12)\n"
            "if rank == 1:\n"
            "    enter(4, b\"broadcast 'variables'\"); page.operation_ends()\n"
            f"    while not os.path.exists({str(entered)!r}): pass\n"
            "    raise ValueError('bad')\n"
            "enter(5, b\"all_reduce 'gradients'\"); page.waiting_for([1])\n"
            f"os.mkdir({str(entered)!r})\n" + WAIT_FOR_EVER
        )
        finished = run(*two(program))
        check(finished, 1, 1, "in step 12, after collective 4, broadcast 'variables'")
        assert "instance 0 was in collective 5, all_reduce 'gradients', step 12, waiting for instance 1" in (
            finished.own_lines
        )

    @pytest.mark.cores(2)
    def test_an_instance_released_in_its_exit_handler_keeps_its_status(self):
        program = PROGRESS_HEAD + (
            "if rank == 0:\n    page.leaving()\n    while not page.is_released: pass\n    os._exit(3)\n"
            "enter(5, b'barrier'); page.waiting_for([0])\n" + WAIT_FOR_EVER
        )
        check(run(*two(program)), 3, 0)


def test_a_killed_agent_takes_its_program_with_it_and_is_blamed():
    program = "import os, signal\nprint('agent', os.getppid(), flush=True)\nsignal.pause()\n"
    job = start(sys.executable, "-c", program)
    job.wait_for("\n")
    os.kill(int(job.streams[0].text.split()[-1]), signal.SIGKILL)
    check(job.finish(), 137, 0, "was lost")


def test_a_killed_mpirun_is_a_failure_and_sigterm_or_sigint_to_it_alone_is_none():
    program = (
        "import os, signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
        "def parent(pid): return open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[1]\n"
        "agent = os.getppid()\n"
        "print('mpirun', parent(parent(agent)), flush=True)\n"
        "signal.sigwait([signal.SIGUSR1])\n"
        "print('goes on', flush=True)\n"
        "signal.pause()\n"
    )
    job = start(sys.executable, "-c", program)
    job.wait_for("\n")
    mpirun = int(job.streams[0].text.split()[-1])
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(mpirun, number)
    job.process.send_signal(signal.SIGUSR1)
    job.wait_for("goes on")
    os.kill(mpirun, signal.SIGKILL)
    finished = job.finish()
    assert finished.status == 137
    assert "mpirun" in finished.own_text


def test_mpirun_s_own_words_are_shown_when_it_cannot_start():
    finished = run("--mpi-global-args", "--no-such-option-at-all", "echo", "x")
    assert finished.status not in (0, 2)
    assert "no-such-option-at-all" in finished.stderr
    assert finished.own_lines[-1] == "instance 0 never started"


class TestTheControlSocket:
    def test_a_job_starts_while_strangers_hold_more_connections_than_poprun_has_descriptors(self, tmp_path):
        all_are_there = tmp_path / "all are there"
        program = f"until [ -e {shlex.quote(str(all_are_there))} ]; do sleep 0.02; done; echo said"
        words = [sys.executable, "-m", "poprun", "--num-instances", "2", "--num-replicas", "2", "sh", "-c", program]
        job = start_command("sh", "-c", f"ulimit -Sn 64; exec {shlex.join(words)}")
        with contextlib.ExitStack() as held:
            name = control_socket(job.process.pid)
            for _ in range(300):
                stranger = held.enter_context(socket.socket(socket.AF_UNIX))
                stranger.connect(f"\0{name}")
                with contextlib.suppress(OSError):  # poprun may have closed the connection
                    stranger.sendall(b"\1\xff\xff\xff\xff")
            all_are_there.touch()
            finished = job.finish()
        assert finished.status == 0, finished.stderr
        assert finished.lines_of(0) == finished.lines_of(1) == ["said"]
        assert "Traceback" not in finished.stderr

    @pytest.mark.cores(2)
    def test_an_overwritten_progress_page_gives_one_warning(self):
        program = f"{PROGRESS_HEAD}page._words[2] = 99\n"
        finished = run(*two(program))
        assert finished.status == 0, finished.stderr
        assert len(finished.said) == 2
        assert all("its progress page was overwritten (its state is 99)" in line for line in finished.said)


def control_socket(pid: int) -> str:
    """Return the name of poprun's socket as soon as it accepts connections, as its flags tell; see proc(5)."""
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        found = re.search(rf" 00010000 .*@(poprun-{pid}-\w+)", Path("/proc/net/unix").read_text())
        if found:
            return found[1]
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
