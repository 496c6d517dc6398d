"""A real Slurm on the hosts of a bed, with the commands of its users."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from beds import REQUIRED_VARIABLE, ROOT, Bed

_IDLE_LIMIT_S = 30.0


class Slurm:
    """A Slurm cluster; its commands run on h0.

    Attributes:
        bed: The hosts, each of which is a node of the same name with two processors.
        folder: A folder that all nodes see.
        environ: Variables with which a command on a host finds the cluster.
    """

    def __init__(self, bed: Bed, conf: str) -> None:
        self.bed = bed
        self.folder = bed.shared / "jobs"
        self.folder.mkdir(exist_ok=True)
        self.environ = {"SLURM_CONF": conf}

    def run(self, *words: str, limit_s: float = 60.0, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run srun, salloc, sbatch or the like to its end."""
        return self.bed.on("h0", *words, limit_s=limit_s, **self.environ, **environ)

    def script(self, program: str) -> Path:
        """Write a Python program as a script that every node sees."""
        path = self.folder / "script"
        path.write_text(f"#!{sys.executable}\n{program}")
        return path

    def submit(
        self, script: Path, *words: str, options: tuple[str, ...] = (), limit_s: float = 60.0, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Submit a script from the project's folder and wait for its end; `stdout` has the output of the job."""
        output = self.folder / "output"
        output.write_text("")
        done = self.run(
            *("env", "-C", str(ROOT), "sbatch", "--wait", "--output", str(output), *options, str(script), *words),
            limit_s=limit_s,
            **environ,
        )
        return subprocess.CompletedProcess(done.args, done.returncode, output.read_text(), done.stderr)

    def require_pmix(self) -> None:
        """Skip, or fail if a cluster is required, unless srun can connect tasks through PMIx."""
        done = self.run("srun", "--mpi=pmix", "true")
        if done.returncode:
            reason = f"srun --mpi=pmix does not work (apt-get install libpmix-dev): {done.stderr.strip()}"
            (pytest.fail if os.environ.get(REQUIRED_VARIABLE) else pytest.skip)(reason)

    def free_all(self) -> None:
        """End every job, and wait until all nodes are idle: the next job then gets the first of them.

        A node whose link another test has cut for long is down until it is resumed.
        """
        self.run("scancel", "--user=root")
        deadline_s = time.monotonic() + _IDLE_LIMIT_S
        while set((states := self._states()).values()) != {"idle"}:  # each query takes long enough to be no burden
            assert time.monotonic() < deadline_s, f"not idle after {_IDLE_LIMIT_S} s:\n{self.run('sinfo').stdout}"
            if down := ",".join(node for node, state in states.items() if state.startswith("down")):
                self.run("scontrol", "update", f"nodename={down}", "state=resume")

    def _states(self) -> dict[str, str]:
        """Return the states by node; --states=idle would include nodes that are still completing a job."""
        lines = self.run("sinfo", "--noheader", "--Node", "--format=%N %t").stdout.splitlines()
        return {node: state for node, state in map(str.split, lines)}
