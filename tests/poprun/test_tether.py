"""A program whose life is tied to its starter's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from poprun.ipc.processes import parent_of, state_of

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[2]
HOLDER = """
import os, signal, sys
from poprun.supervisor.mpirun import start_tethered
def note(pid): open(sys.argv[1], "w").write(str(pid))
farewell = [(int(number), float(limit_s)) for number, limit_s in (each.split(":") for each in sys.argv[2].split(","))]
started = start_tethered(sys.argv[3:], dict(os.environ), lambda: None, farewell, note)
os.write(1, "{} {}\\n".format(*started).encode())  # at once: the program writes there too
signal.pause()
"""
STUBBORN = "trap '' HUP TERM; setsid sleep 1000 & sh -c 'setsid sleep 1000 & wait' & echo up; wait"
"""The program and its children ignore signals; some have their own sessions, one soon loses its parent."""


class Holder:
    """A process that has started a program and waits; `farewell` lists signals with the waits after them.

    Attributes:
        tether: The pid of the process between them.
        program: The pid of the program.
    """

    def __init__(self, note: Path, words: Sequence[str], farewell: str = "1:0.1,1:0.1") -> None:
        command = [sys.executable, "-c", HOLDER, str(note), farewell, *words]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ, start_new_session=True)
        assert self.process.stdout is not None
        self._out = self.process.stdout
        lines = [self._out.readline(), self._out.readline()]
        self.tether, self.program = next(map(int, line.split()) for line in lines if line != "up\n")

    def await_end(self) -> None:
        """Return when all writers of the pipe have ended."""
        self._out.read()
        self._out.close()
        self.process.wait()


def await_note(note: Path, tether: int) -> str:
    while state_of(tether) not in (b"X", b"Z"):
        os.sched_yield()
    return note.read_text()


@pytest.mark.parametrize("whom", ["holder", "group"])
def test_the_program_ends_with_all_its_children_when_its_starter_is_killed(tmp_path: Path, whom: str) -> None:
    holder = Holder(tmp_path / "note", ["sh", "-c", STUBBORN])
    os.kill(holder.process.pid if whom == "holder" else -holder.process.pid, signal.SIGKILL)
    holder.await_end()
    assert await_note(tmp_path / "note", holder.tether) == str(holder.program)


def test_a_program_that_heeds_only_the_second_signal_ends_by_it(tmp_path: Path) -> None:
    """mpirun does so while it starts daemons on other hosts.

    The signals differ because two equal ones become one if the program is too busy to take the first in time.
    """
    ended = tmp_path / "ended"
    traps = f"trap 'n=1' HUP; trap 'n=2$n; echo $n >{ended}; exit' TERM"
    program = f"{traps}; echo up; while :; do sleep 0.01; done"
    holder = Holder(tmp_path / "note", ["sh", "-c", program], farewell="1:0.1,15:60")
    holder.process.kill()
    holder.await_end()
    await_note(tmp_path / "note", holder.tether)
    assert ended.read_text() == "21\n"


def test_the_program_is_in_its_starters_process_group_and_the_tether_is_not(tmp_path: Path) -> None:
    holder = Holder(tmp_path / "note", ["sh", "-c", "echo up; exec sleep 1000"])
    assert os.getpgid(holder.program) == os.getpgid(holder.process.pid)
    assert os.getpgid(holder.tether) == holder.tether
    assert parent_of(holder.program) == holder.tether
    holder.process.kill()
    holder.await_end()
    await_note(tmp_path / "note", holder.tether)


WAITING = """
import os, sys
from poprun.supervisor.mpirun import start_tethered
tether, _ = start_tethered(sys.argv[1:], dict(os.environ), lambda: None, [], lambda pid: None)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(tether, 0)[1]))
"""
"""A separate process, as poprun is: gRPC threads of other tests in this process would not survive a fork."""


@pytest.mark.parametrize(("program", "status"), [("exit 3", 3), ("kill -9 $$", 137), ("true", 0)])
def test_the_tether_exits_with_the_status_of_the_program(program: str, status: int) -> None:
    assert subprocess.run([sys.executable, "-c", WAITING, "sh", "-c", program], check=False).returncode == status


def test_the_program_starts_with_no_signal_blocked() -> None:
    """The tether itself blocks signals."""
    looking = "test $(sed -n 's/SigBlk:.//p' /proc/self/status) = 0000000000000000"
    assert subprocess.run([sys.executable, "-c", WAITING, "sh", "-c", looking], check=False).returncode == 0
