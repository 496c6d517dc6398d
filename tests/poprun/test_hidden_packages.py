"""A file of the user with the name of a package of ours is named before the job begins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from poprun.__main__ import main
from poprun.launch.hidden_packages import PACKAGES, folder_of, warn_of_hidden

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("program", "folder"),
    [
        ("python {}/train.py --epochs 3", "{}"),
        ("python3.11 -u -W error {}/train.py", "{}"),
        ("{}/train.py", "{}"),
        ("python -m train", "."),
        ("python -c pass {}/train.py", "."),
        ("python - {}/train.py", "."),
        ("python -I {}/train.py", None),
        ("python -P {}/train.py", None),
        ("python", None),
        ("echo {}/train.py", None),
    ],
)
def test_python_looks_into_the_folder_of_its_program_first(program, folder, tmp_path):
    expected = None if folder is None else os.path.realpath(folder.format(tmp_path))
    assert folder_of(program.format(tmp_path).split()) == expected


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", ["{}.py", "{}/__init__.py"])
def test_what_hides_a_package_is_named(package, name, tmp_path):
    path = tmp_path / name.format(package)
    path.parent.mkdir(exist_ok=True)
    path.touch()
    (warning,) = warn_of_hidden(["python", f"{tmp_path}/train.py"], {})
    assert warning.startswith(f"{path} hides the package {package} from the program, because ")
    assert list(warn_of_hidden(["python", f"{tmp_path}/train.py"], {"PYTHONSAFEPATH": "1"})) == []


def test_the_packages_themselves_hide_nothing():
    assert list(warn_of_hidden(["python", str(ROOT / "train.py")], {})) == []


def test_it_is_said_before_anything_starts(tmp_path, capfd):
    (tmp_path / "strategies.py").touch()
    assert main(["--dry-run", "python", f"{tmp_path}/train.py"]) == 0
    assert f"POPRUN [W] {tmp_path}/strategies.py hides the package strategies" in capfd.readouterr().err
