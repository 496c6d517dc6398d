"""Refusals before the start: one line with the way out, and exit status 2."""

from __future__ import annotations

import os

import pytest

from poprun.__main__ import main
from poprun.launch.program import ROOT_VARIABLES


@pytest.fixture
def refusal(monkeypatch, capfd):
    """Return a function that runs poprun with refused words and returns its message."""
    for name in ROOT_VARIABLES:
        monkeypatch.setenv(name, "1")

    def refuse(*words: str) -> str:
        assert main(words) == 2
        shown = capfd.readouterr()
        assert shown.out == ""
        (line,) = shown.err.splitlines()
        return line.partition(" POPRUN [E] ")[2]

    return refuse


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-replicas", "6", "--num-instances", "4", "echo"], "use 4 or 8"),
        (["--num-replicas=3", "--num-instances=4", "echo"], "use 4 "),
        (["--num-replicas=0", "echo"], "--num-replicas is 0; use 1 or more"),
        (["--num-instances=-2", "echo"], "--num-instances is -2; use 1 or more"),
        (["--ipus-per-replica=0", "echo"], "--ipus-per-replica is 0; use 1 or more"),
        (["--num-replicas=two", "echo"], "--num-replicas needs a whole number, got 'two'"),
        (["--num-replica-s=2", "echo"], "unknown option --num-replica-s, did you mean --num-replicas"),
        (
            ["--only-output-from-instance=1", "echo"],
            "--only-output-from-instance is 1, but the job has 1 instance",
        ),
        (["--num-replicas=2"], "no program given"),
        (["no-such-program"], "program 'no-such-program' is not in PATH"),
        (["./no/such/program"], "program './no/such/program' does not exist"),
        (["/tmp"], "program '/tmp' is a directory"),
        (["--print-topology", "maybe", "echo"], "--print-topology needs yes or no"),
        (["--process-placement", "sideways", "echo"], "use one of spreadnuma, disabled"),
        (["--mpi-global-args", "-x 'A", "echo"], "check the quotes"),
    ],
)
def test_an_invalid_call_is_refused_in_one_line_with_status_2(refusal, words, message):
    assert message in refusal(*words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no-such-program"], "program 'no-such-program' is not in PATH"),
        (["docter"], "did you mean poprun doctor?"),
        (["/no/such/program"], "program '/no/such/program' does not exist"),
        (["--hostfile", "/no/such/file", "echo"], "hostfile /no/such/file cannot be read"),
        (["--num-replicas=3", "--num-instances=2", "echo"], "use 2 or 4"),
        (["echo"], "mpirun does not run as root unless told to"),
    ],
)
def test_wrong_words_are_refused_before_the_user_is(refusal, monkeypatch, words, message):
    for name in ROOT_VARIABLES:
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert message in refusal(*words)


@pytest.mark.parametrize("program", ["./train.py", "train.py"])
def test_a_script_that_is_not_executable_is_refused(refusal, tmp_path, monkeypatch, program):
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    line = refusal(program)
    assert "train.py" in line
    assert "start it with `python " in line
