"""The start of mpirun. It comes before the supervisor is loaded, because both take tens of milliseconds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Mapping, Sequence

from poprun.ipc import wire
from poprun.ipc.processes import adopt_orphans, catch_signals, ignores_hangup
from poprun.ipc.streams import describe_terminals
from poprun.launch.launch import Across
from poprun.supervisor.mpirun import Mpirun
from poprun.supervisor.reception import Reception
from poprun.supervisor.signals import INTERRUPTS, PASSED_ON

DIRECTORY_OPTIONS = ("--wdir", "-wdir", "--wd", "-wd", "--set-cwd-to-session-dir", "-set-cwd-to-session-dir")
"""The options of mpirun that set the working directory of instances."""


class StartedJob:
    """A job whose mpirun runs. Signals and reports of agents wait until the supervisor reads them.

    If this process ends before, the tether ends mpirun.

    Attributes:
        began_s: The time of the start, on the clock of `time.monotonic`.
        wakeup: Descriptor from which the numbers of received signals are read.
        reception: The socket for agents.
        mpirun: The running mpirun.

    Args:
        command: The mpirun command.
        across: The settings for several hosts.
        tag_columns: The columns that tags take from the width of a terminal.
        environ: The environment of mpirun.
    """

    def __init__(self, command: Sequence[str], across: Across, tag_columns: int, environ: Mapping[str, str]) -> None:
        self._across = across
        self._environ = environ
        adopt_orphans()
        self.wakeup = catch_signals((*INTERRUPTS, *PASSED_ON, signal.SIGCHLD))
        self.reception = Reception(across.interface, across.silence_s)
        contact = f"{self.reception.contact} {describe_terminals(tag_columns)}"
        contact += wire.TELLS_NOTICE * across.tells_notice
        contact += wire.IGNORES_HANGUP * ignores_hangup()
        if not any(word.partition("=")[0] in DIRECTORY_OPTIONS for word in command):
            contact = f"{os.getcwd()} {contact}"
        variables = {**environ, wire.CONTROL_VARIABLE: contact}
        self.began_s = time.monotonic()
        self.mpirun = Mpirun(command, variables, lambda pid: self.tidy(pid, sweeps=True))

    def tidy(self, mpirun: int, sweeps: bool, silent: Collection[str] = ()) -> None:
        """Remove the job's files on this machine and, if `sweeps`, its processes and files on other hosts."""
        from poprun.ipc.leavings import folder_of, remove_leavings

        others = self._across.others
        if sweeps and others:
            from poprun.hosts.sweep import sweep

            unheard = self._across.others_called(silent)
            sweep(others, unheard, self._across.ssh, f"{os.uname().nodename}-{mpirun}", dict(self._environ))
        remove_leavings(folder_of(self._environ), [mpirun])
