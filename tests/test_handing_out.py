"""A worker of pytest that is killed costs the run one test, and no other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LIMIT_S = 100.0

CONFTEST = """\
from handing_out import FilesOfTheDead
from xdist.scheduler import LoadFileScheduling


def pytest_xdist_make_scheduler(config, log):
    return FilesOfTheDead(LoadFileScheduling(config, log))
"""
DIES = """\
import os, signal
import pytest

@pytest.mark.parametrize("number", range(4))
def test_that_may_kill(number):
    if number == {number}:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.cores(2)
@pytest.mark.parametrize("killed_by", [0, *(pytest.param(number, marks=pytest.mark.complete) for number in (2, 3))])
def test_the_others_are_run_once_each_and_the_run_ends(tmp_path, killed_by):
    """Near the end of the run, where the other worker has been told already that nothing more comes."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for number in range(5):
        (tmp_path / f"test_{number}.py").write_text(DIES.format(number=killed_by if number == 4 else -1))
    words = ["-m", "pytest", "-v", "--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder"]
    run = subprocess.run(
        [sys.executable, *words, "-p", "no:cacheprovider", str(tmp_path)],
        env=_without_workers_variables() | {"PYTHONPATH": str(TESTS)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert run.returncode == 1, run.stdout + run.stderr
    passed = re.findall(r"PASSED (\S+)", run.stdout)
    every = {f"test_{file}.py::test_that_may_kill[{number}]" for file in range(5) for number in range(4)}
    died_of = f"test_4.py::test_that_may_kill[{killed_by}]"
    assert sorted(passed) == sorted(every - {died_of})
    assert f"crashed while running '{died_of}'" in run.stdout


def _without_workers_variables() -> dict[str, str]:
    """The environment, without what tells a worker of pytest-xdist that it is one."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
