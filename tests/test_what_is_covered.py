"""The table of coverage; the measurement itself is tested by running it."""

from __future__ import annotations

import tomllib
from pathlib import Path

from what_is_covered import PACKAGES, missing, ranges, table

FILES = {
    "poprun/one.py": {
        "summary": {"covered_lines": 3, "num_statements": 4, "covered_branches": 1, "num_branches": 2},
        "missing_lines": [7],
    },
    "poprun/far/two.py": {
        "summary": {"covered_lines": 6, "num_statements": 6, "covered_branches": 0, "num_branches": 0},
        "missing_lines": [],
    },
    "popdist/three.py": {
        "summary": {"covered_lines": 0, "num_statements": 2, "covered_branches": 0, "num_branches": 0},
        "missing_lines": [1, 2],
    },
}


def test_counts_of_files_are_added_by_package():
    rows = {row.split(" | ")[0]: row for row in table(FILES).splitlines()}
    assert rows["| poprun"] == "| poprun | 10 | 90.0 % | 2 | 50.0 % |"
    assert rows["| popdist"] == "| popdist | 2 | 0.0 % | 0 | - |"
    assert rows["| all"] == "| all | 12 | 75.0 % | 2 | 50.0 % |"


def test_unreached_lines_are_listed_for_the_files_of_a_package():
    assert missing(FILES, "poprun") == ["poprun/one.py: 7"]
    assert ranges([1, 2, 3, 5, 8, 9]) == "1-3, 5, 8-9"


def test_all_packages_are_measured():
    settings = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert settings["tool"]["coverage"]["run"]["source_pkgs"] == list(PACKAGES)
