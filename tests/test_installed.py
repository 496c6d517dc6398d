"""Types of an installed project for type checkers and editors, from a wheel and from `pip install -e`."""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from installing import copy_build_files

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "launch_scripts" / "constraints.txt"
PACKAGES = ("collectives", "popdist", "poprun", "strategies")
LIMIT_S = 200.0
PROGRAM = """\
import collectives
import popdist
import strategies

strategy = strategies.LocalStrategy(num_replicas=2)
replicas: int = strategy.num_replicas_in_sync
wrong_name = strategy.num_replicas_in_sinc  # wrong
wrong_type: str = popdist.getNumInstances()  # wrong
limits = collectives.Limits(timeout_s=5.0)
wrong_argument = collectives.Limits(timeout_s="5")  # wrong
"""
WRONG = {number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")}

pytestmark = [pytest.mark.complete, pytest.mark.job, pytest.mark.long, pytest.mark.timeout(2 * LIMIT_S)]


NOT_COMPILED = ("install", "--no-compile")  # modules that are imported once at most need no bytecode


def finished(*command, cwd=None):
    """Run a command that finds the project only if it is installed."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MYPYPATH")}
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=clean, cwd=cwd, check=False)


def pip(environment, *words, cwd=None):
    """Run this interpreter's pip for an environment without pip."""
    quiet = ("--quiet", "--disable-pip-version-check")
    return finished(sys.executable, "-m", "pip", *quiet, "--python", str(environment), *words, cwd=cwd)


def copy_project(place):
    """Copy all files needed for an installation, so that pip does not write into the original."""
    for name in PACKAGES:
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    copy_build_files(place)
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, place)


@pytest.fixture(scope="module", params=["wheel", "editable"])
def python(request, tmp_path_factory):
    """Return the interpreter of a new environment that contains only the project."""
    folder = tmp_path_factory.mktemp(request.param)
    project = folder / "project"
    copy_project(project)
    venv.create(folder / "environment")
    how = ["--editable"] if request.param == "editable" else []
    done = pip(folder / "environment", *NOT_COMPILED, "--no-deps", *how, ".", cwd=project)
    assert done.returncode == 0, done.stderr
    if not how:
        shutil.rmtree(project)
    return folder / "environment" / "bin" / "python"


@pytest.fixture
def program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path / "program.py"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Return the folder of mypy's cache for all environments, which share the standard library."""
    return tmp_path_factory.mktemp("cache")


def test_mypy_knows_the_types(python, program, cache):
    words = ("--python-executable", str(python), "--cache-dir", str(cache))
    done = finished(sys.executable, "-m", "mypy", *words, program.name, cwd=program.parent)
    assert {int(line) for line in re.findall(r"^program.py:(\d+): error:", done.stdout, re.MULTILINE)} == WRONG, (
        done.stdout
    )


@pytest.fixture(scope="module")
def pyright(tmp_path_factory):
    """Return the path of basedpyright, which unlike pyright needs no npm."""
    environment = tmp_path_factory.mktemp("pyright")
    venv.create(environment)
    done = pip(environment, *NOT_COMPILED, "basedpyright")
    if done.returncode:
        pytest.skip(f"basedpyright cannot be installed: {done.stderr}")
    return environment / "bin" / "basedpyright"


def test_pyright_knows_the_types(pyright, python, program):
    done = finished(str(pyright), "--pythonpath", str(python), "--outputjson", program.name, cwd=program.parent)
    found = [each for each in json.loads(done.stdout)["generalDiagnostics"] if each["severity"] == "error"]
    assert {each["range"]["start"]["line"] + 1 for each in found} == WRONG, found


@pytest.mark.parametrize("package", PACKAGES)
def test_the_marker_of_typed_packages_is_installed(python, package):
    """Without the marker checkers treat all types of the package as Any."""
    code = f"import importlib.util, os; print(os.path.dirname(importlib.util.find_spec({package!r}).origin))"
    done = finished(str(python), "-I", "-c", code)
    assert (Path(done.stdout.strip()) / "py.typed").is_file(), done.stderr


def test_the_constraints_pin_every_installed_package(tmp_path):
    """Indirect requirements are pinned, too, so that the versions do not depend on the day of installation."""
    copy_project(tmp_path / "project")
    venv.create(tmp_path / "environment")
    constraints = CONSTRAINTS.read_text(encoding="utf-8")
    words = ("--dry-run", "--report", "report.json", "--constraint", str(CONSTRAINTS), ".[dev]")
    done = pip(tmp_path / "environment", "install", *words, cwd=tmp_path / "project")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "project" / "report.json").read_text())
    names = {re.sub(r"[-_.]+", "-", each["metadata"]["name"]).lower() for each in report["install"]}
    pinned = {re.sub(r"[-_.]+", "-", name).lower() for name in re.findall(r"^([\w.-]+)==", constraints, re.MULTILINE)}
    assert names - pinned == {"popdist-everywhere"}
