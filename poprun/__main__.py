"""The `poprun` command."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from poprun.errors import PopRunError

TYPE_CHECKING = False  # replaces `typing.TYPE_CHECKING`: `typing` takes too long to load before mpirun starts
if TYPE_CHECKING:
    from typing import NoReturn


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: The words after `poprun`. Default: the words of this process, which ends at once after a launch.

    Returns:
        The exit status of the failed instance, 128 + n after signal n, or 2 for a wrong command line.
    """
    words = sys.argv[1:] if argv is None else argv
    _open_missing_streams()
    try:
        if list(words[:1]) == ["doctor"]:
            from poprun.doctor import main as examine

            return examine(words[1:])
        if list(words[:1]) == ["verify"]:
            from poprun.verify.command import main as verify

            return verify(words[1:])
        if list(words[:1]) == ["timeline"]:
            from poprun.trace.command import main as look

            return look(words[1:])
        if list(words[:1]) == ["top"]:
            from poprun.monitor.command import main as watch

            return watch(words[1:])
        if list(words[:1]) == ["resize"]:
            from poprun.monitor.resize_command import main as resize

            return resize(words[1:])
        if list(words[:1]) == ["simulate"]:
            from collectives.simulation.__main__ import main as simulate

            return simulate(words[1:])
        return _launch(words) if argv is not None else _launch_and_end(words)
    except PopRunError as error:
        from poprun.cli.log import Log

        Log().error(str(error))
        return error.exit_status
    except KeyboardInterrupt:  # before the launch; during a job the supervisor takes the signal
        return 128 + signal.SIGINT


def _open_missing_streams() -> None:
    """Open descriptors 0, 1 and 2 if closed; else the next file would become a standard stream of the programs."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def _launch(words: Sequence[str]) -> int:
    from poprun.command import run

    return run(words, os.environ)


def _launch_and_end(words: Sequence[str]) -> NoReturn:
    """Launch a job in this process, and end it.

    Garbage collection would look again and again through what imports make, which takes a tenth of their time. Taking
    the interpreter apart at the end would take 10 ms.
    """
    gc.disable()  # until the job runs
    exit_status = _launch(words)
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: the descriptor was closed when Python started
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_status)


if __name__ == "__main__":
    sys.exit(main())
