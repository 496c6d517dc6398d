"""The removal of a broken job from other hosts: Open MPI's daemons, and with them everything that they have started."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Sequence

from poprun.hosts.ssh import remote_words
from poprun.hosts.survey import limit_from
from poprun.ipc.processes import die_with_parent, send, start

SILENT_LIMIT_S = 0.7
"""The limit for a host that was silent just now: the host will probably not answer, and the user waits."""
_ON_HOST = (
    "runs() { grep -qs '^State:[[:space:]]*[^XZ[:space:]]' /proc/$1/status; }; "
    'found=$(pgrep -f "$1") || exit 0; '
    "kill -KILL $found; "
    "for pid in $found; do looks=0; "
    "while runs $pid && [ $((looks += 1)) -le 100 ]; do sleep 0.01; done; "
    'runs $pid || rm -rf "${TMPDIR:-/tmp}/prted.$pid"; '
    "done 2>/dev/null"
)
"""Kills the processes whose command line matches the pattern, and removes the folders of the killed daemons.

A zombie counts as ended: a container without an init does not reap it. Another user's process has not ended. The
program is a single line, because a C shell as login shell cannot read a word of several lines.
"""


def sweep(hosts: Sequence[str], silent: Collection[str], ssh: Sequence[str], job: str, environ: dict[str, str]) -> None:
    """Kill the daemons of one job on all reachable hosts at the same time.

    mpirun kills the daemons itself, unless mpirun was killed or its connection to a daemon is broken. An agent whose
    daemon is gone ends its instance, and removes the daemon's files. If the agent ended earlier, the files are still
    there, so this function removes the daemon's folder.

    Args:
        hosts: The hosts without this machine.
        silent: The hosts to which the connection has broken; they end their instances by themselves.
        ssh: The words of ssh before the host.
        job: Host and process id of the job's mpirun, such as `node0.cluster.example-4711`.
        environ: The environment; POPRUN_CHECK_TIMEOUT_S is the limit for hosts with slow logins.
    """
    pattern = pattern_of(job)
    began_s = time.monotonic()
    running = {}
    for host in hosts:
        limit_s = SILENT_LIMIT_S if host in silent else limit_from(environ)
        pid = start(remote_words(ssh, host, ["sh", "-c", _ON_HOST, "sh", pattern]), environ, _prepare)
        running[pid] = began_s + limit_s
    while any(time.monotonic() < deadline_s for deadline_s in running.values()):
        running = {pid: deadline_s for pid, deadline_s in running.items() if not _has_ended(pid)}
        time.sleep(0.005)
    for pid in running:
        send(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def pattern_of(job: str) -> str:
    """Return the regular expression with which pgrep finds the command lines of a job's daemons, and no others.

    PRRTE (3.0.14) cuts a host name off at the first dot, unless `prte_keep_fqdn_hostnames` is set.
    """
    host, _, pid = job.rpartition("-")
    short, _, domain = host.partition(".")
    full = "".join(f"[.]{each}" for each in domain.split("."))
    # The brackets keep pgrep from finding the shell whose command line contains this pattern.
    return f"[p]rterun-{short}({full})?-{pid}@" if domain else f"[p]rterun-{short}-{pid}@"


def _prepare() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    silence = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(silence, descriptor)
    die_with_parent(signal.SIGKILL)


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True
