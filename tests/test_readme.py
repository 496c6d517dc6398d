"""The program in README.md runs as README.md says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
POPRUN = [sys.executable, "-m", "poprun", *(["--allow-run-as-root", "yes"] if os.geteuid() == 0 else [])]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    path = tmp_path_factory.mktemp("readme") / "program.py"
    path.write_text(code, encoding="utf-8")
    return path


def last_line(command):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    job = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environ, check=False)
    assert job.returncode == 0, job.stderr
    return job.stdout.splitlines()[-1]


def on_instances(count, program):
    """Its last line under poprun, with four replicas."""
    words = ("--num-instances", str(count), "--num-replicas", "4")
    return last_line([*POPRUN, *words, sys.executable, str(program)])


@pytest.fixture(scope="module")
def on_one(program):
    """What one instance says."""
    return on_instances(1, program)


@pytest.mark.job
def test_the_program_learns_alone(program):
    assert re.fullmatch(r"error 0\.\d{3}, [0-9a-f]{64}", last_line([sys.executable, str(program)]))


@pytest.mark.job
@pytest.mark.cores(2)
@pytest.mark.parametrize("instances", [2, pytest.param(4, marks=pytest.mark.complete)])
def test_the_program_gives_the_same_bits_on_several_instances(program, on_one, instances):
    assert on_one.startswith("error 0.")
    assert on_instances(instances, program) == f"[1,0]<stdout>:{on_one}"
