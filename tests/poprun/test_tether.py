"""A program that is tied to the life of the process that has started it."""

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
farewell = [(signal.SIGHUP, float(limit_s)) for limit_s in sys.argv[2].split(",")]
started = start_tethered(sys.argv[3:], dict(os.environ), lambda: None, farewell, note)
os.write(1, "{} {}\\n".format(*started).encode())  # at once: the program writes there too
signal.pause()
"""
STUBBORN = "trap '' HUP TERM; setsid sleep 1000 & sh -c 'setsid sleep 1000 & wait' & echo up; wait"
"""It and its children heed nothing; some are in sessions of their own, one soon without a parent."""


class Holder:
    """A process that has started a program, and waits; `limits_s` are those after each SIGHUP.

    Attributes:
        tether: the process between.
        program: the program.
    """

    def __init__(self, note: Path, words: Sequence[str], limits_s: str = "0.1,0.1") -> None:
        command = [sys.executable, "-c", HOLDER, str(note), limits_s, *words]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ, start_new_session=True)
        assert self.process.stdout is not None
        self._out = self.process.stdout
        lines = [self._out.readline(), self._out.readline()]
        self.tether, self.program = next(map(int, line.split()) for line in lines if line != "up\n")

    def await_end(self) -> None:
        """Return when whoever writes to the same pipe is gone; all do."""
        self._out.read()
        self._out.close()
        self.process.wait()


def await_note(note: Path, tether: int) -> str:
    while state_of(tether) not in (b"X", b"Z"):
        os.sched_yield()
    return note.read_text()


@pytest.mark.parametrize("whom", ["holder", "group"])
def test_when_we_are_killed_it_ends_with_all_that_it_has_started(tmp_path: Path, whom: str) -> None:
    holder = Holder(tmp_path / "note", ["sh", "-c", STUBBORN])
    os.kill(holder.process.pid if whom == "holder" else -holder.process.pid, signal.SIGKILL)
    holder.await_end()
    assert await_note(tmp_path / "note", holder.tether) == str(holder.program)


def test_one_that_heeds_the_second_signal_only_ends_by_it(tmp_path: Path) -> None:
    """As mpirun does while it starts daemons on other hosts."""
    ended = tmp_path / "ended"
    program = f"trap 'n=1$n; test $n = 11 && echo $n >{ended} && exit' HUP; echo up; while :; do sleep 0.01; done"
    holder = Holder(tmp_path / "note", ["sh", "-c", program], limits_s="2,60")
    holder.process.kill()
    holder.await_end()
    await_note(tmp_path / "note", holder.tether)
    assert ended.read_text() == "11\n"


def test_it_is_in_our_group_and_what_is_between_is_not(tmp_path: Path) -> None:
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
"""A process of its own, as poprun is: other tests may have left threads of gRPC in ours, which do not bear a fork."""


@pytest.mark.parametrize(("program", "status"), [("exit 3", 3), ("kill -9 $$", 137), ("true", 0)])
def test_its_exit_status_becomes_that_of_what_is_between(program: str, status: int) -> None:
    assert subprocess.run([sys.executable, "-c", WAITING, "sh", "-c", program], check=False).returncode == status


def test_it_finds_signals_as_we_have_them() -> None:
    """Not blocked, as they are in what is between."""
    looking = "test $(sed -n 's/SigBlk:.//p' /proc/self/status) = 0000000000000000"
    assert subprocess.run([sys.executable, "-c", WAITING, "sh", "-c", looking], check=False).returncode == 0
