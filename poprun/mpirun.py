"""mpirun as a child process: started so that it cannot outlive poprun, its own output held back."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress

from poprun.processes import die_with_parent, send, start

END_SIGNAL = signal.SIGHUP
_KEPT_BYTES = 1 << 16


class Mpirun:
    """A running mpirun.

    Attributes:
        pid: its process.
        status: its exit status, 128 + n after signal n; None while it runs.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self.status: int | None = None
        self._words = bytearray()
        self.stdout, out = os.pipe()
        self.stderr, err = os.pipe()
        # Ctrl-C in a terminal, or SIGTERM for the process group, reaches mpirun too. Blocked there, it is for
        # poprun to say what happens; SIGHUP remains for us.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
        parent = os.getpid()
        self.pid = start(list(command), dict(environ), lambda: _prepare(out, err, parent))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(out)
        os.close(err)

    def read(self, descriptor: int) -> bytes:
        """What it has written; empty at the end, or when nothing is there. Standard error is kept too."""
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
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.pid:
                    code = os.waitstatus_to_exitcode(status)
                    self.status = code if code >= 0 else 128 - code
        except ChildProcessError:
            return

    def tidy(self, environ: Mapping[str, str]) -> None:
        """Remove the session directory that it leaves behind when it is killed."""
        if self.status is None or self.status > 128:
            import shutil  # seldom needed

            shutil.rmtree(f"{environ.get('TMPDIR') or '/tmp'}/ompi.{self.pid}", ignore_errors=True)

    def send(self, number: int) -> None:
        """Send it a signal while it runs."""
        if self.status is None:
            send(self.pid, number)


def _prepare(out: int, err: int, parent: int) -> None:
    # poprun may be killed at any moment: our copy of its handlers must not take the signal that then ends us, nor
    # may it have been too early for that.
    signal.signal(END_SIGNAL, signal.SIG_DFL)
    die_with_parent(END_SIGNAL)
    if os.getppid() != parent:
        os._exit(127)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
