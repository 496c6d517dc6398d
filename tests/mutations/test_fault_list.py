"""The list of faults, compared with code and tests. `tests/mutations` shows that each fault is caught."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from fault import Fault, OutOfDateError, check, chosen
from faults import FAULTS

ROOT = Path(__file__).parents[2]
SOME = Fault("two are swapped", "some.py", "a, b", "b, a", "tests/test_some.py::test_order")


def test_every_fault_can_be_planted() -> None:
    check(FAULTS, ROOT)


def test_faults_are_more_than_seventy_in_all_packages() -> None:
    assert len(FAULTS) > 70
    packages = {"collectives", "popdist", "poprun", "strategies"}
    assert {Path(fault.path).parts[0] for fault in FAULTS} == packages


@pytest.mark.parametrize("test", sorted({fault.caught_by for fault in FAULTS}))
def test_catching_tests_exist_in_the_default_tier(test: str) -> None:
    path, *names = test.partition("[")[0].split("::")
    found: ast.AST = ast.parse((ROOT / path).read_text())
    for name in names:
        inside = ast.iter_child_nodes(found)
        found = next(each for each in inside if getattr(each, "name", "") == name)
        assert isinstance(found, ast.FunctionDef | ast.ClassDef)
        marks = [ast.unparse(decorator) for decorator in found.decorator_list]
        assert "pytest.mark.complete" not in marks, "the default tier does not run it"


def test_no_catching_test_or_case_is_left_to_the_complete_tier(request: pytest.FixtureRequest) -> None:
    """Compare with the files that this run has collected as a whole."""
    chosen_by = request.config.option
    if chosen_by.keyword or chosen_by.markexpr or any("::" in argument for argument in request.config.args):
        pytest.skip("only some tests of each file were collected")
    items = request.session.items
    in_default = {item.nodeid for item in items if not item.get_closest_marker("complete")}
    in_default |= {name.partition("[")[0] for name in in_default}
    files = {item.nodeid.partition("::")[0] for item in items}
    needed = {fault.caught_by for fault in FAULTS if fault.caught_by.partition("::")[0] in files}
    assert needed - in_default == set()


def test_a_fault_changes_text_that_occurs_exactly_once() -> None:
    assert SOME.planted_in("x(a, b)") == "x(b, a)"
    for text, times in {"": 0, "a, b; a, b": 2}.items():
        with pytest.raises(OutOfDateError, match=rf"that some\.py has {times} times"):
            SOME.planted_in(text)


def test_all_faults_that_do_not_fit_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(OutOfDateError, match="two faults are called 'two are swapped'; .*some.py has 0 times"):
        check([SOME, SOME], tmp_path)


def test_faults_are_chosen_by_a_part_of_their_names() -> None:
    assert chosen([SOME], []) == chosen([SOME], ["swapped"]) == [SOME]
    with pytest.raises(OutOfDateError, match="no fault is called 'other'"):
        chosen([SOME], ["swapped", "other"])
