"""The programs in README.md run as README.md says."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
POPRUN = [sys.executable, "-m", "poprun", *(["--allow-run-as-root", "yes"] if os.geteuid() == 0 else [])]
LIBRARIES = ("torch", "jax")  # in the order of their programs


@pytest.fixture(scope="module", params=LIBRARIES)
def program(request, tmp_path_factory):
    """The path of a program for one library."""
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    path = tmp_path_factory.mktemp("readme") / "program.py"
    path.write_text(dict(zip(LIBRARIES, programs, strict=True))[request.param], encoding="utf-8")
    return path


def last_line(command):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    job = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environ, check=False)
    assert job.returncode == 0, job.stderr
    return job.stdout.splitlines()[-1]


def on_instances(count, program):
    """Return the last line of the program under poprun, with four replicas."""
    words = ("--num-instances", str(count), "--num-replicas", "4")
    return last_line([*POPRUN, *words, sys.executable, str(program)])


@pytest.fixture(scope="module")
def on_one(program):
    """The last line of one instance."""
    return on_instances(1, program)


@pytest.mark.job
def test_the_program_trains_alone(program):
    assert re.fullmatch(r"loss \d\.\d{3}, [0-9a-f]{64}", last_line([sys.executable, str(program)]))


@pytest.mark.job
@pytest.mark.cores(2)
@pytest.mark.parametrize("instances", [2, pytest.param(4, marks=pytest.mark.complete)])
def test_the_program_gives_the_same_bits_on_several_instances(program, on_one, instances):
    assert on_one.startswith("loss ")
    assert on_instances(instances, program) == f"[1,0]<stdout>:{on_one}"
