from __future__ import annotations

import pytest

from poprun.launch.exports import export_options, exports, without_exports

WORDS = ["-x", "A=1", "--mca", "x", "-x", "B", "-x", "C=d=e"]


def test_exports_are_found():
    assert exports(WORDS) == {"A": "1", "B": None, "C": "d=e"}


def test_the_last_of_a_name_counts():
    assert exports(["-x", "A=1", "-x", "A=2", "-x", "B=1", "-x", "B"]) == {"A": "2", "B": None}


def test_writing_and_reading_are_inverse():
    assert exports(export_options({"A": "1", "B": None, "C": ""})) == {"A": "1", "B": None, "C": ""}


@pytest.mark.parametrize(
    ("names", "left"),
    [
        ((), WORDS),
        (("A", "x"), ["--mca", "x", "-x", "B", "-x", "C=d=e"]),
        (("B", "C"), ["-x", "A=1", "--mca", "x"]),
    ],
)
def test_named_exports_are_left_out(names, left):
    assert without_exports(WORDS, names) == left


def test_an_option_without_a_value_is_left_for_mpirun_to_refuse():
    assert without_exports(["--mca", "x", "-x"], ("x",)) == ["--mca", "x", "-x"]
