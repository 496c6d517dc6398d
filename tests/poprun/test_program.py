"""The search for the program before the launch."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

import pytest

from poprun.__main__ import main
from poprun.errors import UsageError
from poprun.launch.program import (
    PACKAGES,
    check_descriptors,
    check_program,
    check_word,
    check_working_directory,
    folder_of,
    home_variables,
    warn_of_hidden,
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Provide the working directory, with a program, data and a script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for name in ("prog", "data", "sub/data", "train.py"):
        Path(name).write_text("#!/bin/sh\n")
    Path("windows").write_text("#! /bin/sh\r\n")
    for name in ("prog", "windows"):
        Path(name).chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("instances", [1, 16])
def test_a_limit_on_descriptors_that_mpirun_would_reach_is_refused(instances):
    check_descriptors(instances)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (20, before[1]))
    try:
        with pytest.raises(UsageError, match=f"may open 20 .* mpirun needs {24 + 4 * instances} .*ulimit -n 1024"):
            check_descriptors(instances)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("program", ["sh", "/bin/sh", "./prog"])
def test_a_program_that_can_be_started_is_accepted(folder, program):
    check_program(program, os.environ)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("no-such-program", "'no-such-program' is not in PATH; check its spelling"),
        ("prog", "'prog' is not in PATH; write ./prog"),
        ("data", "'data' is not in PATH; make it executable with `chmod +x data` and write ./data"),
        ("train.py", "'train.py' is not in PATH; start it with `python train.py`"),
        ("./train.py", "'./train.py' is not executable; start it with `python ./train.py`"),
        ("sub/data", "'sub/data' is not executable; make it executable with `chmod +x sub/data`"),
        ("./sub", "'./sub' is a directory; check its spelling"),
        ("sub/none", "'sub/none' does not exist; the working directory is {folder}"),
        ("", "'' is not in PATH; check its spelling"),
        ("sh -c true", "'sh -c true' is one word; write the program and its arguments as separate words"),
        ("./windows", r"'./windows' needs the interpreter '/bin/sh\r', which does not exist; correct its first line"),
    ],
)
def test_a_program_that_cannot_be_started_is_refused_with_the_way_out(folder, program, message):
    with pytest.raises(UsageError) as refused:
        check_program(program, os.environ)
    assert str(refused.value) == f"program {message.format(folder=folder)}"


def test_mpirun_gets_a_home_if_none_is_set():
    assert home_variables({"HOME": "/home/me"}) == {}
    assert Path(home_variables({})["HOME"]).is_absolute()


def test_a_deleted_working_directory_is_refused(folder, monkeypatch):
    monkeypatch.chdir("sub")
    Path("data").unlink()
    (folder / "sub").rmdir()
    with pytest.raises(UsageError, match="the working directory cannot be found: No such file.*change into one"):
        check_working_directory()


@pytest.mark.parametrize(
    ("word", "way_out"),
    [
        ("doctr", ", did you mean poprun doctor?"),
        ("tmeline", ", did you mean poprun timeline?"),
        ("version", "; poprun --version prints it"),
        ("help", "; poprun --help lists the options"),
        ("logs", "; --output-dir DIR keeps the output of instances, and poprun top shows their state"),
        ("status", "; poprun top shows the jobs that run"),
        ("run", "; leave it out: poprun [options] program [program arguments]"),
    ],
)
def test_a_word_like_a_command_of_poprun_is_answered_with_that_command(tmp_path, word, way_out):
    environ = {"PATH": str(tmp_path)}
    with pytest.raises(UsageError, match=f"^{re.escape(f'program {word!r} is not in PATH{way_out}')}$"):
        check_word(word, environ)
    (tmp_path / word).touch(mode=0o755)
    check_word(word, environ)


def test_words_unlike_any_command_are_left_to_the_program(tmp_path):
    for word in ("train", "./doctr", "prog", "to"):
        check_word(word, {"PATH": str(tmp_path)})


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
def test_the_first_folder_on_the_python_path_is_known(program, folder, tmp_path):
    expected = None if folder is None else os.path.realpath(folder.format(tmp_path))
    assert folder_of(program.format(tmp_path).split()) == expected


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", ["{}.py", "{}/__init__.py"])
def test_a_file_that_hides_a_package_is_named(package, name, tmp_path):
    path = tmp_path / name.format(package)
    path.parent.mkdir(exist_ok=True)
    path.touch()
    (warning,) = warn_of_hidden(["python", f"{tmp_path}/train.py"], {})
    assert warning.startswith(f"{path} hides the package {package} from the program, because ")
    assert list(warn_of_hidden(["python", f"{tmp_path}/train.py"], {"PYTHONSAFEPATH": "1"})) == []


def test_the_packages_themselves_hide_nothing():
    assert list(warn_of_hidden(["python", str(ROOT / "train.py")], {})) == []


def test_the_warning_about_hidden_packages_comes_before_the_start(tmp_path, capfd):
    (tmp_path / "strategies.py").touch()
    assert main(["--dry-run", "python", f"{tmp_path}/train.py"]) == 0
    assert f"POPRUN [W] {tmp_path}/strategies.py hides the package strategies" in capfd.readouterr().err
