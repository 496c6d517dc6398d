"""What `poprun --timeline FILE` does before a job and after it; loads what is heavy only then."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from popdist.records.private_files import is_being_written
from popdist.timeline.asked import PROFILE_SUFFIX, SUFFIX, folder_beside
from poprun.cli.log import Log
from poprun.errors import PopRunError, UsageError


def make_room(trace: str) -> None:
    """Make the folder for recordings, or take those of an earlier job out of it.

    Raises:
        UsageError: that is impossible, or another job records into it.
    """
    folder = folder_beside(trace)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = list(folder.glob(f"*{SUFFIX}"))
        if any(is_being_written(each) for each in files):
            raise UsageError(f"--timeline {trace}: another job records into {folder}; name another file")
        for old in files:
            old.unlink()
        for profile in folder.glob(f"*{PROFILE_SUFFIX}"):
            shutil.rmtree(profile)
    except OSError as error:
        raise UsageError(
            f"--timeline {trace}: recordings go to {folder}, which cannot be made: {error.strerror}; name another file"
        ) from None


def write_timeline(trace: str, log: Log) -> None:
    """Merge what was recorded; where that fails the job has still ended as it has."""
    from poprun.trace.merging import merge

    folder = folder_beside(trace)
    try:
        job, counts = merge(folder, Path(trace))
    except PopRunError as error:
        log.warn(f"there is no timeline: {error}")
        return
    except OSError as error:
        again = f"poprun timeline merge {shlex.quote(str(folder))} -o FILE"
        log.warn(f"the timeline cannot be written to {trace}: {error.strerror}; {again}")
        return
    for warning in job.warnings:
        log.warn(f"timeline: {warning}")
    log.info(
        f"wrote {counts.spans} spans to {trace}; poprun timeline report {shlex.quote(trace)} says what held the job up"
    )
