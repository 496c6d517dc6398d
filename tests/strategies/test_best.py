"""The best checkpoints, by a metric."""

import math

import pytest

from strategies import Best

METRICS = {1: {"a": 0.5}, 2: {"a": 0.75, "b": 3.0}, 3: {"a": 0.75}, 4: {}, 5: {"a": math.nan}, 6: {"a": -1.0}}


@pytest.mark.parametrize(
    ("best", "steps"),
    [
        (Best("a"), [2]),
        (Best("a", count=2), [2, 3]),
        (Best("a", count=9), [2, 3, 1, 6]),
        (Best("a", "min"), [6]),
        (Best("a", "min", 2), [6, 1]),
        (Best("b", "min", 2), [2]),
        (Best("c"), []),
    ],
)
def test_are_those_with_the_best_value_and_of_equal_ones_the_earlier(best, steps):
    assert best.steps(METRICS) == steps


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (("a", "most"), ValueError, r"mode is 'most'; the best values are the largest \('max'\)"),
        (("a", "max", 0), ValueError, "count is 0"),
        (("a", "max", 1.5), TypeError, "count is 1.5; an integer"),
    ],
)
def test_options_that_make_no_sense_are_refused(words, error, message):
    with pytest.raises(error, match=message):
        Best(*words)
