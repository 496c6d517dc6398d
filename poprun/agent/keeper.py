"""The keeper: the process above an agent. If keeper or agent is killed, the other ends what is left of the instance."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

from poprun.agent.guard_machine import CUT_SIGNAL, PASSED_ON, STOPPING
from poprun.ipc import wire
from poprun.ipc.processes import adopt_orphans, die_with_parent, end_descendants, heeded, reap, send

TYPE_CHECKING = False  # replaces `typing.TYPE_CHECKING`: `typing` takes too long to load
if TYPE_CHECKING:
    from typing import NoReturn

_HANDED_ON = frozenset((*STOPPING, *PASSED_ON))


def put_keeper_above(at_the_end: Callable[[bool], None]) -> set[int | signal.Signals]:
    """Fork the calling process: the child goes on as the agent, and the calling process becomes the keeper.

    Open MPI's daemon knows the keeper only, so signals, SIGKILL too, reach the agent only through the keeper. All
    processes of an instance descend from both. If the keeper is gone, the kernel tells the agent by CUT_SIGNAL, and the
    agent ends the processes. If the agent is gone, the keeper ends them. Each has a process group of its own, so that a
    signal to one group does not reach the other.

    Args:
        at_the_end: Function that the keeper calls when no process of the instance is left. Its argument is whether the
            agent ended by itself while the keeper's parent was still there.

    Returns:
        In the agent: the signals to block again once the agent can take all signals.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*heeded(_HANDED_ON), CUT_SIGNAL, signal.SIGCHLD))
    die_with_parent(wire.ORPHANED)
    adopt_orphans()
    keeper = os.getpid()
    agent = os.fork()
    if agent:
        code, is_orphaned = _keep(agent)
        if code:
            end_descendants()
        with contextlib.suppress(Exception):  # a failure to tidy up must not fail the job
            at_the_end(code == 0 and not is_orphaned)
        _end_as(code)
    os.setpgid(0, 0)
    die_with_parent(CUT_SIGNAL)
    if os.getppid() != keeper:
        os._exit(127)
    return before


def _keep(agent: int) -> tuple[int, bool]:
    """Pass signals on until the agent ends; return its exit status (-n after signal n) and whether our parent ended."""
    is_orphaned = False
    while True:
        number = signal.sigwaitinfo((*heeded(_HANDED_ON), signal.SIGCHLD)).si_signo
        if number == signal.SIGCHLD:
            if (status := reap().get(agent)) is not None:
                return os.waitstatus_to_exitcode(status), is_orphaned
            continue
        is_orphaned = is_orphaned or number == wire.ORPHANED
        send(agent, number)
        if number in STOPPING:
            send(agent, signal.SIGCONT)  # otherwise a stopped agent would not receive the signal


def _end_as(code: int) -> NoReturn:
    """End this process as the agent has ended."""
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL cannot be reset, and need not be
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (-code,))
        send(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)
