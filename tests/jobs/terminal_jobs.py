"""Helpers that run poprun on a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from poprun_jobs import LIMIT_S, ROOT_ALLOWED


def on_terminal(
    program: str,
    *options: str,
    environ: dict[str, str] | None = None,
    tell: tuple[bytes, Path] | None = None,
    **streams: Any,
) -> tuple[int, bytes]:
    """Run a Python program under poprun with some streams on a terminal; return its exit status and the terminal's
    output.

    Args:
        program: The text of a Python program.
        options: Options of poprun.
        environ: Variables added to the environment.
        tell: A text, and a file that is created once the text has been shown.
        streams: Streams as for Popen, or "terminal".
    """
    ours, theirs = os.openpty()
    named = {name: theirs if value == "terminal" else value for name, value in streams.items()}
    variables = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")}
    process = subprocess.Popen(
        [sys.executable, "-m", "poprun", *options, sys.executable, "-c", program],
        env=variables | ROOT_ALLOWED | (environ or {}),
        start_new_session=True,
        **named,
    )
    os.close(theirs)
    shown = _read_terminal(ours, tell)
    os.close(ours)
    return process.wait(LIMIT_S), shown


def _read_terminal(descriptor: int, tell: tuple[bytes, Path] | None) -> bytes:
    shown = b""
    while True:
        try:
            data = os.read(descriptor, 65536)
        except OSError:  # the last writer has gone
            return shown
        shown += data
        if tell and tell[0] in shown:
            tell[1].touch()
