"""Ends what a broken job may have left on other hosts: Open MPI's daemons, and with them all that they have started."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Sequence

from poprun.processes import die_with_parent, send, start
from poprun.ssh import remote_words

LIMIT_S = 2.0
SILENT_LIMIT_S = 0.7
"""For a host that was silent just now: whoever waits for poprun would wait for nothing, most of the time."""


def sweep(hosts: Sequence[str], silent: Collection[str], ssh: Sequence[str], job: str, environ: dict[str, str]) -> None:
    """Kill the daemons of one job on all hosts that can be reached, all at the same time.

    mpirun does it itself, unless it was killed or its connection to a daemon is gone. A shim whose daemon is gone ends
    its instance.

    Args:
        hosts: without this machine.
        silent: those to which the connection has broken; they end what they have by themselves.
        ssh: the words of ssh before the host.
        job: what the command lines of the daemons contain, such as `prterun-node0-4711@`.
        environ: the environment.
    """
    # The brackets keep pkill from finding the shell that has this very pattern in its command line.
    pattern = f"[{job[0]}]{job[1:]}"
    began_s = time.monotonic()
    running = {}
    for host in hosts:
        limit_s = SILENT_LIMIT_S if host in silent else LIMIT_S
        pid = start(remote_words(ssh, host, ["pkill", "-KILL", "-f", pattern]), environ, _prepare)
        running[pid] = began_s + limit_s
    while any(time.monotonic() < deadline_s for deadline_s in running.values()):
        running = {pid: deadline_s for pid, deadline_s in running.items() if not _has_ended(pid)}
        time.sleep(0.005)
    for pid in running:
        send(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _prepare() -> None:
    silence = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(silence, descriptor)
    die_with_parent(signal.SIGKILL)


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True
