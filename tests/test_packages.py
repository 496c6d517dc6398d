"""Packages that are installed, and the versions used in tests."""

import configparser
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
INSTALLED = ("collectives", "popdist", "poprun", "strategies")
CONSTRAINTS = ROOT / "launch_scripts" / "constraints.txt"


def setup():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def requirements():
    """Return the requirements of the project and all its extras."""
    lists = [setup()["options"]["install_requires"], *setup()["options.extras_require"].values()]
    lines = {line for each in lists for line in each.splitlines() if line}
    return [Requirement(line) for line in sorted(lines)]


def pins():
    """Return the version of each package in the constraints."""
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def test_every_folder_of_modules_is_a_package():
    """Only packages are found when the project is installed."""
    folders = {path.parent for top in INSTALLED for path in (ROOT / top).rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_the_constraints_have_an_allowed_version_of_every_requirement(requirement):
    assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)])


def test_the_constraints_have_the_torch_for_which_horovod_is_built():
    script = (ROOT / "launch_scripts" / "install_horovod.sh").read_text(encoding="utf-8")
    assert re.search(r"^tested_torch=(\S+)", script, flags=re.MULTILINE)[1] == pins()["torch"]
