"""The command `poprun resize`, which changes the number of active instances of a running job."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from poprun.cli.command_line import Value
from poprun.cli.log import show
from poprun.cli.options import Option, OptionKind
from poprun.cli.subcommand import Subcommand
from poprun.errors import PopRunError, UsageError
from poprun.hosts.hosts import parse_hosts
from poprun.ipc import wire
from poprun.ipc.resizes import MOST_BYTES, RESIZE, RESIZED, ResizeAnswer, ResizeRequest
from poprun.monitor.command import find_job
from poprun.monitor.listener import SnapshotSource

DEFAULT_TIMEOUT_S = 120
_of_resize = partial(Option, section="Resize")
RESIZING = Subcommand(
    "usage: poprun resize JOB [N] [--leave-host HOST] [--use-host HOST] [--timeout SECONDS]",
    "Changes the number of active instances of a running job to N, between two steps, without a change of the results. "
    "JOB is the pid of its poprun, as `poprun top` names it. Active instances that are not needed become spares, and "
    "spares become active. The command waits for the change. Without N, --leave-host lets other instances take over "
    "from those on the host. The job must run on this machine, be yours, and have been started with --spares.",
    (
        _of_resize("help", OptionKind.FLAG, "print this and stop", spellings=("-h",)),
        _of_resize("leave-host", OptionKind.HOSTS, "let no instance be active on this host any more"),
        _of_resize("use-host", OptionKind.HOSTS, "let instances be active again on a host that was left"),
        _of_resize(
            "timeout",
            OptionKind.SECONDS,
            "how long to wait for the change; the job changes later nevertheless",
            default=str(DEFAULT_TIMEOUT_S),
        ),
    ),
)


@dataclass(frozen=True)
class ResizeWords:
    """The user's request, and the job.

    Attributes:
        job: The pid of the poprun that runs the job.
        request: The request.
        timeout_s: The limit of the wait for the change.
    """

    job: int
    request: ResizeRequest
    timeout_s: float = DEFAULT_TIMEOUT_S


def main(words: Sequence[str]) -> int:
    """Run the command with the words after `poprun resize`.

    Returns:
        The exit status: 0 after the change.

    Raises:
        PopRunError: If the words are wrong, or if the job cannot be changed.
    """
    wanted = read_words(words)
    source = find_job(wanted.job, "poprun resize JOB N")
    try:
        answer = _ask(source, wanted)
    finally:
        source.close()
    if not answer.is_done:
        raise PopRunError(f"job {wanted.job}: {answer.text}")
    show(answer.text)
    return 0


def read_words(words: Sequence[str]) -> ResizeWords:
    """Read the user's request.

    Raises:
        UsageError: If the words are no valid request.
    """
    values, named = RESIZING.read(words)
    leave, use = (_hosts(values, name) for name in ("leave-host", "use-host"))
    if len(named) not in (1, 2) or (len(named) == 1 and not (leave or use)):
        raise UsageError(f"poprun resize needs a job and the number of active instances; {RESIZING.usage}")
    job, count = (_number(word) for word in (named[0], named[1] if len(named) == 2 else "0"))
    if job is None or job < 1:
        raise UsageError(
            f"the job is {named[0]!r}; name it by the pid of its poprun, as poprun top does; {RESIZING.usage}"
        )
    if count is None or (len(named) == 2 and count < 1):
        raise UsageError(f"the number of active instances is {named[1]!r}; give a whole number, 1 or more")
    request = ResizeRequest(count, leave, use)
    if len(request.pack()) > MOST_BYTES:
        raise UsageError("too many hosts are named; name them in several calls")
    return ResizeWords(job, request, float(str(values.get("timeout", DEFAULT_TIMEOUT_S))))


def _number(word: str) -> int | None:
    return int(word) if word.isascii() and word.isdecimal() and len(word) < 10 else None


def _hosts(values: dict[str, Value], name: str) -> tuple[str, ...]:
    given = values.get(name, ())
    return tuple(host.name for host in parse_hosts(given)) if isinstance(given, tuple) else ()


def _ask(source: SnapshotSource, wanted: ResizeWords) -> ResizeAnswer:
    """Send the request and wait for the answer.

    Raises:
        PopRunError: If the job ends before, does not change in time, or cannot understand the request.
    """
    where = f"job {wanted.job}"
    until_s = time.monotonic() + wanted.timeout_s
    has_answered = False
    with suppress(OSError):  # then the job has ended, which the wait for the answer notices
        source.send(wire.pack(RESIZE, wanted.request.pack()))
    try:
        while (message := source.next_message(max(until_s - time.monotonic(), 0.0))) is not None:
            has_answered = True
            if message[0] == RESIZED:
                return ResizeAnswer.unpack(message[1])
    except ValueError as error:
        raise PopRunError(f"{where}: {error}; use the version of poprun that runs the job") from None
    except TimeoutError:
        raise PopRunError(
            f"{where} has not changed within {wanted.timeout_s:g} s (--timeout); it changes after its next step, "
            "if its program trains with strategies.Trainer under PopDistStrategy; poprun top shows the state of the job"
        ) from None
    if has_answered:
        raise PopRunError(f"{where} has ended, or its version of poprun cannot resize; use the version that runs it")
    raise PopRunError(f"{where} has ended")
