"""mpirun as a child process: a tether process ends it if poprun is killed, and its own output is held back."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

from poprun.ipc.processes import (
    adopt_orphans,
    descendants,
    die_with_parent,
    end_descendants,
    ignores_hangup,
    reap,
    send,
    start,
    state_of,
)
from poprun.supervisor.signals import END_SIGNAL

_FAREWELL = ((END_SIGNAL, 0.5), (END_SIGNAL, 0.4))
"""Signals for mpirun and waits in seconds. While mpirun starts daemons on other hosts, it obeys only the second signal.
The total stays below the 2 s that the documentation promises.
"""
_KEPT_BYTES = 1 << 16

GONE = signal.SIGRTMIN
"""The signal that the kernel sends to the tether when poprun is gone."""
LOOK_S = 0.02
KILL_LIMIT_S = 2.0
TOGETHER_S = 0.2
"""The wait after a signal has ended the program: the same signal may be about to end poprun."""


class Mpirun:
    """A running mpirun.

    Attributes:
        pid: The pid of mpirun.
        status: mpirun's exit status, 128 + n after signal n; None while it runs.

    Args:
        command: The words of the command.
        environ: The environment of mpirun.
        after_us: Called in the tether process with mpirun's pid, after poprun was killed and mpirun has ended.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], after_us: Callable[[int], None]) -> None:
        self.status: int | None = None
        self._words = bytearray()
        self.stdout, out = os.pipe()
        self.stderr, err = os.pipe()
        self._tether, self.pid = start_tethered(command, dict(environ), lambda: _prepare(out, err), _FAREWELL, after_us)
        os.close(out)
        os.close(err)

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped mpirun."""
        return self.status is None and state_of(self.pid) == b"T"

    def read(self, descriptor: int) -> bytes:
        """Return mpirun's new output; empty at the end, or if there is none. Keep a copy of standard error."""
        data = os.read(descriptor, 65536)
        if descriptor == self.stderr:
            self._words += data
            del self._words[:-_KEPT_BYTES]
        return data

    def read_rest(self) -> None:
        """Read the rest of mpirun's standard error."""
        os.set_blocking(self.stderr, False)
        with suppress(BlockingIOError):
            while self.read(self.stderr):
                pass

    @property
    def complaint(self) -> bytes:
        """The last part of mpirun's standard error as whole lines, without the NULs that end some of its messages."""
        words = self._words.replace(b"\0", b"").rstrip()
        return bytes(words + b"\n") if words else b""

    def reap(self) -> None:
        """Note the end of mpirun, and reap orphans that poprun has adopted."""
        status = reap().get(self._tether)
        if status is not None:
            code = os.waitstatus_to_exitcode(status)
            self.status = code if code >= 0 else 128 - code

    def send(self, number: int) -> None:
        """Send mpirun a signal while it runs, and continue it if another signal has stopped it."""
        if self.status is None:
            send(self.pid, number)
            send(self.pid, signal.SIGCONT)


def _prepare(out: int, err: int) -> None:
    # Ctrl-C in a terminal, or SIGTERM for the process group, reaches mpirun too. Both are blocked there, because poprun
    # reports them. SIGHUP remains for us; poprun's handlers, which the fork has copied, must not catch it.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    signal.signal(END_SIGNAL, signal.SIG_DFL)
    die_with_parent(END_SIGNAL)  # the parent is the tether
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)


def start_tethered(
    words: Sequence[str],
    environ: dict[str, str],
    prepare: Callable[[], None],
    farewell: Sequence[tuple[int, float]],
    at_the_end: Callable[[int], None],
) -> tuple[int, int]:
    """Start a program. If this process ends, end the program and its descendants on this machine.

    A tether process between this one and the program has a process group of its own. So no signal to our group reaches
    it, not even SIGKILL. It ends when the program ends, with the same exit status.

    Args:
        words: The program, looked up in PATH, and its arguments.
        environ: The environment of the program.
        prepare: Called in the program's process before the program is executed.
        farewell: Pairs of a signal and a time limit in seconds. After we are gone, the program gets each signal in
            turn, and all processes have that time to end. After the last pair, they are killed.
        at_the_end: Called with the program's pid after both we and the program are gone.

    Returns:
        The pids of the tether and of the program.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    parent, group = os.getpid(), os.getpgrp()
    reader, writer = os.pipe()
    tether = os.fork()
    if tether == 0:
        try:
            die_with_parent(GONE)
            os.setpgid(0, 0)
            adopt_orphans()
            if os.getppid() == parent:
                program = start(list(words), environ, lambda: _join(group, before, prepare))
                os.write(writer, str(program).encode())
                _let_go_of_files()
                _hold(program, parent, farewell, at_the_end)
        finally:
            os._exit(127)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.close(writer)
    said = os.read(reader, 32)
    os.close(reader)
    return tether, int(said or tether)


def _join(group: int, mask: set[int | signal.Signals], prepare: Callable[[], None]) -> None:
    """Give a process the process group and the signal mask that it would have without the tether, then prepare it."""
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if not ignores_hangup():  # under nohup, the program stays out of reach of the terminal's signals to our group
        with contextlib.suppress(OSError):  # the group is gone, so poprun has ended, and we end soon
            os.setpgid(0, group)
    prepare()


def _let_go_of_files() -> None:
    """Close all descriptors inherited from the parent, so that no reader or writer at their other ends waits for us."""
    silence = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor != silence:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    for descriptor in range(3):
        os.dup2(silence, descriptor)
    signal.set_wakeup_fd(-1)


def _hold(
    program: int, parent: int, farewell: Sequence[tuple[int, float]], at_the_end: Callable[[int], None]
) -> NoReturn:
    """Wait until the program or the parent ends. Then exit with the program's status, or end the program."""
    ended: dict[int, int] = {}
    while program not in ended and os.getppid() == parent:
        signal.sigwaitinfo((signal.SIGCHLD, GONE))
        ended = reap()
    if os.WIFSIGNALED(ended.get(program, 0)) and os.getppid() == parent:
        signal.sigtimedwait((GONE,), TOGETHER_S)  # SIGKILL for a group ends one process after another
    if os.getppid() != parent:
        for number, limit_s in farewell:
            if program not in ended:
                send(program, number)
            ended |= _await_descendants(limit_s)
        end_descendants(KILL_LIMIT_S)
        with contextlib.suppress(Exception):  # nobody is left to read an error
            at_the_end(program)
        os._exit(127)
    code = os.waitstatus_to_exitcode(ended[program])
    os._exit(code if code >= 0 else 128 - code)


def _await_descendants(limit_s: float) -> dict[int, int]:
    """Wait until no descendant runs, or the limit is over; return the ended processes as `reap` does."""
    ended = reap()
    give_up_s = time.monotonic() + limit_s
    while descendants(os.getpid()) and time.monotonic() < give_up_s:
        time.sleep(LOOK_S)
        ended |= reap()
    return ended
