"""Several hosts on this machine for tests: network namespaces with an sshd each (testbed/netns_up.sh)."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).with_name("testbed")
REQUIRED_VARIABLE = "POPDIST_REQUIRE_CLUSTER"
"""If this variable is set, tests fail rather than skip when hosts cannot be made."""

_UP_LIMIT_S = 120.0
_MISSING = 77
_FOREIGN = ("OMPI_", "PMIX_", "PRTE_", "POPDIST_", "POPRUN_", "PJRT_", "SLURM_", "SSH_")
_DAEMONS = re.compile(r"(\S*/)?(sshd:?|munged|slurmctld|slurmd|: slurmscriptd)(\s|$)")


class Bed:
    """Hosts that exist between `open` and `close`; `open_bed` calls both.

    Attributes:
        names: The names of the hosts, `h0` and so on.
        shared: A folder that all hosts see; otherwise each has its own /tmp.
        ssh_arguments: Arguments with which `ssh h1` works inside any host.
        environ: The environment of commands on the hosts, before the variables of a single call.

    Args:
        folder: An empty folder for the state; it becomes `shared`.
        count: The number of hosts.
        settings: Variables of netns_up.sh.
    """

    def __init__(self, folder: Path, count: int, settings: dict[str, str]) -> None:
        self.names = tuple(f"h{index}" for index in range(count))
        self.shared = folder
        self.ssh_arguments = ("-F", str(folder / "state" / "ssh_config"))
        self.environ = self._clean_environ()
        self._state = folder / "state"
        self._slurm = folder / "slurm"
        self._touched = False
        self._lifeline = os.pipe()
        self._settings = {
            "N": str(count),
            "BED": f"pd{os.getpid()}x{time.monotonic_ns()}",  # unique, even if an earlier run had this pid
            "SHARE": _hidden_folders(),
        } | settings

    def _clean_environ(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        return kept | {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "POPRUN_SSH_ARGS": shlex.join(self.ssh_arguments),
            "POPRUN_CHECK_TIMEOUT_S": "30",  # CI's machines are small and busy
            "XDG_CACHE_HOME": str(self.shared / "cache"),
        }

    def open(self) -> None:
        """Start the hosts; skip the test with the reason if that is impossible."""
        self._script("netns_up.sh", **self._settings)

    def start(self, host: str, *command: str, environ: dict[str, str] | None = None, **options: Any) -> Any:
        """Start a command inside a host, with options of Popen. Signals sent to the process reach the command."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        words = self.command(host, *command)
        return subprocess.Popen(words, env=self.environ | (environ or {}), **{"text": True} | pipes | options)

    def command(self, host: str, *command: str) -> list[str]:
        """Return the command that runs a command inside a host; the caller starts it with `environ`."""
        return [str(self._state / "on"), host, *command]

    def on(self, host: str, *command: str, limit_s: float = 60.0, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a command inside a host to its end.

        Args:
            host: The name of the host.
            command: The words of the command; no shell reads them.
            limit_s: The time after which the test fails.
            environ: Variables for this command.
        """
        with self.start(host, *command, environ=environ, errors="replace") as process:
            try:
                out, err = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                process.terminate()
                out, err = process.communicate()
                pytest.fail(f"{shlex.join(command)} on {host} took more than {limit_s} s:\n{out}\n{err}")
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def python(self, host: str, program: str, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run the text of a Python program inside a host."""
        return self.on(host, sys.executable, "-c", program, *words, **options)

    def link(self, host: str, *shape: str) -> None:
        """Shape, cut or restore a link: `link("h1", "rate=200mbit", "delay=1ms")`, `down`, `up`; "all", `clear`.

        The fixture `hosts` restores all links after each test.
        """
        self._touched = True
        self._script("netns_link.sh", host, *shape)

    def restore(self) -> None:
        """Restore all links."""
        if self._touched:
            self._touched = False
            self._script("netns_link.sh", "all", "clear")

    def sent_bytes(self, host: str) -> int:
        """Return the bytes that a host has sent over its link so far."""
        return int(self.on(host, "cat", "/sys/class/net/eth0/statistics/tx_bytes").stdout)

    def processes(self, host: str) -> dict[int, str]:
        """Return the processes inside a host by their pid outside, without process 1 and the daemons of the bed."""
        init = int((self._state / "run" / f"{host}.pid").read_text())
        space = os.readlink(f"/proc/{init}/ns/pid")
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if os.readlink(folder / "ns" / "pid") == space and int(folder.name) != init and command:
                    found[int(folder.name)] = command
        return {pid: command for pid, command in found.items() if not _DAEMONS.match(command)}

    def start_slurm(self) -> str:
        """Start a Slurm on the hosts, and return the value for SLURM_CONF."""
        said = self._script("slurm_up.sh", S=str(self._slurm))
        return said.partition("SLURM_CONF=")[2].strip()

    def close(self) -> None:
        """End all hosts and daemons."""
        if self._slurm.exists():
            self._script("slurm_down.sh", S=str(self._slurm))
        if self._state.exists():
            self._script("netns_down.sh")
        for descriptor in self._lifeline:
            os.close(descriptor)

    def _script(self, name: str, *words: str, **environ: str) -> str:
        """Run one of the scripts; the hosts, and the process that delays their frames, end with this process."""
        reading = self._lifeline[0]
        done = subprocess.run(
            ["bash", str(SCRIPTS / name), *words],
            env={**os.environ, "D": str(self._state), "LIFELINE": str(reading), **environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_UP_LIMIT_S,
            pass_fds=[reading],
            check=False,
        )
        if done.returncode == _MISSING:
            (pytest.fail if os.environ.get(REQUIRED_VARIABLE) else pytest.skip)(done.stderr.strip())
        assert done.returncode == 0, done.stderr
        return done.stdout


@contextlib.contextmanager
def open_bed(folder: Path, count: int = 4, **settings: str) -> Iterator[Bed]:
    """Provide hosts for the time of a `with`.

    Args:
        folder: An empty folder, which all hosts will see.
        count: The number of hosts.
        settings: Variables of netns_up.sh, such as FAMILY="6" or SSH_USER.
    """
    for path in (ROOT, sys.prefix):
        if " " in str(path):  # Open MPI hands its own path to remote shells as it is, and Slurm's scripts begin with #!
            pytest.skip(f"jobs on other hosts cannot start from a path with a space: {path}")
    sweep_dead_beds()
    bed = Bed(folder, count, settings)
    try:
        bed.open()
        yield bed
    finally:
        bed.close()


def sweep_dead_beds() -> None:
    """Remove the namespaces of killed test runs; their processes have ended with them."""
    with contextlib.suppress(OSError, ValueError):
        for path in Path("/run/netns").glob("pd*x*-*"):
            if not Path("/proc", str(int(path.name[2:].partition("x")[0]))).exists():
                subprocess.run(["ip", "netns", "del", path.name], check=False)


def _hidden_folders() -> str:
    """Return the folders below /tmp that the hosts need, because each has its own /tmp."""
    needed = {str(path) for path in (ROOT, Path(sys.prefix), Path(sys.base_prefix)) if path.is_relative_to("/tmp")}
    return ":".join(sorted(needed))
