"""The survey of hosts before a launch: all hosts are asked at once within a limit, and answers are kept for minutes."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from popdist.records.private_files import fault_of, fault_of_file, make_private
from poprun.cli.log import Log, level_from
from poprun.hosts.host_checks import COPY_IT
from poprun.hosts.host_facts import HostFacts, HostFault, HostQuestion, facts_from
from poprun.hosts.ssh import (
    SSH_FAILED,
    CommandResult,
    HostCommand,
    LateNotice,
    by_hand,
    last_line,
    may_be_starting,
    program_words,
    remote_words,
    run_commands,
    way_out_of,
)
from poprun.hosts.survey_script import CONNECTIONS, MARK, digest_sources
from poprun.hosts.this_machine import is_this_machine

LIMIT_S = 20.0
"""The limit for an answer: a login on a busy host may take long. If a host does not exist, ssh gives up earlier."""

LATE_S = 2.5
"""The time after which the user is told which hosts have not answered yet."""

PAUSE_S = 1.0
"""The time after which a host that may still be starting is asked again."""

LIMIT_VARIABLE = "POPRUN_CHECK_TIMEOUT_S"
"""Seconds that hosts may take to answer before a launch, for hosts with slow logins. Default: 20."""

LONGEST_AGE_S = 300.0
"""The age from which answers are no longer used."""

_SCRIPT = Path(__file__).with_name("survey_script.py")
_MISSING_COMMAND = (126, 127)  # exit statuses of a shell that cannot start a command


def survey(
    hosts: Sequence[str], question: HostQuestion, ssh: Sequence[str], limit_s: float = LIMIT_S
) -> dict[str, HostFacts | HostFault]:
    """Ask all hosts at the same time.

    Args:
        hosts: The hosts, as the user wrote them; this machine is asked without ssh.
        question: The question to the hosts.
        ssh: The words of ssh before the host, as `poprun.hosts.ssh.ssh_words` returns them.
        limit_s: Seconds to wait; a host that has not answered by then becomes a fault.

    Returns:
        Each host's facts, or the fault that says why there are none, in the order of the hosts.
    """
    script = _program(question, limit_s)
    commands = {host: HostCommand(_words(host, question, script, ssh), script) for host in hosts}
    # A host that is asked without sshd must not find the connection by which the user logged in to this machine.
    environ = {name: value for name, value in os.environ.items() if name not in CONNECTIONS}
    notice = LateNotice(min(LATE_S, limit_s), lambda late: _say_who_is_late(late, limit_s))
    ended = dict(run_commands(commands, environ, limit_s, notice))
    return {host: _conclude(host, ended[host], question, limit_s, ssh) for host in commands}


def survey_starting(
    hosts: Sequence[str], question: HostQuestion, ssh: Sequence[str], limit_s: float, starting_s: float
) -> dict[str, HostFacts | HostFault]:
    """Ask all hosts as `survey` does, and again those that may still be starting.

    Args:
        hosts: The hosts, as the user wrote them.
        question: The question to the hosts.
        ssh: The words of ssh before the host.
        limit_s: Seconds to wait for one answer.
        starting_s: Seconds after which no host is asked again. 0: each is asked once.
    """
    deadline_s = time.monotonic() + starting_s
    asked = survey(hosts, question, ssh, limit_s)
    is_told = False
    while (late := _starting(asked)) and time.monotonic() < deadline_s:
        if not is_told:
            Log(level_from(0, os.environ)).warn(
                f"waiting until {', '.join(late)} can be reached ({late[next(iter(late))].fact}), "
                f"for {starting_s:g} s at most (--start-timeout-s)"
            )
            is_told = True
        time.sleep(PAUSE_S)
        asked |= survey(list(late), question, ssh, limit_s)
    if is_told:
        tried = f", for {starting_s:g} s (--start-timeout-s)"
        asked |= {host: replace(fault, fact=fault.fact + tried) for host, fault in _starting(asked).items()}
    return asked


def _starting(asked: Mapping[str, HostFacts | HostFault]) -> dict[str, HostFault]:
    """Return the faults that may end by themselves; none if another fault ends the launch anyway."""
    faults = {host: each for host, each in asked.items() if isinstance(each, HostFault)}
    return faults if all(each.may_be_starting for each in faults.values()) else {}


def _say_who_is_late(hosts: Sequence[str], limit_s: float) -> None:
    Log(level_from(0, os.environ)).warn(
        f"no answer from {', '.join(hosts)} after {LATE_S:g} s (a busy host, a slow network or name server); "
        f"waiting for {limit_s:g} s at most ({LIMIT_VARIABLE})"
    )


def limit_from(environ: Mapping[str, str], variable: str = LIMIT_VARIABLE, default_s: float = LIMIT_S) -> float:
    """Return a limit in seconds: the positive number in the variable, else the default."""
    with suppress(ValueError):
        if 0 < (limit_s := float(environ.get(variable, ""))) < math.inf:
            return limit_s
    return default_s


def _program(question: HostQuestion, limit_s: float) -> str:
    asked = json.dumps(question.as_json())
    return f"{_SCRIPT.read_text()}\n\nreply({asked!r}, {math.ceil(limit_s) + 1})\n"


def _words(host: str, question: HostQuestion, script: str, ssh: Sequence[str]) -> tuple[str, ...]:
    command = program_words(question.python, script.encode(errors="surrogateescape"))
    return tuple(command if is_this_machine(host) else remote_words(ssh, host, command))


def _conclude(
    host: str, ended: CommandResult, question: HostQuestion, limit_s: float, ssh: Sequence[str]
) -> HostFacts | HostFault:
    for line in ended.out.splitlines():
        if line.startswith(MARK):
            with suppress(ValueError):
                return facts_from(host, json.loads(line.removeprefix(MARK)))
    return _fault_of(host, ended, question, limit_s, ssh)


def _fault_of(host: str, ended: CommandResult, question: HostQuestion, limit_s: float, ssh: Sequence[str]) -> HostFault:
    complaint, is_remote = last_line(ended.err), not is_this_machine(host)
    test = by_hand(ssh, host, "echo ok") if is_remote else "echo ok"
    if ended.status is None:
        fact = f"did not answer within {limit_s:g} s" + (f" ({complaint})" if complaint else "")
        advice = f"see why `{test}` takes so long (name server, network, load), or set {LIMIT_VARIABLE} higher"
        return HostFault(host, fact, advice, may_be_starting=is_remote)
    if ended.status in _MISSING_COMMAND:
        fact = f"cannot start the interpreter {question.python}: {complaint or f'exit status {ended.status}'}"
        return HostFault(host, fact, f"put the same Python environment at the same path there, {COPY_IT}")
    if is_remote and ended.status == SSH_FAILED:
        fact = complaint or "ssh ended with exit status 255 and said nothing"
        return HostFault(host, fact, way_out_of(ended.err, host), may_be_starting(ended.err))
    fact = f"gave no answer, exit status {ended.status}" + (f": {complaint}" if complaint else "")
    return HostFault(host, fact, f"check that `{test}` prints ok")


class SurveyCache:
    """A folder with a small file for each host. It keeps good answers only; errors in the folder are ignored.

    If other users could have written to the folder or a file in it, it is not used.

    Args:
        folder: The folder, which is made for the first answer.
        question: The question to the hosts; answers to another question are not used.
        ssh: The words of ssh, which decide which machine a name leads to.
        stamp: The state of this machine that answers depend on, as `stamp_of` returns it.
    """

    def __init__(self, folder: Path, question: HostQuestion, ssh: Sequence[str], stamp: str) -> None:
        self._folder = folder
        self._key = json.dumps([question.as_json(), list(ssh), stamp])

    def load(self, host: str) -> HostFacts | None:
        """Return the recent facts of a host; None if none are known, or the file is damaged."""
        with suppress(OSError, ValueError):
            if not fault_of(self._folder.resolve()) and (text := _read_young(self._path(host))):
                return facts_from(host, json.loads(text), is_cached=True)
        return None

    def store(self, facts: HostFacts) -> None:
        """Keep a host's facts, and remove old files."""
        path = self._path(facts.host)
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        with suppress(OSError):
            make_private(self._folder)
            if fault_of(self._folder.resolve()):
                return
            self._forget_old()
            beside.unlink(missing_ok=True)
            with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
                file.write(json.dumps(asdict(facts)))
            beside.replace(path)

    def _path(self, host: str) -> Path:
        digest = hashlib.sha256(f"{host}\0{self._key}".encode()).hexdigest()[:32]
        return self._folder / f"{digest}.json"

    def _forget_old(self) -> None:
        now = time.time()
        for path in self._folder.iterdir():
            with suppress(OSError):
                if now - path.stat().st_mtime > LONGEST_AGE_S:
                    path.unlink()


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder `${XDG_CACHE_HOME:-~/.cache}/popdist-everywhere/hosts`."""
    home = Path(environ.get("HOME") or "~").expanduser()
    return Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "popdist-everywhere" / "hosts"


def stamp_of(question: HostQuestion) -> str:
    """Return a text of everything that answers depend on besides the question, if this machine can see it cheaply.

    Most environments are shared or copied, so a package installed on this machine makes answers of all hosts doubtful.
    The cores are included because this machine is asked too.
    """
    import sysconfig

    folders = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *question.python_path)
    changed = [_changed_ns(folder) for folder in folders]
    boot = Path("/proc/sys/kernel/random/boot_id")
    parts = [os.uname().nodename, _text(boot), changed, sorted(os.sched_getaffinity(0))]
    return json.dumps(
        [*parts, digest_sources(Path(question.project)), _text(Path(__file__).with_name("survey_script.py"))]
    )


def _read_young(path: Path) -> str:
    """Return the text of a recent file that no other user can have written; empty if the file is anything else."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        age_s = time.time() - status.st_mtime
        is_file = stat.S_ISREG(status.st_mode) and not fault_of_file(file.fileno())
        return file.read() if is_file and 0 <= age_s < LONGEST_AGE_S else ""


def _changed_ns(folder: str) -> int:
    with suppress(OSError):
        return os.stat(folder).st_mtime_ns
    return 0


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text()
    return ""
