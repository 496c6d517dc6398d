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
"""Tests fail, rather than skip, where hosts cannot be made."""

_UP_LIMIT_S = 120.0
_MISSING = 77
_FOREIGN = ("OMPI_", "PMIX_", "PRTE_", "POPDIST_", "POPRUN_", "PJRT_", "SLURM_", "SSH_")
_DAEMONS = re.compile(r"(\S*/)?(sshd:?|munged|slurmctld|slurmd|: slurmscriptd)(\s|$)")


class Bed:
    """Hosts that are up between `open` and `close`; `open_bed` calls both.

    Attributes:
        names: of the hosts, `h0` and so on.
        shared: a folder that all hosts see; their /tmp is their own otherwise.
        ssh_arguments: with these `ssh h1` works inside any host.
        environ: what commands on the hosts find, before the words of a single call.

    Args:
        folder: an empty one, for the state; it is what `shared` is.
        count: how many hosts.
        settings: variables of netns_up.sh.
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
            "BED": f"pd{os.getpid()}x{time.monotonic_ns()}",  # of no other run, nor of one before that had this pid
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
        """Bring the hosts up; skips the test, with the reason, where that is not possible."""
        self._script("netns_up.sh", **self._settings)

    def start(self, host: str, *command: str, environ: dict[str, str] | None = None, **options: Any) -> Any:
        """Start a command inside a host; options are those of Popen. Signals sent to it reach the command."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        words = self.command(host, *command)
        return subprocess.Popen(words, env=self.environ | (environ or {}), **{"text": True} | pipes | options)

    def command(self, host: str, *command: str) -> list[str]:
        """The command that runs a command inside a host; whoever starts it gives it `environ`."""
        return [str(self._state / "on"), host, *command]

    def on(self, host: str, *command: str, limit_s: float = 60.0, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a command inside a host to its end.

        Args:
            host: its name.
            command: words; no shell looks at them.
            limit_s: after which the test fails.
            environ: variables for this command.
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
        """Run a Python program, given as its text, inside a host."""
        return self.on(host, sys.executable, "-c", program, *words, **options)

    def link(self, host: str, *shape: str) -> None:
        """Shape, cut or restore a link: `link("h1", "rate=200mbit", "delay=1ms")`, `down`, `up`; "all", `clear`.

        The fixture `hosts` restores all links after each test.
        """
        self._touched = True
        self._script("netns_link.sh", host, *shape)

    def restore(self) -> None:
        """Bring all links back to what they were."""
        if self._touched:
            self._touched = False
            self._script("netns_link.sh", "all", "clear")

    def sent_bytes(self, host: str) -> int:
        """What a host has sent over its link so far."""
        return int(self.on(host, "cat", "/sys/class/net/eth0/statistics/tx_bytes").stdout)

    def processes(self, host: str) -> dict[int, str]:
        """What runs inside a host, by its process number out here, without process 1 and the daemons of the bed."""
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
        """Start a Slurm on the hosts; the value for SLURM_CONF."""
        said = self._script("slurm_up.sh", S=str(self._slurm))
        return said.partition("SLURM_CONF=")[2].strip()

    def close(self) -> None:
        """End everything."""
        if self._slurm.exists():
            self._script("slurm_down.sh", S=str(self._slurm))
        if self._state.exists():
            self._script("netns_down.sh")
        for descriptor in self._lifeline:
            os.close(descriptor)

    def _script(self, name: str, *words: str, **environ: str) -> str:
        """Run one of the scripts; the hosts, and what delays their frames, end when this process does."""
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
    """Hosts for the time of a `with`.

    Args:
        folder: an empty one, which all hosts will see.
        count: how many hosts.
        settings: variables of netns_up.sh, such as FAMILY="6" or SSH_USER.
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
    """Remove the namespaces of test runs that were killed; their processes have ended with them."""
    with contextlib.suppress(OSError, ValueError):
        for path in Path("/run/netns").glob("pd*x*-*"):
            if not Path("/proc", str(int(path.name[2:].partition("x")[0]))).exists():
                subprocess.run(["ip", "netns", "del", path.name], check=False)


def _hidden_folders() -> str:
    """What the hosts need below /tmp, which is their own."""
    needed = {str(path) for path in (ROOT, Path(sys.prefix), Path(sys.base_prefix)) if path.is_relative_to("/tmp")}
    return ":".join(sorted(needed))
