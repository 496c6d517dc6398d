"""What a step tells about itself."""

import numpy as np
import pytest

from strategies import Metrics


@pytest.fixture
def metrics():
    return Metrics(("loss", "accuracy"), np.array([0.5, 0.25, 99], np.float32))  # more may lie behind the means


def test_means_are_found_under_their_names(metrics):
    assert (metrics["loss"], metrics["accuracy"]) == (0.5, 0.25)
    assert type(metrics["loss"]) is float


def test_it_is_a_mapping_of_the_names_alone(metrics):
    assert dict(metrics) == {"loss": 0.5, "accuracy": 0.25}
    assert list(metrics) == ["loss", "accuracy"]
    assert len(metrics) == 2
    assert repr(metrics) == "Metrics({'loss': 0.5, 'accuracy': 0.25})"


def test_an_unknown_name_is_a_key_error(metrics):
    with pytest.raises(KeyError, match="recall"):
        metrics["recall"]
    assert metrics.get("recall", 3.0) == 3.0
