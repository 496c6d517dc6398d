"""Collects what a job comes to, and says it when the job is over."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from poprun.cli.log import Log, write_all
from poprun.cli.summary_setting import SummaryAsked
from poprun.cli.wording import without_controls
from poprun.monitor.attempts import Attempt
from poprun.monitor.summary_lines import summary_lines


class Summary:
    """The summary of a job.

    Args:
        asked: what the user wants.
        program: of the job.
        log: says what goes wrong.
        environ: poprun's own.

    Raises:
        UsageError: the file cannot be written.
    """

    def __init__(self, asked: SummaryAsked, program: tuple[str, ...], log: Log, environ: Mapping[str, str]) -> None:
        self._asked = asked
        self._program = program
        self._log = log
        self._environ = environ
        self._attempts: list[Attempt] = []
        self._began_at_s = time.time()
        self._began_s = time.monotonic()
        if asked.file:
            from poprun.monitor.summary_file import make_room  # the few who want a file

            make_room(asked.file)

    def note(self, attempt: Attempt) -> None:
        """An attempt at the job is over."""
        self._attempts.append(attempt)

    def finish(self, exit_status: int) -> None:
        """The job is over: show the lines, and write the file, which has no influence on how the job has ended."""
        duration_s = time.monotonic() - self._began_s
        if self._asked.shows_lines(os.isatty(self._log.descriptor), self._log.level, self._environ):
            text = "".join(f"{without_controls(line)}\n" for line in summary_lines(self._attempts, duration_s))
            write_all(self._log.descriptor, text.encode(errors="surrogateescape"))
        if self._asked.file:
            self._write(duration_s, exit_status)

    def _write(self, duration_s: float, exit_status: int) -> None:
        from poprun.monitor.summary_file import Whole, describe_job, write_summary

        whole = Whole(self._program, self._began_at_s, duration_s, exit_status)
        try:
            write_summary(self._asked.file, describe_job(whole, self._attempts))
        except OSError as error:
            self._log.warn(f"there is no summary: {self._asked.file} cannot be written: {error.strerror}")
