"""Workers are asked together, and those that would not sleep by themselves are stopped outside of their turns."""

import os
import select
import signal
import subprocess
import sys

import pytest
from benchmark_runs import BENCHMARKS, LIMIT_S

sys.path.append(str(BENCHMARKS))

from control import Coordinator  # noqa: E402
from timing import environment  # noqa: E402

# A thread counts as fast as it can, as Horovod's does.
RESTLESS = """
import sys, threading
sys.path.append(sys.argv[1])
import control
count = 0
def count_on():
    global count
    while True:
        count += 1
threading.Thread(target=count_on, daemon=True).start()
control.serve(sys.argv[2], "restless", 0, {"double": lambda number: 2 * number})
"""

# Starts a restless worker under mpirun, says which process it is, and is killed.
KILLED = f"""
import os, signal, sys, tempfile
sys.path.append({str(BENCHMARKS)!r})
from control import Coordinator
from timing import environment, mpirun_command
program = [sys.executable, "-c", {RESTLESS!r}, {str(BENCHMARKS)!r}]
with tempfile.TemporaryDirectory(dir=sys.argv[2]) as folder:
    coordinator = Coordinator(folder, 60.0)
    command = mpirun_command(["any"], [*program, coordinator.path])
    group = coordinator.start("restless", 1, [command], environment(), is_restless=True)
    print(*group.pids.values(), flush=True)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    with coordinator:
        raise ZeroDivisionError
"""


def await_stop(pid):
    """Returns when the child has stopped; pytest-timeout limits how long that may take."""
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def is_stopped(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


def ends(pid):
    """Whether the process, which is no child, ends in time."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ready, _, _ = select.select([process], [], [], LIMIT_S)
    os.close(process)
    return bool(ready)


@pytest.mark.job
def test_restless_workers_are_stopped_before_and_after_each_question(tmp_path):
    with Coordinator(tmp_path, LIMIT_S) as coordinator:
        command = [sys.executable, "-c", RESTLESS, str(BENCHMARKS), coordinator.path]
        group = coordinator.start("restless", 1, [command], environment(), is_restless=True)
        for number in (1, 2):
            await_stop(group.pids[0])
            assert is_stopped(group.pids[0])
            assert group.ask(do="double", number=number) == [2 * number]
        await_stop(group.pids[0])
    assert group.processes[0].returncode == 0


@pytest.mark.job
def test_others_wait_by_themselves(tmp_path):
    with Coordinator(tmp_path, LIMIT_S) as coordinator:
        command = [sys.executable, "-c", RESTLESS, str(BENCHMARKS), coordinator.path]
        group = coordinator.start("other", 1, [command], environment())
        assert group.ask(do="double", number=3) == [6]
        assert not is_stopped(group.pids[0])


@pytest.mark.job
@pytest.mark.parametrize("end", ["killed", "error"])
def test_stopped_workers_end_with_the_coordinator(end, tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, end, str(tmp_path)], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert ended.returncode == (-signal.SIGKILL if end == "killed" else 1)
    assert ends(int(ended.stdout))
