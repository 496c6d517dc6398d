"""Many checks in one job: programs that run one after another in the same processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_S = 100.0
DONE = "this holds: "


def command(count: int) -> list[str]:
    """Return the command that starts a program as `count` instances of plain mpirun; one instance needs no launcher."""
    if count == 1:
        return [sys.executable, "-W", "error"]
    mpirun = shutil.which("mpirun", path=os.path.dirname(sys.executable)) or shutil.which("mpirun")
    assert mpirun, "no mpirun, neither beside Python nor in PATH"
    return [mpirun, "--oversubscribe", "-np", str(count), sys.executable, "-W", "error"]


def environment() -> dict[str, str]:
    """Return the environment of a job without a launcher above it, whose instances wait long and do not spin."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "POPDIST_", "PJRT_"))}
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return clean | allowed | {"PYTHONPATH": str(ROOT), "OMPI_MCA_mpi_yield_when_idle": "1"}


class Checks:
    """The results of the checks of one job.

    Args:
        count: The number of instances.
        head: Program text that runs once, before the checks.
        programs: The texts of the checks by their names; they run in order until one fails on an instance.
    """

    def __init__(self, count: int, head: str, programs: Mapping[str, str]) -> None:
        parts = [head]
        for number, (name, text) in enumerate(programs.items()):
            parts.append(f"def check_{number}():\n{textwrap.indent(text, '    ')}\n")
            parts.append(f"check_{number}()\nprint({DONE + name!r}, flush=True)\n")
        with tempfile.TemporaryDirectory(prefix="checks-") as folder:
            path = Path(folder, "checks.py")
            path.write_text("".join(parts), encoding="utf-8")
            ended = subprocess.run(
                [*command(count), str(path)],
                env=environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
        self._count = count
        self._status, self._errors = ended.returncode, ended.stderr
        self._lines = ended.stdout.splitlines()

    def holds(self, name: str) -> None:
        """Assert that a check ended well on all instances."""
        said = sum(line.endswith(DONE + name) for line in self._lines)
        assert said == self._count, f"{name!r} ended well on {said} of {self._count} instances\n{self._errors}"

    def end_well(self) -> None:
        """Assert that the job ended well."""
        assert self._status == 0, self._errors
