"""Elements of an infeed: their parts, dtypes and shapes."""

import ml_dtypes
import numpy as np
import pytest

from strategies.jax.feeds.infeed import DTYPES, ElementSpec, check_declared

PAIR = (np.zeros((2, 3), np.float32), np.int32(1))


def test_elements_are_flattened_and_unflattened():
    spec = ElementSpec.of(PAIR)
    element = (np.ones((2, 3), np.float32), np.int32(7))
    arrays = spec.flatten(1, element)
    assert [array.dtype for array in arrays] == [np.float32, np.int32]
    first, second = spec.unflatten(arrays)
    assert (first.tolist(), int(second)) == (np.ones((2, 3)).tolist(), 7)


def test_arrays_are_copied():
    element = np.zeros(3, np.float32)
    [array] = ElementSpec.of(element).flatten(0, element)
    element[:] = 1
    assert not array.any()


def test_lists_are_tuples():
    assert ElementSpec.of([np.float32(1), np.float32(2)]) == ElementSpec.of((np.float32(3), np.float32(4)))


@pytest.mark.parametrize(
    ("element", "positional", "named"),
    [
        (np.float32(1), (1,), {}),
        ((np.float32(1), np.float32(2)), (1, 2), {}),
        ({"x": np.float32(1), "y": np.float32(2)}, (), {"x": 1, "y": 2}),
        (({"x": np.float32(1)},), (), {"x": 1}),
        (({"x": np.float32(1)}, np.float32(2)), ({"x": 1}, 2), {}),
        ({0: np.float32(1)}, ({0: 1},), {}),
    ],
)
def test_a_body_takes_the_parts_of_an_element_as_arguments(element, positional, named):
    spec = ElementSpec.of(element)
    found = spec.arguments(spec.flatten(0, element))
    assert (tuple(found[0]), dict(found[1])) == (positional, named)


@pytest.mark.parametrize("dtype", DTYPES)
def test_supported_dtypes_are_fed(dtype):
    assert ElementSpec.of(np.zeros(2, dtype)).leaves[0].dtype == dtype


@pytest.mark.parametrize("dtype", ["int64", "float64", "uint16", ml_dtypes.float8_e4m3fn])
def test_other_dtypes_are_refused_with_their_place(dtype):
    with pytest.raises(
        TypeError, match=f"Unsupported datatype {np.dtype(dtype)} on index 1 of feed operation; convert"
    ):
        ElementSpec.of((np.zeros(2, np.float32), np.zeros(2, dtype)))


@pytest.mark.parametrize(
    ("element", "words"),
    [
        ((), "have no arrays; an infeed needs at least one"),
        ((np.float32(1), (np.float32(2),)), "a tuple or list inside of another; make them flat"),
        ((np.float32(1), np.zeros((3, 0), np.float32)), r"with a dimension of size 0: \[3, 0\] on index 1"),
    ],
)
def test_elements_that_cannot_be_fed_are_refused(element, words):
    with pytest.raises(ValueError, match=words):
        ElementSpec.of(element)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            (np.zeros((1, 3), np.float32), np.int32(1)),
            r"^Output shape is not fully defined: element 4 .*float32\[1, 3\]",
        ),
        (
            (np.zeros((2, 3), np.int32), np.int32(1)),
            r"^element 4 of the data set is \(int32\[2, 3\], int32\[\]\), and the",
        ),
        ((np.zeros((2, 3), np.float32),), r"^element 4 of the data set is \(float32\[2, 3\],\), and the first was"),
    ],
)
def test_an_element_that_is_not_like_the_first_is_refused(other, words):
    with pytest.raises(ValueError, match=words):
        ElementSpec.of(PAIR).flatten(4, other)


class Declared:
    def __init__(self, *shapes):
        self.element_spec = [Shaped(shape) for shape in shapes]


class Shaped:
    def __init__(self, shape):
        self.shape = shape


def test_incomplete_declared_shapes_are_refused():
    check_declared(Declared((2, 3), ()))
    check_declared([1, 2])
    with pytest.raises(ValueError, match=r"Output shape \(None, 3\) is not fully defined; .*drop_remainder=True"):
        check_declared(Declared((2,), (None, 3)))
