"""`poprun top`: shows what a running job does."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from poprun.cli.command_line import read_command_line
from poprun.cli.help import describe_section
from poprun.cli.log import show
from poprun.cli.options import Option, OptionKind
from poprun.cli.wording import (
    USUAL_COLUMNS,
    columns_of,
    count,
    cut_off,
    draw_rows,
    duration_text,
    without_controls,
    wrap,
)
from poprun.errors import PopRunError, UsageError
from poprun.monitor.doors import SnapshotSource, call_local, call_remote, doors_in, read_address, token_from
from poprun.monitor.picture import Pages, Screen
from poprun.monitor.snapshot import Snapshot

SECTION = "Top"
OPTIONS = (
    Option("help", OptionKind.FLAG, "print this and stop", SECTION, spellings=("-h",)),
    Option("job", OptionKind.NUMBER, "the process of the poprun that runs the job, where there are several", SECTION),
    Option("address", OptionKind.TEXT, "look at a job on another host, that was started with --top-address", SECTION),
    Option("plain", OptionKind.FLAG, "print one table after another", SECTION),
    Option("once", OptionKind.FLAG, "print one table and leave", SECTION),
    Option("json", OptionKind.FLAG, "print JSON, a line each time", SECTION),
)
_USAGE = "usage: poprun top [--job PID | --address HOST:PORT] [--plain | --json] [--once]"
_WORDS = (
    "Shows what the instances of a running job do, every second, until it ends or Ctrl-C. On the machine of poprun it "
    "finds the jobs of the same user by itself. From another host it needs --address, and the token of the job in "
    "POPDIST_JOB_TOKEN. Where standard output is no terminal it prints plain text."
)
UNAVAILABLE = "tables follow each other; to have one drawn in place, pip install rich"

FIRST_LIMIT_S = 5.0
"""The time in which poprun has to send a first snapshot."""
LIST_LIMIT_S = 2.0
"""The same if several jobs are listed."""
LOOK_S = 1.5
"""The wait for a snapshot, after which the page is drawn again without one."""
_MOST_PROGRAM = 60


@dataclass(frozen=True)
class TopRequest:
    """The user's request.

    Attributes:
        job: the pid of a poprun; None: the only one.
        address: of one on another host, host and port; None: it is on this one.
        plain: whether tables are to follow each other.
        once: whether one is enough.
        json: whether it is to be JSON.
    """

    job: int | None = None
    address: tuple[str, int] | None = None
    plain: bool = False
    once: bool = False
    json: bool = False


def main(words: Sequence[str]) -> int:
    """Run the command with the words after `poprun top`.

    Returns:
        The exit status: 0 at the end of the job, and after Ctrl-C.

    Raises:
        PopRunError: the words are wrong, or there is no job to be seen.
    """
    wanted = read_words(words)
    if wanted is None:
        show(describe(columns_of(os.environ) or USUAL_COLUMNS))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the terminal is given back
    with suppress(KeyboardInterrupt):
        source = _find(wanted, os.environ)
        try:
            _watch(source, wanted)
        finally:
            source.close()
    return 0


def describe(columns: int = USUAL_COLUMNS) -> str:
    """Return the text of `poprun top --help`."""
    return "\n\n".join([_USAGE, wrap(_WORDS, columns), describe_section(SECTION, OPTIONS, columns)])


def read_words(words: Sequence[str]) -> TopRequest | None:
    """Read the user's request; None for help.

    Raises:
        UsageError: nothing that can be.
    """
    line = read_command_line(words, OPTIONS)
    if line.values.get("help"):
        return None
    if line.program:
        raise UsageError(f"poprun top takes options only, not {line.program[0]!r}; a job is named by --job PID")
    job, address = line.values.get("job"), line.values.get("address")
    if job is not None and address is not None:
        raise UsageError("--job and --address both name a job; give one of them")
    flags = {name: bool(line.values.get(name)) for name in ("plain", "once", "json")}
    place = None if address is None else read_address(str(address), "--address")
    return TopRequest(None if job is None else int(str(job)), place, **flags)


# Which job.


def _find(wanted: TopRequest, environ: Mapping[str, str]) -> SnapshotSource:
    if wanted.address is not None:
        return call_remote(*wanted.address, token_from(environ, "--address"))
    jobs = doors_in(Path("/proc/net/unix").read_text(errors="replace"), os.geteuid())
    if wanted.job is not None:
        jobs = [each for each in jobs if each[0] == wanted.job]
    if not jobs:
        which = "no job" if wanted.job is None else f"no poprun with process {wanted.job}"
        raise PopRunError(
            f"{which} of yours runs on {os.uname().nodename}; for one on another host see poprun top --help (--address)"
        )
    pid, name = jobs[0] if len(jobs) == 1 else _ask_which(jobs)
    return call_local(name, f"job {pid}")


def _ask_which(jobs: Sequence[tuple[int, str]]) -> tuple[int, str]:
    listed = draw_rows([("job", "runs for", "instances", "program"), *(_describe(*each) for each in jobs)])
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(f"{count(len(jobs), 'job')} of yours run here; name one with --job:\n{listed}")
    show(f"{listed}\nwhich job? ", 2)
    answer = sys.stdin.readline().strip()
    for each in jobs:
        if answer == str(each[0]):
            return each
    raise UsageError(f"{answer!r} is none of these jobs; name one of the first column")


def _describe(pid: int, name: str) -> tuple[str, str, str, str]:
    try:
        source = call_local(name, f"job {pid}")
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


# What it does.


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
    """Show what comes until the job ends; the last that came."""
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
