"""Requests of `poprun verify` for records, and the queries of a program."""

from __future__ import annotations

from pathlib import Path

import pytest

import popdist
from popdist.errors import EnvironmentMismatchError
from popdist.records import recording
from popdist.records.recording import Question, Recording, note_question, questions

FOLDER = recording.FOLDER_VARIABLE


@pytest.mark.parametrize(
    "wanted",
    [
        Recording(Path("/f")),
        Recording(Path("/f"), 5),
        Recording(Path("/f"), 5, (1, 0)),
        Recording(Path("/f"), leave_at=0),
    ],
)
def test_a_request_survives_its_variables(wanted):
    assert Recording.from_environ(wanted.as_variables()) == wanted


def test_without_a_folder_nothing_is_recorded():
    assert Recording.from_environ({}) is None
    assert Recording.from_environ({FOLDER: "", recording.STEPS_VARIABLE: "x"}) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [(recording.STEPS_VARIABLE, "many"), (recording.VALUES_VARIABLE, "3"), (recording.LEAVE_VARIABLE, "-1")],
)
def test_invalid_values_are_refused(name, value):
    with pytest.raises(EnvironmentMismatchError, match=f"{name}='{value}' is not what poprun verify sets"):
        Recording.from_environ({FOLDER: "/f", name: value})


@pytest.fixture
def nothing_asked(monkeypatch):
    monkeypatch.setattr(recording, "_questions", {})


def test_a_query_for_the_instance_is_recorded_once(nothing_asked, monkeypatch):
    monkeypatch.setenv(FOLDER, "/f")
    for _ in range(3):
        popdist.getInstanceIndex()
    popdist.getNumInstances()
    names = [(each.what, Path(each.file).name, each.where) for each in questions()]
    assert names == [(f"popdist.{name}", "test_recording.py", "") for name in ("getInstanceIndex", "getNumInstances")]
    assert questions()[1].line == questions()[0].line + 1


def test_no_query_is_recorded_without_a_request(nothing_asked, monkeypatch):
    monkeypatch.delenv(FOLDER, raising=False)
    popdist.getInstanceIndex()
    assert questions() == ()


def test_queries_of_the_projects_own_packages_are_not_recorded(nothing_asked, monkeypatch):
    monkeypatch.setenv(FOLDER, "/f")
    popdist.getDeviceId()  # it queries the local index
    assert questions() == ()


@pytest.mark.parametrize(
    ("module", "where"),
    [
        ("jax/gradients/replica_program", "loss"),
        ("jax/updates/update", "optimizer"),
        ("exchange/flat", ""),
    ],
)
def test_a_query_is_recorded_with_the_compiled_function(nothing_asked, monkeypatch, module, where):
    monkeypatch.setenv(FOLDER, "/f")
    ours = Path(popdist.__file__).parents[1] / "strategies" / f"{module}.py"
    assert ours.exists()
    scope = {"note_question": note_question}
    exec(compile("def answer(): note_question('it')", "/somewhere/answer.py", "exec"), scope)
    exec(compile("def ask(): answer()", "/somewhere/program.py", "exec"), scope)
    exec(compile("def compile_it(): ask()", str(ours), "exec"), scope)
    scope["compile_it"]()
    assert questions() == (Question("it", "/somewhere/program.py", 1, where),)
