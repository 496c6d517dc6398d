"""Named arrays in a flat array per dtype, one after another."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from strategies import Metrics
from strategies.checkpoints.sealed_folders import Packing, plain_metrics, plain_values

ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "n": np.array(7, np.int32),
    "b": np.array([9.5], np.float32),
    "none": np.zeros((0, 4), np.float32),
}


def test_arrays_of_a_dtype_are_contiguous():
    packing = Packing.of(ARRAYS)
    flat = packing.allocate()
    assert {dtype: array.size for dtype, array in flat.items()} == {"float32": 7, "int32": 1}
    for name, view in packing.views(flat).items():
        view[...] = ARRAYS[name]
    assert flat["float32"].tolist() == [0, 1, 2, 3, 4, 5, 9.5]
    assert flat["int32"].tolist() == [7]


def test_views_have_the_shapes_of_the_arrays_and_copy_nothing():
    packing = Packing.of(ARRAYS)
    flat = packing.allocate()
    views = packing.views(flat)
    assert {name: view.shape for name, view in views.items()} == {name: array.shape for name, array in ARRAYS.items()}
    assert all(np.shares_memory(view, flat[str(view.dtype)]) for view in views.values() if view.size)


def test_a_packing_survives_json():
    packing = Packing.of(ARRAYS)
    assert Packing.from_lists(json.loads(json.dumps(packing.arrays))) == packing


@pytest.mark.parametrize("lists", [[1], [["a", "float32"]], [["a", "float32", 3]]])
def test_other_lists_are_refused(lists):
    with pytest.raises(ValueError):  # noqa: PT011  two messages, of Python and of ours
        Packing.from_lists(lists)


def test_layouts_are_written_as_dtype_and_shape():
    assert Packing.of(ARRAYS).layouts == {
        "a": "float32[2, 3]",
        "n": "int32[]",
        "b": "float32[1]",
        "none": "float32[0, 4]",
    }


# ---- values of a program saved with a checkpoint besides arrays


def test_values_of_json_stay_unchanged():
    values = {"best": 0.1, "stopped": True, "names": ["a", None], "deep": {"n": 3}, "worst": -math.inf}
    assert plain_values(values) == values


def test_scalars_of_arrays_are_numbers():
    given = {"a": np.float32(0.5), "b": jnp.int32(3), "c": np.array(True), "d": {"e": [np.int64(2)]}}
    assert plain_values(given) == {"a": 0.5, "b": 3, "c": True, "d": {"e": [2]}}


def test_plain_values_are_copies():
    given = {"losses": [1.0]}
    copy = plain_values(given)
    given["losses"].append(2.0)
    assert copy == {"losses": [1.0]}


def test_metrics_of_a_step_are_saved_as_numbers():
    metrics = Metrics(("loss", "accuracy"), np.array([0.5, 0.25, 7], np.float32))
    assert plain_metrics(metrics) == {"loss": 0.5, "accuracy": 0.25}
    assert plain_values({"last": metrics}) == {"last": {"loss": 0.5, "accuracy": 0.25}}


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"a": np.ones(2)}, r"extra\['a'\] cannot be saved \(it is of type ndarray\); .* and keep arrays in the state"),
        ({"a": {"b": object()}}, r"extra\['a'\] cannot be saved \(it is of type object\); use numbers, strings"),
        ({3: 1}, r"extra is \{3: 1\}; it must be a dictionary with strings as keys"),
        (0.5, "extra is 0.5; it must be a dictionary"),
    ],
)
def test_values_that_json_cannot_write_are_refused(extra, words):
    with pytest.raises(TypeError, match=words):
        plain_values(extra)


@pytest.mark.parametrize("metrics", [0.5, {"a": "good"}, {"a": None}, {"a": np.ones(2)}])
def test_metrics_are_numbers(metrics):
    with pytest.raises(TypeError, match="it must be a dictionary of numbers, like the metrics of a step"):
        plain_metrics(metrics)
