"""mpirun as a child process: a process between the two ends it when we are killed, and its own output is held back."""

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
from poprun.supervisor.job_events import END_SIGNAL

_FAREWELL = ((END_SIGNAL, 0.5), (END_SIGNAL, 0.4))
"""While it starts daemons on other hosts it heeds only the second one; all have ended within the docs' 2 s."""
_KEPT_BYTES = 1 << 16

GONE = signal.SIGRTMIN
"""The signal by which the kernel tells the process between that we are gone."""
LOOK_S = 0.02
KILL_LIMIT_S = 2.0
TOGETHER_S = 0.2
"""The wait after a signal has ended the program: we may be about to be ended by it too."""


class Mpirun:
    """A running mpirun.

    Attributes:
        pid: its process.
        status: its exit status, 128 + n after signal n; None while it runs.

    Args:
        command: the words that start it.
        environ: its environment.
        after_us: called, with its pid, when poprun has been killed and it has ended: in a process of its own.
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
        """Whether a signal has stopped it."""
        return self.status is None and state_of(self.pid) == b"T"

    def read(self, descriptor: int) -> bytes:
        """Return mpirun's new output; empty at the end, or if there is none. Standard error is kept too."""
        data = os.read(descriptor, 65536)
        if descriptor == self.stderr:
            self._words += data
            del self._words[:-_KEPT_BYTES]
        return data

    def read_rest(self) -> None:
        """Read what is left of its standard error."""
        os.set_blocking(self.stderr, False)
        with suppress(BlockingIOError):
            while self.read(self.stderr):
                pass

    @property
    def complaint(self) -> bytes:
        """The end of its standard error so far, as whole lines: some of its messages end with a NUL instead."""
        words = self._words.replace(b"\0", b"").rstrip()
        return bytes(words + b"\n") if words else b""

    def reap(self) -> None:
        """Take note of its end, and of the end of orphans that poprun has adopted."""
        status = reap().get(self._tether)
        if status is not None:
            code = os.waitstatus_to_exitcode(status)
            self.status = code if code >= 0 else 128 - code

    def send(self, number: int) -> None:
        """Send it a signal while it runs, also if another signal has stopped it."""
        if self.status is None:
            send(self.pid, number)
            send(self.pid, signal.SIGCONT)


def _prepare(out: int, err: int) -> None:
    # Ctrl-C in a terminal, or SIGTERM for the process group, reaches mpirun too. Blocked there, it is for poprun to say
    # what happens; SIGHUP remains for us, and must not be taken by our copy of poprun's handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    signal.signal(END_SIGNAL, signal.SIG_DFL)
    die_with_parent(END_SIGNAL)  # of what is between us and poprun
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
    """Start a program that does not outlive us, nor anything that it has started on this machine.

    The process between is in a group of its own, so that what is sent to ours, SIGKILL too, does not reach it. It ends
    when the program does, with its exit status.

    Args:
        words: the program, looked up in PATH, and its arguments.
        environ: its environment.
        prepare: called in the program's process before it becomes the program.
        farewell: signals for the program when we are gone, and the seconds that it and all others may take to end
            after each; then they are killed.
        at_the_end: called with the program's pid when we are gone, and it is too.

    Returns:
        The pids of the process between and of the program.
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
    """Before a program: give it the group and the signals that it would have without the process between."""
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if not ignores_hangup():  # or what a terminal sends to our group would end a program that does not ignore it
        with contextlib.suppress(OSError):  # it is gone, and we soon
            os.setpgid(0, group)
    prepare()


def _let_go_of_files() -> None:
    """Close all that we have open as a copy of our parent, so that nobody waits for us at the other end."""
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
    """Wait for the end of the program, or of our parent, and do what then is to be done."""
    ended: dict[int, int] = {}
    while program not in ended and os.getppid() == parent:
        signal.sigwaitinfo((signal.SIGCHLD, GONE))
        ended = reap()
    if os.WIFSIGNALED(ended.get(program, 0)) and os.getppid() == parent:
        signal.sigtimedwait((GONE,), TOGETHER_S)  # SIGKILL for a group ends its members one after another
    if os.getppid() != parent:
        for number, limit_s in farewell:
            if program not in ended:
                send(program, number)
            ended |= _await_descendants(limit_s)
        end_descendants(KILL_LIMIT_S)
        with contextlib.suppress(Exception):  # nobody would read what it says
            at_the_end(program)
        os._exit(127)
    code = os.waitstatus_to_exitcode(ended[program])
    os._exit(code if code >= 0 else 128 - code)


def _await_descendants(limit_s: float) -> dict[int, int]:
    """Wait until there is none any more: those that have ended, as `reap` gives them."""
    ended = reap()
    give_up_s = time.monotonic() + limit_s
    while descendants(os.getpid()) and time.monotonic() < give_up_s:
        time.sleep(LOOK_S)
        ended |= reap()
    return ended
