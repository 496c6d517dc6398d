"""Runs one command for each of several hosts, all at the same time, within a limit."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from poprun.hosts.ssh import remote_words
from poprun.ipc.processes import die_with_parent, send, start

Name = TypeVar("Name", bound=Hashable)

_LOOK_S = 0.005


@dataclass(frozen=True)
class HostCommand:
    """A command that runs here; for another host it is an ssh.

    Attributes:
        words: of the command.
        text: its standard input.
        feeder: the words of a command whose output is its standard input instead.
    """

    words: tuple[str, ...]
    text: str = ""
    feeder: tuple[str, ...] = ()


@dataclass(frozen=True)
class CommandResult:
    """The result of a command.

    Attributes:
        status: its exit status, or that of the feeder if only this one failed; None: it was killed after the limit.
        out: its standard output.
        err: the standard errors of the command and of its feeder.
        seconds: how long it took.
    """

    status: int | None
    out: str
    err: str
    seconds: float


@dataclass(frozen=True)
class LateNotice:
    """A notice about commands that take long.

    Attributes:
        after_s: from the start.
        tell: gets the names of those that still run.
    """

    after_s: float
    tell: Callable[[list[str]], None]


def shell_commands(programs: Mapping[str, str], ssh: Sequence[str]) -> dict[str, HostCommand]:
    """Return the commands with which hosts run shell programs."""
    return {host: HostCommand(tuple(remote_words(ssh, host, ["sh", "-s"])), text) for host, text in programs.items()}


def run_commands(
    commands: Mapping[Name, HostCommand], environ: Mapping[str, str], limit_s: float, notice: LateNotice | None = None
) -> Iterator[tuple[Name, CommandResult]]:
    """Run them all and yield each when it has ended; none of them outlives the iteration.

    Args:
        commands: each under a name of its own.
        environ: their environment.
        limit_s: after which those that still run are killed.
        notice: what is done before that about those that are late.
    """
    began_s = time.monotonic()
    running: dict[Name, _Running] = {}
    try:
        for name, command in commands.items():
            running[name] = _Running(command, dict(environ))
        while running:
            is_over = time.monotonic() - began_s > limit_s
            for name in [name for name, each in running.items() if is_over or each.has_ended()]:
                yield name, running.pop(name).conclude(time.monotonic() - began_s)
            if notice is not None and running and time.monotonic() - began_s > notice.after_s:
                notice.tell([str(name) for name in running])
                notice = None
            time.sleep(_LOOK_S if running else 0)
    finally:
        for each in running.values():
            each.conclude(0)


class _Running:
    """The processes of one command: its own, and the feeder if there is one."""

    def __init__(self, command: HostCommand, environ: dict[str, str]) -> None:
        self._out, self._err, self._statuses = os.memfd_create("out"), os.memfd_create("err"), dict[int, int]()
        reading, writing = os.pipe() if command.feeder else (os.memfd_create("in"), -1)
        if writing < 0:
            os.write(reading, command.text.encode(errors="surrogateescape"))
            os.lseek(reading, 0, os.SEEK_SET)
        self._pids = [self._start(command.words, environ, reading, self._out)]
        if writing >= 0:
            self._pids.append(self._start(command.feeder, environ, os.open(os.devnull, os.O_RDONLY), writing))
            os.close(writing)

    def _start(self, words: tuple[str, ...], environ: dict[str, str], source: int, target: int) -> int:
        def prepare() -> None:
            os.setsid()
            for descriptor, standard in ((source, 0), (target, 1), (self._err, 2)):
                os.dup2(descriptor, standard)
            die_with_parent(signal.SIGKILL)

        pid = start(list(words), environ, prepare)
        os.close(source)
        return pid

    def has_ended(self) -> bool:
        """Return whether the command has; the feeder of one that has ended cannot go on for long, nobody reads it."""
        for pid in self._pids:
            if pid not in self._statuses:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self._statuses[pid] = os.waitstatus_to_exitcode(status)
        return len(self._statuses) == len(self._pids)

    def conclude(self, seconds: float) -> CommandResult:
        """Return the result; processes that still run are killed first."""
        is_complete = self.has_ended()
        for pid in self._pids:
            if pid not in self._statuses:
                send(-pid, signal.SIGKILL)
                send(pid, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(pid, 0)
        failed = [self._statuses[pid] for pid in self._pids if self._statuses.get(pid)]
        status = next(iter(failed), 0) if is_complete else None
        return CommandResult(status, _take(self._out), _take(self._err), seconds)


def _take(descriptor: int) -> str:
    with open(descriptor, "rb") as file:
        file.seek(0)
        return file.read().decode(errors="replace")
