"""The parts of poprun that watch a job: the connections of `poprun top`, and the summary at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from poprun.cli.log import Log
from poprun.cli.settings import LaunchSettings, SummaryAsked
from poprun.monitor.attempts import Attempt
from poprun.monitor.listener import open_listener, own_folder
from poprun.monitor.summary import Summary
from poprun.monitor.viewers import Viewers


@dataclass(frozen=True)
class JobWatch:
    """The watchers of a job, during all attempts at it.

    Attributes:
        viewers: The connections of `poprun top`.
        summary: The summary. None: nobody wants one.
    """

    viewers: Viewers
    summary: Summary | None = None

    def note(self, attempt: Attempt) -> None:
        """Store an attempt after its end."""
        if self.summary is not None:
            self.summary.note(attempt)

    def end(self, exit_status: int) -> None:
        """Disconnect the viewers and give the summary after the end of the job."""
        self.viewers.close()
        if self.summary is not None:
            self.summary.finish(exit_status)


def watch_nothing() -> JobWatch:
    """Return the watch of a job that nobody may look at."""
    return JobWatch(Viewers())


def watch_job(settings: LaunchSettings, log: Log, environ: Mapping[str, str]) -> JobWatch:
    """Open the job for viewers, and begin its summary.

    Raises:
        PopRunError: poprun cannot write the file of the summary.
    """
    summary = Summary(SummaryAsked.read(settings.summary), settings.program, log, environ)
    return JobWatch(Viewers(open_listener(log, own_folder()), settings.program), summary)
