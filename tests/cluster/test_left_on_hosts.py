"""Remains on hosts after SIGKILL of any process of a job, or after a cut link: no process and no file."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator

import pytest
from beds import REQUIRED_VARIABLE, Bed
from looping import await_value, own_lines, words

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.complete, pytest.mark.timeout(170)]

SILENCE_S = 10
FAMILY = """
import signal, subprocess, sys
import numpy as np
import popdist

popdist.init()
subprocess.Popen(["setsid", "sh", "-c", "sleep 1000 & exec sleep 1000"])
print("all are up", flush=True)
while True:
    popdist.allreduce(np.ones(10), tensor_name=None)
"""
DAEMON, MPIRUN, POPRUN, AGENT = r"\S*prted ", r"\S*prterun ", r".* -m poprun ", r".*/poprun/agent/__main__[.]py "


class Job:
    """A job on all hosts, one instance each, whose programs have started processes in new sessions."""

    def __init__(self, bed: Bed, *program: str, options: tuple[str, ...] = ()) -> None:
        self._bed = bed
        self._before = self._present()
        silence = ("--host-timeout-s", str(SILENCE_S))
        command = words(bed.names, len(bed.names), *silence, *options)
        self.process = bed.start("h0", *command, *program, start_new_session=True)

    def _present(self) -> set[tuple[str, int]]:
        return {(host, pid) for host in self._bed.names for pid in self._bed.processes(host)}

    def await_start(self) -> None:
        """Return when all instances have started their processes."""
        for _ in self._bed.names:
            assert any("all are up" in line for line in self.process.stdout), self.process.stderr.read()

    def find(self, host: str, pattern: str) -> list[int]:
        """Return the job's processes on a host whose command matches the pattern, the oldest first."""
        found = self._bed.processes(host).items()
        return sorted(p for p, each in found if (host, p) not in self._before and re.match(pattern, each))

    def kill(self, host: str, pattern: str, which: int = 0) -> None:
        os.kill(self.find(host, pattern)[which], signal.SIGKILL)

    def end(self) -> list[str]:
        """Wait for the end, and return poprun's own errors."""
        _, error = self.process.communicate(timeout=100)
        return own_lines(error)

    def left(self) -> list[str]:
        """Return the processes and files that do not go away."""
        return await_value(self._left, lambda found: not found)

    def processes(self) -> list[str]:
        """Return the processes that exist now."""
        return [
            f"{host}: {command}"
            for host in self._bed.names
            for pid, command in self._bed.processes(host).items()
            if (host, pid) not in self._before
        ]

    def _left(self) -> list[str]:
        return self.processes() or [f"{host}: {path}" for host in self._bed.names for path in self._files(host)]

    def _files(self, host: str) -> list[str]:
        script = "ls -d /tmp/ompi.* /tmp/prted.* /dev/shm/* 2>/dev/null || :"
        return self._bed.on(host, "sh", "-c", script).stdout.split()


def kill_daemon(job: Job) -> None:
    job.kill("h1", DAEMON)  # a child of the daemon has the same name


def kill_mpirun(job: Job) -> None:
    job.kill("h0", MPIRUN)


def kill_agent(job: Job) -> None:
    job.kill("h1", AGENT, -1)


def kill_keeper(job: Job) -> None:
    job.kill("h1", AGENT, 0)


def kill_poprun(job: Job) -> None:
    job.kill("h0", POPRUN)


def kill_group(job: Job) -> None:
    """Kill the process group, as `timeout -s KILL` does."""
    os.killpg(os.getpgid(job.find("h0", POPRUN)[0]), signal.SIGKILL)


def kill_group_beside_a_stopped_daemon(job: Job) -> None:
    """Kill the group while a daemon is stopped, which outlives its instance and must be killed then."""
    for pid in job.find("h1", DAEMON):
        os.kill(pid, signal.SIGSTOP)
    kill_group(job)


DEEDS = [kill_daemon, kill_mpirun, kill_agent, kill_keeper, kill_poprun, kill_group, kill_group_beside_a_stopped_daemon]


@pytest.mark.parametrize("deed", DEEDS)
def test_sigkill_of_any_process_leaves_nothing_on_any_host(hosts: Bed, deed: Callable[[Job], None]) -> None:
    job = Job(hosts, sys.executable, "-c", FAMILY)
    job.await_start()
    deed(job)
    job.end()
    assert job.left() == []


def test_a_lost_host_is_named_even_if_its_daemon_has_been_silent_for_long(hosts: Bed) -> None:
    """Open MPI's keep-alive, if it came first, would only end mpirun and leave the descendants of programs."""
    job = Job(hosts, sys.executable, "-c", FAMILY)
    job.await_start()
    hosts.on("h0", "sleep", "2.5")  # so that the last message of the daemons is long ago
    hosts.link("h2", "down")
    lines = job.end()
    assert re.match(r"instance 2 on host h2 \(pid \d+\) was lost: the connection to its host broke", lines[0]), lines
    hosts.link("h2", "up")
    assert job.left() == []


def ssh_has_started(job: Job) -> bool:
    return bool(job.find("h0", r"\S*ssh .*prted"))


def a_daemon_has_started(job: Job) -> bool:
    return bool(job.find("h1", DAEMON))


def daemons_have_divided(job: Job) -> bool:
    return len(job.find("h1", DAEMON)) > 1


def a_program_has_started(job: Job) -> bool:
    return bool(job.find("h0", "sleep 1000"))


@pytest.mark.parametrize(
    "moment",
    [
        lambda job: bool(job.find("h0", MPIRUN)),
        ssh_has_started,
        a_daemon_has_started,
        daemons_have_divided,
        a_program_has_started,
    ],
    ids=["mpirun", "ssh", "a daemon", "daemons", "a program"],
)
@pytest.mark.parametrize("whom", [kill_poprun, kill_group])
def test_sigkill_of_poprun_during_the_start_leaves_nothing(
    hosts: Bed, moment: Callable[[Job], bool], whom: Callable[[Job], None]
) -> None:
    job = Job(hosts, "sleep", "1000")
    while not moment(job):
        assert job.process.poll() is None
    whom(job)
    job.end()
    assert job.left() == []


@pytest.fixture
def full_name(hosts: Bed) -> Iterator[str]:
    """Give h0 a name with a domain for the time of a test."""
    assert hosts.on("h0", "hostname", "h0.cluster.example").returncode == 0
    yield "h0.cluster.example"
    hosts.on("h0", "hostname", "h0")


def test_daemons_behind_a_firewall_are_ended_on_a_host_with_a_full_name(hosts: Bed, full_name: str) -> None:
    """h0 drops everything but ssh, so daemons wait for an mpirun that they cannot reach; the next job cleans up."""
    if shutil.which("iptables") is None:
        (pytest.fail if os.environ.get(REQUIRED_VARIABLE) else pytest.skip)("no iptables (apt install iptables)")
    rules = [["INPUT", "-p", "tcp", "--sport", "2222"], ["INPUT", "-i", "lo"]]
    try:
        for rule in rules:
            assert hosts.on("h0", "iptables", "-A", *rule, "-j", "ACCEPT").returncode == 0
        hosts.on("h0", "iptables", "-A", "INPUT", "-j", "DROP")
        job = Job(hosts, "sleep", "1000", options=("--start-timeout-s", "4", "--skip-checks"))
        lines = job.end()
        assert lines[0] == "mpirun did not start every instance in time before every instance had completed", full_name
        assert await_value(job.processes, lambda found: not found) == []
    finally:
        hosts.on("h0", "iptables", "-F", "INPUT")
