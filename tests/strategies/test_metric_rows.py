"""Values that may be logged, and the time of reading them."""

import jax.numpy as jnp
import numpy as np
import pytest

from strategies.sinks.sink import Row, reading_of


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (3, 3),
        (True, 1),
        (0.1, 0.1),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.int64(7), 7),
        (np.bool_(True), 1),
        (np.array(2.5), 2.5),
        (jnp.float32(0.1), float(np.float32(0.1))),
        (jnp.bfloat16(1.5), 1.5),
        (jnp.int32(4), 4),
    ],
)
def test_numbers_and_arrays_of_one_are_plain_numbers(value, number):
    read = reading_of({"a": value})()
    assert read == {"a": number}
    assert type(read["a"]) is type(number)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"a": np.ones((2, 3))}, ValueError, r"metric 'a' has the shape \[2, 3\], but sinks take one number"),
        ({"a": jnp.ones(1)}, ValueError, r"metric 'a' has the shape \[1\], .*; log its mean, or give each element"),
        ({"a": "0.5"}, TypeError, "metric 'a' is a str, which is not a number; log numbers"),
        ({"a": None}, TypeError, "metric 'a' is a NoneType"),
        ({"a": [1.0]}, TypeError, "metric 'a' is a list"),
        ({"a": 1j}, TypeError, "metric 'a' is a complex"),
        ({"a": jnp.complex64(1)}, TypeError, "metric 'a' is a "),
        ({3: 1.0}, TypeError, "the name of a metric is 3, which is not a string"),
        ({"": 1.0}, ValueError, "the name of a metric is '', which is empty or not printable"),
        ({"a\nb": 1.0}, ValueError, "is empty or not printable"),
    ],
)
def test_values_that_are_no_scalars_are_refused(values, error, message):
    with pytest.raises(error, match=message):
        reading_of(values)


def test_mutable_values_are_read_at_once():
    array = np.array(1.0)
    read = reading_of({"array": array})
    array[()] = 9
    assert read() == {"array": 1.0}


def test_tensors_of_pytorch_are_read_at_once_as_numbers():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    loss, count = torch.tensor(0.5, requires_grad=True), torch.tensor(2**60)
    read = reading_of({"loss": loss, "count": count})
    loss.data.fill_(9)
    assert read() == {"loss": 0.5, "count": 2**60}
    with pytest.raises(ValueError, match=r"metric 'a' has the shape \[4\]"):
        reading_of({"a": torch.ones(4)})


def test_numbers_are_read_once_and_only_on_demand():
    read = []

    def reading():
        read.append(1)
        return {"loss": 0.5}

    row = Row(1, reading)
    assert read == []
    assert (row.values, row.values, read) == ({"loss": 0.5}, {"loss": 0.5}, [1])
