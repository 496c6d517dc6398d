"""Programs in README.md."""

import importlib.util
import re
import sys

import pytest
from jobs import poprun_jobs
from pages import page_programs

LIBRARIES = ("torch", "jax")  # in the order of their programs
pytestmark = pytest.mark.job


@pytest.fixture(scope="module", params=LIBRARIES)
def program(request, tmp_path_factory):
    """Return the words that start a program for one library."""
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    programs = page_programs("README.md")
    path = tmp_path_factory.mktemp("readme") / "program.py"
    path.write_text(dict(zip(LIBRARIES, programs, strict=True))[request.param], encoding="utf-8")
    return sys.executable, str(path)


def lines_on(instances, program):
    """Return the lines of instance 0 under poprun, with four replicas."""
    finished = poprun_jobs.run(f"--num-instances={instances}", "--num-replicas=4", *program)
    assert finished.status == 0, finished.stderr
    return finished.lines_of(0)


@pytest.fixture(scope="module")
def on_one(program):
    """Return the lines of one instance."""
    return lines_on(1, program)


@pytest.mark.complete
def test_the_program_trains_alone(program):
    [line] = poprun_jobs.run_alone(*program).lines_of(0)
    assert re.fullmatch(r"loss \d\.\d{3}, [0-9a-f]{64}", line)


@pytest.mark.cores(2)
@pytest.mark.parametrize("instances", [2, pytest.param(4, marks=pytest.mark.complete)])
def test_the_program_gives_the_same_bits_on_several_instances(program, on_one, instances):
    assert on_one[0].startswith("loss ")
    assert lines_on(instances, program) == on_one
