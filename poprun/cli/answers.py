"""What poprun shows on its standard streams by itself, without a job whose output it could tear."""

from __future__ import annotations

import os
import signal

from poprun.errors import OutputError


def show(text: str, descriptor: int = 1) -> None:
    """Write a text and a line end; words of the user that are not UTF-8 come out as they are.

    Raises:
        OutputError: it cannot be written, because the disk is full.
        SystemExit: nobody reads it any more, as with `| head`.
    """
    data = f"{text}\n".encode(errors="surrogateescape")
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except BrokenPipeError:
        raise SystemExit(128 + signal.SIGPIPE) from None
    except OSError as error:
        name = "standard output" if descriptor == 1 else "standard error"
        raise OutputError(f"{name} cannot be written: {error.strerror}; nothing was started") from None
