"""mpirun as a child process: started so that it cannot outlive poprun, its own output held back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from poprun.ipc.processes import die_with_parent, reap, send, state_of
from poprun.supervisor.job_events import END_SIGNAL
from poprun.supervisor.tether import start_tethered

_FAREWELL = ((END_SIGNAL, 0.5), (END_SIGNAL, 0.4))
"""While it starts daemons on other hosts it heeds only the second one; all have ended within the docs' 2 s."""
_KEPT_BYTES = 1 << 16


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
