"""The process above an agent; each of the two ends what is left when the other is killed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

from poprun.agent.guard_machine import CUT_SIGNAL, PASSED_ON, STOPPING
from poprun.ipc import wire
from poprun.ipc.processes import adopt_orphans, die_with_parent, end_descendants, heeded, reap, send

TYPE_CHECKING = False  # that of `typing`, which takes too long to load
if TYPE_CHECKING:
    from typing import NoReturn

_HANDED_ON = frozenset((*STOPPING, *PASSED_ON))


def put_keeper_above(at_the_end: Callable[[bool], None]) -> set[int | signal.Signals]:
    """Divide the calling process: the caller goes on below as the agent, and what it was becomes the keeper.

    Open MPI's daemon knows the keeper only: signals, SIGKILL too, reach the agent in no other way than through it. All
    processes of an instance descend from both. The agent ends them when the keeper is gone, which the kernel tells it
    by CUT_SIGNAL, and the keeper when the agent is. The one is out of the reach of what is sent to the other's group.

    Args:
        at_the_end: called in the keeper when nothing of the instance is left, with whether the agent has ended
            by itself and what has started it is still there.

    Returns:
        In the agent: the signals that are to be blocked again once it can take all of them.
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
        with contextlib.suppress(Exception):  # what it does is not worth a failed job
            at_the_end(code == 0 and not is_orphaned)
        _end_as(code)
    os.setpgid(0, 0)
    die_with_parent(CUT_SIGNAL)
    if os.getppid() != keeper:
        os._exit(127)
    return before


def _keep(agent: int) -> tuple[int, bool]:
    """Hand signals on until the agent has ended: its exit status, or -n after signal n; whether our parent is gone."""
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
            send(agent, signal.SIGCONT)  # or one that is stopped would never hear it


def _end_as(code: int) -> NoReturn:
    """End as the agent has."""
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has nothing to be restored
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (-code,))
        send(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)
