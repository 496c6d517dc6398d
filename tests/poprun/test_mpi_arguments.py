from __future__ import annotations

import pytest

from poprun.cli.mpi_arguments import JobArguments, MpiArguments, export_options

WORDS = ["-x", "A=1", "--mca", "x", "-x", "B", "-x", "C=d=e"]


def exports(words):
    return MpiArguments.read(words).exports


def test_exports_are_found():
    assert exports(WORDS) == {"A": "1", "B": None, "C": "d=e"}


def test_the_last_export_of_a_name_counts():
    assert exports(["-x", "A=1", "-x", "A=2", "-x", "B=1", "-x", "B"]) == {"A": "2", "B": None}


def test_export_options_are_read_back():
    assert exports(export_options({"A": "1", "B": None, "C": ""})) == {"A": "1", "B": None, "C": ""}


@pytest.mark.parametrize(
    ("names", "left"),
    [
        ((), WORDS),
        (("A", "x"), ["--mca", "x", "-x", "B", "-x", "C=d=e"]),
        (("B", "C"), ["-x", "A=1", "--mca", "x"]),
    ],
)
def test_named_exports_are_removed(names, left):
    assert MpiArguments.read(WORDS).without_exports(names) == left


def test_an_option_without_a_value_is_left_for_mpirun_to_refuse():
    assert MpiArguments.read(["--mca", "x", "-x"]).without_exports(("x",)) == ["--mca", "x", "-x"]


def test_an_instance_has_the_arguments_of_all_followed_by_its_own():
    own = ((1, ("-x", "A=2")), (1, ("-x", "B")))
    job = JobArguments.read(("--mca", "x"), ("-x", "A=1"), own, 3)
    assert [each.exports for each in job.instances] == [{"A": "1"}, {"A": "2", "B": None}, {"A": "1"}]
    assert job.words == ("--mca", "x", "-x", "A=1", "-x", "A=2", "-x", "B")
    assert job.exports == {"A", "B"}
