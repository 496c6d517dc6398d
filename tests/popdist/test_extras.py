"""The sentences about missing libraries, and the examples that show them."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
from pathlib import Path

import pytest

from popdist.examples import describe_obstacle
from popdist.examples.digits_data import DataError
from popdist.extras import _LIBRARIES, describe_missing

ROOT = Path(__file__).parents[2]

WITHOUT = """\
import os, sys

class Without:
    def __init__(self, finders):
        self.finders = finders

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == os.environ["WITHOUT"]:
            return None
        found = (finder.find_spec(name, path, target) for finder in self.finders)
        return next((spec for spec in found if spec is not None), None)

    def find_distributions(self, *context):
        for finder in self.finders:
            if hasattr(finder, "find_distributions"):
                yield from finder.find_distributions(*context)

sys.meta_path[:] = [Without(list(sys.meta_path))]
"""
"""A `sitecustomize` under which a library is missing as if it had never been installed."""


def missing(module: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"No module named {module!r}", name=module)


def test_the_project_has_each_extra():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    named = {extra for _, extras in _LIBRARIES.values() for extra in extras.split(",")}
    assert named <= set(setup["options.extras_require"])


@pytest.mark.parametrize("module", [*_LIBRARIES, "keras.layers"])
def test_a_missing_library_is_described_in_one_sentence(module):
    library, extras = _LIBRARIES[module.partition(".")[0]]
    expected = (
        f"train.py needs {library}, which is not installed; run pip install -e '.[{extras}]' in a checkout of the "
    )
    assert describe_missing(missing(module), "train.py").startswith(expected)


@pytest.mark.parametrize("error", [missing("h5py"), ImportError("cannot import name", name="torch"), ImportError()])
def test_other_errors_of_an_import_are_left_as_they_are(error):
    assert describe_missing(error, "train.py") == describe_obstacle(error, "train.py") == ""


def test_examples_describe_data_and_libraries_that_are_missing():
    assert describe_obstacle(DataError("no digits"), "digits.py") == "digits.py: no digits"
    error = RuntimeError("no checkpoints")
    assert describe_obstacle(error, "digits.py") == ""
    error.__cause__ = missing("orbax")
    assert describe_obstacle(error, "digits.py").startswith("digits.py needs Orbax, which is not installed; run pip ")


@pytest.mark.job
@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("module", "example"), [("torch", "torch_digits"), ("keras", "keras_digits"), ("sklearn", "tutorial")]
)
def test_an_example_says_in_one_line_what_is_missing(tmp_path, module, example):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    ended = subprocess.run(
        [sys.executable, "-m", f"popdist.examples.{example}"],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "WITHOUT": module},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    [line] = ended.stderr.splitlines()
    assert line.startswith(example)
    assert "not installed; run" in line
    assert "pip install" in line
