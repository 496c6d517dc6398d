"""The command `poprun timeline`, which writes a trace or a report, and the work of `poprun --timeline` around a job."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from popdist.records.private_files import is_being_written
from popdist.timeline.asked import PROFILE_SUFFIX, SUFFIX, folder_beside
from poprun.cli.log import Log, show
from poprun.cli.options import Option, OptionKind
from poprun.cli.subcommand import Subcommand
from poprun.cli.wording import columns_of, count
from poprun.errors import PopRunError, UsageError

MERGE, REPORT = "merge", "report"
_DAMAGED = (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, MemoryError, RecursionError)
_of_timeline = partial(Option, section="Timeline")
TIMELINE = Subcommand(
    "usage: poprun timeline merge FOLDER -o FILE\n       poprun timeline report FOLDER [--html FILE]",
    "FOLDER has the recordings of the instances: FILE.parts of poprun --timeline FILE (FILE itself may be named "
    "instead), or the folder in POPDIST_TIMELINE. merge writes one trace of all instances, also while the job runs. "
    "https://ui.perfetto.dev and chrome://tracing show it. report shows where the time went and what held the job up.",
    (
        _of_timeline("help", OptionKind.FLAG, "print this and stop", spellings=("-h",)),
        _of_timeline("output", OptionKind.PATH, "the trace; compressed if its name ends in .gz", spellings=("-o",)),
        _of_timeline("html", OptionKind.PATH, "write the report to this file too, with pictures"),
    ),
)


@dataclass(frozen=True)
class TimelineRequest:
    """The user's request.

    Attributes:
        verb: MERGE or REPORT.
        folder: The folder of the recordings.
        to: The file to write; None to write none.
    """

    verb: str
    folder: Path
    to: Path | None = None


def main(words: Sequence[str]) -> int:
    """Run the command with the words after `poprun timeline`.

    Returns:
        The exit status.

    Raises:
        PopRunError: If the words are wrong, or if there is nothing to show.
    """
    wanted = read_words(words)
    try:
        return _merge(wanted) if wanted.verb == MERGE else _report(wanted, columns_of(os.environ))
    except _DAMAGED as error:
        raise PopRunError(
            f"the recordings in {wanted.folder} contradict each other ({error!r:.80}); remove the damaged ones"
        ) from None
    except OSError as error:
        raise PopRunError(f"{wanted.to} cannot be written: {error.strerror}; name another file") from None


def read_words(words: Sequence[str]) -> TimelineRequest:
    """Read the user's request.

    Raises:
        UsageError: If the words are no valid request.
    """
    values, named = TIMELINE.read(words or ["--help"])
    verb = named[0] if named else ""
    if verb not in (MERGE, REPORT):
        raise UsageError(f"poprun timeline cannot {verb!r}; use {MERGE} or {REPORT}")
    to = values.pop("output" if verb == MERGE else "html", None)
    for option in values:
        raise UsageError(f"poprun timeline {verb} has no option --{option}")
    if len(named) != 2:
        usage = TIMELINE.usage.splitlines()[0]
        raise UsageError(f"poprun timeline {verb} needs one folder, {len(named) - 1} are named; {usage}")
    if verb == MERGE and to is None:
        raise UsageError("poprun timeline merge needs a file to write; name it with -o FILE")
    return TimelineRequest(verb, folder_of(named[1]), None if to is None else Path(str(to)))


def folder_of(named: str) -> Path:
    """Return the folder of recordings: the named folder itself, or the folder beside a named trace."""
    return Path(named) if Path(named).is_dir() or not folder_beside(named).is_dir() else folder_beside(named)


def _merge(wanted: TimelineRequest) -> int:
    from poprun.trace.merging import merge

    assert wanted.to is not None
    job, counts = merge(wanted.folder, wanted.to)
    for warning in job.warnings:
        show(f"warning: {warning}", 2)
    drawn = f"{count(counts.spans, 'span')}, {count(counts.flows, 'arrow')} and {count(counts.counters, 'value')}"
    show(f"wrote {drawn} to {wanted.to}")
    return 0


def _report(wanted: TimelineRequest, columns: int | None) -> int:
    from poprun.trace.merging import to_be_judged
    from poprun.trace.recordings import read_recordings
    from poprun.trace.report.page import report_page
    from poprun.trace.report.text import report_text
    from poprun.trace.report.verdict import judge

    job = to_be_judged(read_recordings(wanted.folder))
    try:
        verdict = judge(job)
    except ValueError as error:
        raise PopRunError(f"there is nothing to report: {error}") from None
    show(report_text(job, verdict, columns))
    if wanted.to is not None:
        wanted.to.write_text(report_page(job, verdict), encoding="utf-8")
    return 0


def make_room(trace: str) -> None:
    """Make the folder for recordings, or remove the recordings of an earlier job from it.

    Raises:
        UsageError: If that is impossible, or if another job records into the folder.
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
    """Merge the recordings of a job that has ended; if that fails, only log a warning."""
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
        f"wrote {counts.spans} spans to {trace}; poprun timeline report {shlex.quote(trace)} shows what held the job up"
    )
