"""The command `poprun top`, which shows the state of a running job."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

from poprun.cli.log import show
from poprun.cli.options import Option, OptionKind
from poprun.cli.subcommand import Subcommand
from poprun.cli.wording import (
    columns_of,
    count,
    cut_off,
    draw_rows,
    duration_text,
    without_controls,
)
from poprun.errors import PopRunError, UsageError
from poprun.monitor.listener import SnapshotSource, connect_to_job, find_jobs, own_folder
from poprun.monitor.picture import Pages, Screen
from poprun.monitor.snapshot import Snapshot

_of_top = partial(Option, section="Top")
TOP = Subcommand(
    "usage: poprun top [--job PID] [--plain | --json] [--once]",
    "Shows once a second what the instances of a running job do, until the job ends or you press Ctrl-C. It finds the "
    "jobs of your user on this machine by itself. For a job on another host, run `ssh HOST poprun top`. If standard "
    "output is no terminal, it prints plain text.",
    (
        _of_top("help", OptionKind.FLAG, "print this and stop", spellings=("-h",)),
        _of_top("job", OptionKind.NUMBER, "the pid of the poprun that runs the job, if several jobs run"),
        _of_top("plain", OptionKind.FLAG, "print one table after another"),
        _of_top("once", OptionKind.FLAG, "print one table and leave"),
        _of_top("json", OptionKind.FLAG, "print JSON, one line for each snapshot"),
    ),
)
UNAVAILABLE = "printing one table after another; for a table that is drawn in place, pip install rich"

FIRST_LIMIT_S = 5.0
"""The time limit for poprun to send a first snapshot."""
LIST_LIMIT_S = 2.0
"""The same limit if several jobs are listed."""
LOOK_S = 1.5
"""The wait for a snapshot before the page is drawn again without a new one."""
_MOST_PROGRAM = 60


@dataclass(frozen=True)
class TopRequest:
    """The user's request.

    Attributes:
        job: The pid of a poprun; None for the only one.
        plain: Whether to print one table after another.
        once: Whether to print one table only.
        json: Whether to print JSON.
    """

    job: int | None = None
    plain: bool = False
    once: bool = False
    json: bool = False


def main(words: Sequence[str]) -> int:
    """Run the command with the words after `poprun top`.

    Returns:
        The exit status: 0 at the end of the job, and after Ctrl-C.

    Raises:
        PopRunError: If the words are wrong, or if there is no job to show.
    """
    wanted = read_words(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the terminal is given back
    with suppress(KeyboardInterrupt):
        source = find_job(wanted.job, "poprun top")
        try:
            _watch(source, wanted)
        finally:
            source.close()
    return 0


def read_words(words: Sequence[str]) -> TopRequest:
    """Read the user's request.

    Raises:
        UsageError: If the words are no valid request.
    """
    values, others = TOP.read(words)
    if others:
        raise UsageError(f"poprun top takes options only, not {others[0]!r}; a job is named by --job PID")
    job = values.get("job")
    flags = {name: bool(values.get(name)) for name in ("plain", "once", "json")}
    return TopRequest(None if job is None else int(str(job)), **flags)


# The choice of the job.


def find_job(job: int | None, command: str) -> SnapshotSource:
    """Connect to a job of this user on this machine.

    Args:
        job: The pid of its poprun; None for the only job, or for one that the user chooses.
        command: The command to run on the host of the job, if the job is not here.

    Raises:
        PopRunError: There is no such job.
    """
    folder = own_folder()
    jobs = [pid for pid in find_jobs(folder) if job in (None, pid)]
    if not jobs:
        which = "no job" if job is None else f"no poprun with process {job}"
        host = os.uname().nodename
        raise PopRunError(f"{which} of yours runs on {host}; for one on another host: ssh HOST {command}")
    return connect_to_job(folder, jobs[0] if len(jobs) == 1 else choose_job(folder, jobs))


def choose_job(folder: str, jobs: Sequence[int]) -> int:
    """List several jobs on standard error, and ask the user for one of them.

    Raises:
        UsageError: No terminal is there to ask, or the answer is not one of the jobs.
    """
    show(draw_rows([("job", "runs for", "instances", "program"), *(_describe(folder, pid) for pid in jobs)]), 2)
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(f"{count(len(jobs), 'job')} of yours run here, as listed above; name one with --job PID")
    show("which job? ", 2)
    answer = sys.stdin.readline().strip()
    for pid in jobs:
        if answer == str(pid):
            return pid
    raise UsageError(f"{answer!r} is not one of these jobs; type a number of the first column")


def _describe(folder: str, pid: int) -> tuple[str, str, str, str]:
    try:
        source = connect_to_job(folder, pid)
        try:
            snapshot = source.next(LIST_LIMIT_S)
        finally:
            source.close()
    except (PopRunError, TimeoutError):
        snapshot = None
    if snapshot is None:
        return str(pid), "-", "-", "it does not answer"
    program = cut_off(without_controls(" ".join(snapshot.program)), _MOST_PROGRAM)
    return str(pid), duration_text(snapshot.age_s), str(len(snapshot.instances)), program


# The display.


def _watch(source: SnapshotSource, wanted: TopRequest) -> None:
    try:
        snapshot = source.next(FIRST_LIMIT_S)
    except TimeoutError as error:
        raise PopRunError(f"{error}: poprun may have been stopped; try again, or look at its terminal") from None
    if snapshot is None:
        raise PopRunError("the job has just ended")
    screen = _screen(wanted)
    if wanted.once:
        screen.show(snapshot, 0.0)
        return
    last = _follow(source, snapshot, screen)
    if not wanted.json:
        show(f"the job has ended; it ran for {duration_text(last.age_s)} or a little more")


def _follow(source: SnapshotSource, snapshot: Snapshot, screen: Screen) -> Snapshot:
    """Show all snapshots until the job ends; return the last one."""
    came_s, silent_s = time.monotonic(), 0.0
    try:
        while True:
            screen.show(snapshot, silent_s)
            try:
                following = source.next(LOOK_S)
            except TimeoutError:
                silent_s = time.monotonic() - came_s
                continue
            if following is None:
                return snapshot
            snapshot, came_s, silent_s = following, time.monotonic(), 0.0
    finally:
        screen.close()


def _screen(wanted: TopRequest) -> Screen:
    is_terminal = os.isatty(1) and os.environ.get("TERM", "dumb") != "dumb"
    if wanted.plain or wanted.json or wanted.once or not is_terminal:
        return Pages(wanted.json, wanted.once, columns_of(os.environ))
    if find_spec("rich") is None:
        show(UNAVAILABLE, 2)
        return Pages(is_json=False, is_one=False, columns=columns_of(os.environ))
    from poprun.monitor.rich_screen import RichScreen

    return RichScreen()
