"""What a program saves with a checkpoint besides arrays."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from strategies import Metrics
from strategies.checkpoints.serialization import plain_metrics, plain_values


def test_values_of_json_stay_what_they_are():
    values = {"best": 0.1, "stopped": True, "names": ["a", None], "deep": {"n": 3}, "worst": -math.inf}
    assert plain_values(values) == values


def test_scalars_of_arrays_are_numbers():
    given = {"a": np.float32(0.5), "b": jnp.int32(3), "c": np.array(True), "d": {"e": [np.int64(2)]}}
    assert plain_values(given) == {"a": 0.5, "b": 3, "c": True, "d": {"e": [2]}}


def test_it_is_a_copy():
    given = {"losses": [1.0]}
    copy = plain_values(given)
    given["losses"].append(2.0)
    assert copy == {"losses": [1.0]}


def test_what_a_step_returns_is_saved_as_numbers():
    metrics = Metrics(("loss", "accuracy"), np.array([0.5, 0.25, 7], np.float32))
    assert plain_metrics(metrics) == {"loss": 0.5, "accuracy": 0.25}
    assert plain_values({"last": metrics}) == {"last": {"loss": 0.5, "accuracy": 0.25}}


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"a": np.ones(2)}, r"extra\['a'\] cannot be saved \(it is of type ndarray\); .* and keep arrays in the state"),
        ({"a": {"b": object()}}, r"extra\['a'\] cannot be saved \(it is of type object\); use numbers, strings"),
        ({3: 1}, r"extra is \{3: 1\}; it is a dictionary with strings as keys"),
        (0.5, "extra is 0.5; it is a dictionary"),
    ],
)
def test_what_json_cannot_write_is_refused(extra, words):
    with pytest.raises(TypeError, match=words):
        plain_values(extra)


@pytest.mark.parametrize("metrics", [0.5, {"a": "good"}, {"a": None}, {"a": np.ones(2)}])
def test_metrics_are_numbers(metrics):
    with pytest.raises(TypeError, match="it is a dictionary of numbers, such as a step returns"):
        plain_metrics(metrics)
