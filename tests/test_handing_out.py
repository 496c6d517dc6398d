"""A killed worker of pytest, which costs the run only one test."""

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
def test_other_tests_run_once_each_and_the_run_ends_after_a_worker_is_killed(tmp_path, killed_by):
    """The worker dies near the end of the run, after the other worker has learnt that no files are left."""
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
    """Return the environment without the variables of a worker of pytest-xdist."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
