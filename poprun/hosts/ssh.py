"""Commands on other hosts: the words of ssh, the ways out of its errors, and commands that run on all hosts at once."""

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

MPI_ARGUMENTS_VARIABLES = ("PRTE_MCA_plm_ssh_args", "OMPI_MCA_plm_ssh_args", "OMPI_MCA_plm_rsh_args")
"""Open MPI's variables for the same options, the newest first. Of those that are set, the first counts."""

SSH_FAILED = 255
"""The exit status of a failed ssh; otherwise ssh ends with the status of the command."""

SRUN = ("srun", "--quiet", "--overlap", "--mpi=none", "--export=ALL", "--nodes=1", "--ntasks=1")
"""The words that replace ssh in a Slurm job, whose nodes may refuse logins.

Without `--export=ALL`, a step after `sbatch --export=NONE` would find no variables, not even PATH.
"""

_BOOTSTRAP = (
    "import hashlib, sys; text = sys.stdin.buffer.read({nbytes}); "
    "hashlib.sha256(text).hexdigest() == '{digest}' or "
    "sys.exit('standard input did not bring the program of poprun: find the command that reads or writes there, "
    "such as a start-up file of the shell'); exec(text)"
)

_CHANGED = "identification has changed"  # ssh's last line does not say this
_START_IT = {
    "could not resolve": "check the spelling in --host, or give the name an address (/etc/hosts, DNS, ~/.ssh/config)",
    "refused": f"start sshd there, or name its port (~/.ssh/config, {ARGUMENTS_VARIABLE})",
    "timed out": "start the host, or let ssh pass through the firewall",
    "no route": "check the network and the host's address",
    "unreachable": "check the network and the host's address",
}
"""The ways out for the errors that a host causes, too, while it starts."""
_WAYS_OUT = {
    _CHANGED: "if {host} was set up anew: `ssh-keygen -R {host}`, then `ssh {host}` once by hand",
    "permission denied": "let `ssh {host} true` work without a password: `ssh-copy-id {host}`, or start an ssh agent",
    "host key": "run `ssh {host}` once by hand and compare its key, or `ssh-keyscan {host} >> ~/.ssh/known_hosts`",
    **_START_IT,
}

Name = TypeVar("Name", bound=Hashable)

_LOOK_S = 0.005


def user_arguments(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the user's options for every ssh, from POPRUN_SSH_ARGS and Open MPI's variable, in this order.

    Open MPI's daemons need them too: poprun's options for their ssh replace those of the variable.

    Raises:
        UsageError: The options cannot be split into words.
    """
    of_mpi = [name for name in MPI_ARGUMENTS_VARIABLES if name in environ][:1]
    return tuple(word for name in (ARGUMENTS_VARIABLE, *of_mpi) for word in _split(name, environ.get(name, "")))


def _split(name: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(
            f"{name} cannot be split into words as in a shell: {error} in {text!r}; check the quotes"
        ) from None


def ssh_words(environ: Mapping[str, str], connect_s: int = 5) -> tuple[str, ...]:
    """Return the words of an ssh that asks no questions and gives up soon; host and command follow them.

    The user's options come first, because ssh uses the first value of an option.
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
    import subprocess  # takes some milliseconds to load, and few launches need it

    try:
        ended = subprocess.run([*ssh, "-G", "--", host], capture_output=True, text=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return host
    lines = (line.partition(" ") for line in ended.stdout.splitlines())
    return next((name for word, _, name in lines if word == "hostname"), host)


def way_out_of(said: str, host: str) -> str:
    """Return the way out for the errors that ssh has printed."""
    return _WAYS_OUT.get(_sign_in(said), "try `ssh {host} true` by hand").format(host=host)


def may_be_starting(said: str) -> bool:
    """Return whether the errors that ssh has printed may have their cause in a host that is still starting."""
    return _sign_in(said) in _START_IT


def _sign_in(said: str) -> str:
    lines = said.lower().splitlines()
    reasons = [_CHANGED] if any(_CHANGED in line for line in lines) else reversed(lines)
    return next((sign for line in reasons for sign in _WAYS_OUT if sign in line), "")


def by_hand(ssh: Sequence[str], host: str, command: str) -> str:
    """Return a command with which a user can test whether a host answers."""
    if ssh[:1] == SRUN[:1]:
        return f"srun --overlap --nodelist={host} --nodes=1 --ntasks=1 {command}"
    return f"ssh {host} {command}"


def last_line(complaint: str) -> str:
    """Return the last line, which holds the reason because warnings come before it, cut off if it is too long."""
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    return cut_off(lines[-1]) if lines else ""


def remote_words(ssh: Sequence[str], host: str, command: Sequence[str]) -> list[str]:
    """Return the words that run a command on a host."""
    if ssh[0] == SRUN[0]:
        return [*ssh, f"--nodelist={host}", "sh", "-c", shlex.join(command)]
    return [*ssh, "--", host, shlex.join(command)]


def program_words(python: str, program: bytes) -> tuple[str, ...]:
    """Return the words that run a program of ours on a host, without any installation there.

    The program is the first part of standard input, and nothing else is run. The words contain the program's length
    and digest, so the host refuses a text that another command has changed.
    """
    import hashlib  # takes some milliseconds to load, and only asking hosts needs it

    code = _BOOTSTRAP.format(nbytes=len(program), digest=hashlib.sha256(program).hexdigest())
    return (python, "-I", "-u", "-c", code)


@dataclass(frozen=True)
class HostCommand:
    """A command to run on this machine; a command for another host begins with ssh.

    Attributes:
        words: The words of the command.
        text: The command's standard input.
        feeder: The words of a command whose output replaces `text`. Empty: no such command.
    """

    words: tuple[str, ...]
    text: str = ""
    feeder: tuple[str, ...] = ()


@dataclass(frozen=True)
class CommandResult:
    """The result of a command that has ended or was killed.

    Attributes:
        status: The exit status of the command or, if only the feeder failed, of the feeder. None: killed at the limit.
        out: The command's standard output.
        err: The standard errors of the command and its feeder.
        seconds: The duration.
    """

    status: int | None
    out: str
    err: str
    seconds: float


@dataclass(frozen=True)
class LateNotice:
    """A notice about commands that take long.

    Attributes:
        after_s: Seconds from the start of the commands to the notice.
        tell: Function that is called with the names of the running commands.
    """

    after_s: float
    tell: Callable[[list[str]], None]


def shell_commands(programs: Mapping[str, str], ssh: Sequence[str]) -> dict[str, HostCommand]:
    """Return the commands that run shell programs on hosts."""
    return {host: HostCommand(tuple(remote_words(ssh, host, ["sh", "-s"])), text) for host, text in programs.items()}


def run_commands(
    commands: Mapping[Name, HostCommand], environ: Mapping[str, str], limit_s: float, notice: LateNotice | None = None
) -> Iterator[tuple[Name, CommandResult]]:
    """Run all commands at the same time, and yield each result when it is known; no command outlives the iteration.

    Args:
        commands: The commands, each under its own name.
        environ: The environment of the commands.
        limit_s: Seconds after which running commands are killed.
        notice: A notice about late commands, given once before the limit.
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
    """The processes of a command and of its feeder, if there is one."""

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
        """Return whether the command and its feeder have ended; a feeder without a reader ends soon."""
        for pid in self._pids:
            if pid not in self._statuses:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self._statuses[pid] = os.waitstatus_to_exitcode(status)
        return len(self._statuses) == len(self._pids)

    def conclude(self, seconds: float) -> CommandResult:
        """Kill the processes that still run, and return the result."""
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
