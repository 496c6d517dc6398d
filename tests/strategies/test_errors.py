"""Tree of errors, grouped by the next action of the caller."""

import re

import pytest

from strategies import errors

TREE = dict(re.findall(r"^[│ ]*[├└]── (\w+) +(\S.*)$", errors.__doc__, re.MULTILINE))
PUBLIC = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}


def test_every_error_is_in_the_tree():
    assert TREE.keys() | {"StrategyError"} == PUBLIC.keys()


@pytest.mark.parametrize("name", TREE)
def test_all_are_strategy_errors(name):
    assert issubclass(PUBLIC[name], errors.StrategyError)


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (errors.NonFiniteGradientError, ArithmeticError),
        (errors.DivergenceError, RuntimeError),
        (errors.DisagreementError, RuntimeError),
        (errors.EndOfDataError, errors.FeedError),
    ],
)
def test_errors_can_be_caught_as_pythons_own(error, base):
    assert issubclass(error, base)
