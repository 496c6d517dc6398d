"""Commands on other hosts: the words for ssh, the ways out of its complaints, and one command for each host at once."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from poprun.cli.wording import cut_off
from poprun.errors import UsageError
from poprun.ipc.processes import die_with_parent, send, start

ARGUMENTS_VARIABLE = "POPRUN_SSH_ARGS"
"""Options for every ssh that poprun starts, split as a shell does, such as `-F my_ssh_config -p 2222`."""

SSH_FAILED = 255
"""The exit status of ssh itself if it fails; otherwise ssh ends with the status of the command."""

SRUN = ("srun", "--quiet", "--overlap", "--mpi=none", "--export=ALL", "--nodes=1", "--ntasks=1")
"""The words that take the place of ssh in a job of Slurm, whose nodes need not let anybody log in.

After `sbatch --export=NONE` steps would find no variables at all, not even PATH.
"""

_BOOTSTRAP = (
    "import hashlib, sys; text = sys.stdin.buffer.read({nbytes}); "
    "hashlib.sha256(text).hexdigest() == '{digest}' or "
    "sys.exit('what came through standard input is not the program of poprun: look for what reads or writes there, "
    "such as a start-up file of the shell'); exec(text)"
)

_CHANGED = "identification has changed"  # long before the last line, which is that of a key that is not known
_WAYS_OUT = {
    _CHANGED: "if {host} was set up anew: `ssh-keygen -R {host}`, then `ssh {host}` once by hand",
    "could not resolve": "check the spelling in --host, or give the name an address (/etc/hosts, DNS, ~/.ssh/config)",
    "permission denied": "let `ssh {host} true` work without a password: `ssh-copy-id {host}`, or start an ssh agent",
    "host key": "run `ssh {host}` once by hand and compare its key, or `ssh-keyscan {host} >> ~/.ssh/known_hosts`",
    "refused": f"start sshd there, or name its port (~/.ssh/config, {ARGUMENTS_VARIABLE})",
    "timed out": "start the host, or let ssh pass through the firewall",
    "no route": "check the network and the host's address",
    "unreachable": "check the network and the host's address",
}

Name = TypeVar("Name", bound=Hashable)

_LOOK_S = 0.005


def user_arguments(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the user's options for every ssh, from POPRUN_SSH_ARGS; Open MPI's daemons need them too.

    Raises:
        UsageError: they cannot be split.
    """
    text = environ.get(ARGUMENTS_VARIABLE, "")
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(
            f"{ARGUMENTS_VARIABLE} cannot be split like a shell does: {error} in {text!r}; check the quotes"
        ) from None


def ssh_words(environ: Mapping[str, str], connect_s: int = 5) -> tuple[str, ...]:
    """Return the words of an ssh that asks nothing and gives up soon; the host and the command come after them.

    The user's own arguments come first, because the first value that ssh sees for an option holds.
    """
    return (
        "ssh",
        *user_arguments(environ),
        "-x",
        "-T",
        *("-o", "BatchMode=yes"),
        *("-o", f"ConnectTimeout={connect_s}"),
        *("-o", "ClearAllForwardings=yes"),
        *("-o", "LogLevel=ERROR"),
    )


def name_behind(host: str, ssh: Sequence[str], limit_s: float = 1.0) -> str:
    """Return the host name in ssh's configuration; the host itself if ssh has no other name."""
    import subprocess  # seldom needed

    try:
        ended = subprocess.run([*ssh, "-G", "--", host], capture_output=True, text=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return host
    lines = (line.partition(" ") for line in ended.stdout.splitlines())
    return next((name for word, _, name in lines if word == "hostname"), host)


def way_out_of(said: str, host: str) -> str:
    """Return the way out of ssh's complaints on its standard error."""
    lines = said.lower().splitlines()
    reasons = [_CHANGED] if any(_CHANGED in line for line in lines) else reversed(lines)
    found = (advice for line in reasons for sign, advice in _WAYS_OUT.items() if sign in line)
    return next(found, "try `ssh {host} true` by hand").format(host=host)


def by_hand(ssh: Sequence[str], host: str, command: str) -> str:
    """Return a command with which a user can try whether a host answers."""
    if ssh[:1] == SRUN[:1]:
        return f"srun --overlap --nodelist={host} --nodes=1 --ntasks=1 {command}"
    return f"ssh {host} {command}"


def last_line(complaint: str) -> str:
    """Return the line that says why, cut off where it is endless; warnings come before it."""
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    return cut_off(lines[-1]) if lines else ""


def remote_words(ssh: Sequence[str], host: str, command: Sequence[str]) -> list[str]:
    """Return the words that run a command on a host."""
    if ssh[0] == SRUN[0]:
        return [*ssh, f"--nodelist={host}", "sh", "-c", shlex.join(command)]
    return [*ssh, "--", host, shlex.join(command)]


def program_words(python: str, program: bytes) -> tuple[str, ...]:
    """Return the words that run a program of ours on a host, where nothing of ours is installed.

    The program is the first part of standard input, and nothing else is run.

    The words have its length and digest, so text that somebody else has put there, or taken away, is refused.
    """
    import hashlib  # costs some milliseconds, needed only where hosts are asked

    code = _BOOTSTRAP.format(nbytes=len(program), digest=hashlib.sha256(program).hexdigest())
    return (python, "-I", "-u", "-c", code)


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
