"""Asks hosts what they are before anything is launched: all at once, by one ssh each, within a limit."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from poprun.cli.log import Log, level_from
from poprun.hosts.errands import Ended, Errand, Notice, run_errands
from poprun.hosts.host_checks import COPY_IT
from poprun.hosts.host_facts import Fault, HostFacts, Question, facts_from
from poprun.hosts.own_text import words_for
from poprun.hosts.ssh import SSH_FAILED, by_hand, last_line, remote_words, way_out_of
from poprun.hosts.survey_script import CONNECTIONS, MARK
from poprun.hosts.this_machine import is_this_machine

LIMIT_S = 20.0
"""A busy host may take long for a login; ssh gives up earlier by itself where nobody is there at all."""

LATE_S = 2.5
"""After this the user learns who has not answered yet."""

LIMIT_VARIABLE = "POPRUN_CHECK_TIMEOUT_S"
"""Overrides the limit, for machines that are so busy that a login takes longer."""

_SCRIPT = Path(__file__).with_name("survey_script.py")
_MISSING_COMMAND = (126, 127)  # what a shell ends with that cannot start a command


def survey(
    hosts: Sequence[str], question: Question, ssh: Sequence[str], limit_s: float = LIMIT_S
) -> dict[str, HostFacts | Fault]:
    """Ask every host, all at the same time.

    Args:
        hosts: as the user wrote them; this machine is asked without ssh.
        question: what they are asked.
        ssh: the words of the ssh command up to the host, as `poprun.hosts.ssh.ssh_words` makes them.
        limit_s: how long to wait; what is not ready then is killed and becomes a fault.

    Returns:
        For each host, in order, its facts or why there are none.
    """
    script = _program(question, limit_s)
    errands = {host: Errand(_words(host, question, script, ssh), script) for host in hosts}
    # Who is asked without sshd must not find the connection by which the user has come to this machine.
    environ = {name: value for name, value in os.environ.items() if name not in CONNECTIONS}
    notice = Notice(min(LATE_S, limit_s), lambda late: _say_who_is_late(late, limit_s))
    ended = dict(run_errands(errands, environ, limit_s, notice))
    return {host: _conclude(host, ended[host], question, limit_s, ssh) for host in errands}


def _say_who_is_late(hosts: Sequence[str], limit_s: float) -> None:
    Log(level_from(0, os.environ)).warn(
        f"no answer from {', '.join(hosts)} after {LATE_S:g} s (a busy host, a slow network or name server); "
        f"waiting for {limit_s:g} s at most ({LIMIT_VARIABLE})"
    )


def limit_from(environ: Mapping[str, str], variable: str = LIMIT_VARIABLE, default_s: float = LIMIT_S) -> float:
    """A limit in seconds: that of a survey, or another one that has a variable; a positive number there holds."""
    with suppress(ValueError):
        if 0 < (limit_s := float(environ.get(variable, ""))) < math.inf:
            return limit_s
    return default_s


def _program(question: Question, limit_s: float) -> str:
    asked = json.dumps(question.as_json())
    return f"{_SCRIPT.read_text()}\n\nreply({asked!r}, {math.ceil(limit_s) + 1})\n"


def _words(host: str, question: Question, script: str, ssh: Sequence[str]) -> tuple[str, ...]:
    command = words_for(question.python, script.encode(errors="surrogateescape"))
    return tuple(command if is_this_machine(host) else remote_words(ssh, host, command))


def _conclude(host: str, ended: Ended, question: Question, limit_s: float, ssh: Sequence[str]) -> HostFacts | Fault:
    for line in ended.out.splitlines():
        if line.startswith(MARK):
            with suppress(ValueError):
                return facts_from(host, json.loads(line.removeprefix(MARK)))
    return _fault_of(host, ended, question, limit_s, ssh)


def _fault_of(host: str, ended: Ended, question: Question, limit_s: float, ssh: Sequence[str]) -> Fault:
    complaint, is_remote = last_line(ended.err), not is_this_machine(host)
    test = by_hand(ssh, host, "echo ok") if is_remote else "echo ok"
    if ended.status is None:
        fact = f"did not answer within {limit_s:g} s" + (f" ({complaint})" if complaint else "")
        advice = f"see why `{test}` takes so long (name server, network, load), or set {LIMIT_VARIABLE} higher"
        return Fault(host, fact, advice)
    if ended.status in _MISSING_COMMAND:
        fact = f"cannot start the interpreter {question.python}: {complaint or f'exit status {ended.status}'}"
        return Fault(host, fact, f"put the same Python environment at the same path there, {COPY_IT}")
    if is_remote and ended.status == SSH_FAILED:
        fact = complaint or "ssh ended with exit status 255 and said nothing"
        return Fault(host, fact, way_out_of(ended.err, host))
    fact = f"gave no answer, exit status {ended.status}" + (f": {complaint}" if complaint else "")
    return Fault(host, fact, f"check that `{test}` prints ok")
