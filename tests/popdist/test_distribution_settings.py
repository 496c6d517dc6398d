"""The steps in which norms and histograms are taken."""

import pytest

from popdist.errors import EnvironmentMismatchError
from popdist.records.distribution_settings import DistributionSettings


def test_the_first_step_is_always_among_the_steps():
    settings = DistributionSettings(norms_every=2, histograms_every=3)
    assert [step for step in range(7) if settings.norms_are_due(step)] == [0, 2, 4, 6]
    assert [step for step in range(7) if settings.histograms_are_due(step)] == [0, 3, 6]


def test_nothing_is_due_without_settings():
    settings = DistributionSettings.from_environ({"POPDIST_NORMS_EVERY": "", "POPDIST_HISTOGRAMS_EVERY": "0"})
    assert not settings.are_on
    assert not any(settings.norms_are_due(step) or settings.histograms_are_due(step) for step in range(5))


def test_the_environment_names_numbers_of_steps():
    environ = {"POPDIST_NORMS_EVERY": "5", "POPDIST_HISTOGRAMS_EVERY": "100"}
    assert DistributionSettings.from_environ(environ) == DistributionSettings(5, 100)


@pytest.mark.parametrize("text", ["-1", "1.5", "often", "²"])
def test_a_variable_that_is_no_number_is_refused(text):
    with pytest.raises(EnvironmentMismatchError, match=f"^POPDIST_NORMS_EVERY='{text}' is not a number of steps; use"):
        DistributionSettings.from_environ({"POPDIST_NORMS_EVERY": text})


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"norms_every": True}, TypeError, "norms_every is True, which is not an integer; give a number of steps"),
        ({"norms_every": 1.0}, TypeError, "norms_every is 1.0, which is not an integer"),
        ({"histograms_every": -3}, ValueError, "histograms_every is -3, which is negative; give a number of steps"),
    ],
)
def test_wrong_numbers_are_refused(given, error, message):
    with pytest.raises(error, match=f"^{message}"):
        DistributionSettings(**given)
