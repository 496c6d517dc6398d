"""Jobs in the test bed whose instances reduce until an event: their end and their remains."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import pytest
from beds import Bed

OVER_LIMIT_S = 100.0
"""A guard against hanging; benchmarks/ends.py measures how soon jobs end."""
LOOK_S = 0.05

POPRUN = [sys.executable, "-m", "poprun", "--process-placement", "disabled"]
"""The first words of a command that starts a job; each simulated host would claim every core."""
if os.geteuid() == 0:
    POPRUN += ["--allow-run-as-root", "yes"]

LOOP = """
import os, signal, sys, time
import numpy as np
import popdist

popdist.init()
index, victim, deed = popdist.getInstanceIndex(), int(sys.argv[1]), sys.argv[2]
count = 0
while count != int(sys.argv[3]):
    popdist.allreduce(np.ones(10), tensor_name=None)
    count += 1
    if count == 50:
        print("all are up", flush=True)
        if index == victim and deed == "raise":
            raise ValueError("boom")
        if index == victim and deed == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if index == victim and deed == "exit":
            sys.exit(3)
print("count", count)
"""

Found = TypeVar("Found")


def words(hosts: Sequence[str], instances: int, *options: str) -> list[str]:
    """Return the first words of a command that starts a job on some hosts, with one replica per instance."""
    job = ["--host", ",".join(hosts), "--num-instances", str(instances), "--num-replicas", str(instances)]
    return [*POPRUN, *job, *options]


def run(
    bed: Bed, hosts: Sequence[str], instances: int, *command: str, options: Sequence[str] = (), **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a job, started on h0, to its end."""
    return bed.on("h0", *words(hosts, instances, *options), *command, limit_s=120.0, **environ)


def looping(victim: int = -1, deed: str = "", count: int = -1) -> list[str]:
    """Return the words of the program.

    Args:
        victim: The instance that acts after 50 reductions.
        deed: Its action: `raise`, `kill` or `exit`.
        count: The number of reductions; -1 for no end.
    """
    return [sys.executable, "-c", LOOP, str(victim), deed, str(count)]


def own_lines(text: str) -> list[str]:
    """Return poprun's own errors, without clock and process."""
    return [line.partition(" POPRUN [E] ")[2] for line in text.splitlines() if " POPRUN [E] " in line]


def await_value(look: Callable[[], Found], wanted: Callable[[Found], bool]) -> Found:
    """Return the first wanted value, or the last value if none comes."""
    deadline_s = time.monotonic() + OVER_LIMIT_S
    while not wanted(found := look()) and time.monotonic() < deadline_s:
        time.sleep(LOOK_S)
    return found


class Traces:
    """The remains of a job on the hosts: processes that did not exist when this was made."""

    def __init__(self, bed: Bed) -> None:
        self._bed = bed
        self._before = {host: set(bed.processes(host)) for host in bed.names}

    def find(self, hosts: Collection[str] = ()) -> set[tuple[str, str]]:
        """Return host and command of each such process, by default on all hosts."""
        return {
            (host, command)
            for host in hosts or self._bed.names
            for pid, command in self._bed.processes(host).items()
            if pid not in self._before[host] and re.search("poprun|prted|mpirun|popdist", command)
        }

    def left(self, hosts: Collection[str] = ()) -> set[tuple[str, str]]:
        """Return host and command of each process that does not go away."""
        return await_value(lambda: self.find(hosts), lambda found: not found)


class Looping:
    """A running job.

    Args:
        bed: The hosts.
        command: The words that start the job, on h0.
        environ: Variables for the command.
    """

    def __init__(self, bed: Bed, command: Sequence[str], **environ: str) -> None:
        self._traces = Traces(bed)
        self.process = bed.start("h0", *command, environ=environ)

    def await_start(self) -> None:
        """Return when the instances have begun to reduce."""
        for line in self.process.stdout:
            if "all are up" in line:
                return
        pytest.fail(self.process.stderr.read())

    def end(self) -> tuple[int, list[str]]:
        """Return the exit status and poprun's messages."""
        _, error = self.process.communicate(timeout=OVER_LIMIT_S)
        return self.process.returncode, own_lines(error)

    def left(self, hosts: Collection[str] = ()) -> set[tuple[str, str]]:
        """Return the processes of the job that do not go away, by default on all hosts."""
        return self._traces.left(hosts)
