"""poprun as a child process, with its output copied to this process's `sys.stdout` and `sys.stderr`, such as a cell."""

from __future__ import annotations

import codecs
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

END_LIMIT_S = 600.0
"""Time limit for poprun to end the job after a signal: 2 s, or the time that programs need to save. Then poprun is
killed, as after a second interrupt."""
TAIL_LINES = 10
_TAIL_CHARACTERS = 4000
_READ_BYTES = 1 << 16


class OutputRelay:
    """A running poprun.

    Attributes:
        tail: The last characters of its standard error.

    Args:
        command: The words of the command.
        environ: Its environment.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self.tail = ""
        self._is_muted = False
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ,
            process_group=0,  # a terminal and Jupyter send SIGINT to the whole group; poprun gets it from this process
        )
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in ("stdout", "stderr")}

    @property
    def last_lines(self) -> str:
        """The last lines of standard error."""
        return "\n".join(self.tail.splitlines()[-TAIL_LINES:])

    def run(self) -> int:
        """Copy all output, and return the exit status. If anything interrupts this process, end the job first."""
        try:
            self._copy()
            return self._process.wait()
        except BaseException as error:
            is_interrupt = isinstance(error, KeyboardInterrupt)
            self._is_muted = not is_interrupt  # if the output cannot be written, do not try again
            self._end(signal.SIGINT if is_interrupt else signal.SIGTERM)
            raise
        finally:
            for stream in (self._process.stdout, self._process.stderr):
                assert stream is not None
                stream.close()

    def _end(self, number: int) -> None:
        """End the job; a second interrupt, or the time limit, kills poprun, and its guards end the rest."""
        try:
            self._process.send_signal(number)
            self._copy(END_LIMIT_S)
            self._process.wait(END_LIMIT_S)
        except BaseException:
            self._is_muted = True
            self._process.kill()
            self._process.wait()
            with suppress(TimeoutError):
                self._copy(END_LIMIT_S)  # the last process of the job closes the pipes

    def _copy(self, limit_s: float | None = None) -> None:
        """Copy output until all processes of the job have closed the pipes.

        Raises:
            TimeoutError: They are open after `limit_s`.
        """
        until_s = None if limit_s is None else time.monotonic() + limit_s
        with selectors.DefaultSelector() as waiting:
            for name in ("stdout", "stderr"):
                stream: IO[bytes] = getattr(self._process, name)
                waiting.register(stream, selectors.EVENT_READ, name)
            while waiting.get_map():
                left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
                ready = waiting.select(left_s)
                if not ready and left_s is not None:
                    raise TimeoutError(f"the output of the job has not ended within {limit_s:g} s")
                for key, _ in ready:
                    data = os.read(key.fd, _READ_BYTES)
                    self._show(key.data, self._decoders[key.data].decode(data, final=not data))
                    if not data:
                        waiting.unregister(key.fileobj)

    def _show(self, name: str, text: str) -> None:
        if name == "stderr":
            self.tail = (self.tail + text)[-_TAIL_CHARACTERS:]
        if text and not self._is_muted:
            stream = getattr(sys, name)
            if stream is not None:  # there is none under pythonw or a daemon
                stream.write(text)
                stream.flush()
