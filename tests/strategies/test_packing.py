"""Named arrays one after another in a flat array per dtype."""

import json

import numpy as np
import pytest

from strategies.checkpoints.serialization import Packing

ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "n": np.array(7, np.int32),
    "b": np.array([9.5], np.float32),
    "none": np.zeros((0, 4), np.float32),
}


def test_arrays_of_a_dtype_lie_one_behind_the_other():
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


def test_it_survives_json():
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
