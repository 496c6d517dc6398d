"""User files that hide a package of the project; error messages name them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from popdist.hidden_packages import describe_hidden

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[2]
PROGRAM = "import popdist\npopdist.init()\nprint('joined')\n"


def run(folder: Path, hidden: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(PROGRAM)
    (folder / f"{hidden}.py").touch()
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, str(folder / "train.py")]
    return subprocess.run(words, env=environ, capture_output=True, text=True, check=False, timeout=100)


def test_a_file_that_hides_a_package_of_popdist_is_refused_in_one_line(tmp_path):
    done = run(tmp_path, "collectives")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: {tmp_path}/collectives.py hides the package collectives, because ")
    assert last.endswith("; rename it, if the program needs the package")


def test_a_file_that_hides_an_optional_package_gets_a_warning(tmp_path):
    done = run(tmp_path, "strategies")
    assert (done.returncode, done.stdout) == (0, "joined\n")
    (warning,) = done.stderr.splitlines()
    assert warning.startswith(f"{tmp_path}/strategies.py hides the package strategies, because ")


def test_other_files_are_accepted(tmp_path):
    done = run(tmp_path, "models")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_packages_themselves_hide_nothing():
    assert describe_hidden("collectives") == describe_hidden("strategies") == ""
