"""A fingerprint is equal if and only if the bits are."""

import hashlib
import os

import jax.numpy as jnp
import numpy as np
import pytest

from strategies import fingerprint

TREE = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": [np.float32(1), np.int8([1, 2])]}


def test_is_the_sha256_of_the_leaves_in_tree_order():
    expected = hashlib.sha256(TREE["a"].tobytes() + TREE["b"][0].tobytes() + TREE["b"][1].tobytes())
    assert fingerprint(TREE) == expected.hexdigest()


def test_does_not_depend_on_who_keeps_the_bits():
    on_device = {"a": jnp.asarray(TREE["a"]), "b": [jnp.float32(1), jnp.int8([1, 2])]}
    assert fingerprint(on_device) == fingerprint(TREE)


def test_does_not_depend_on_the_order_of_insertion():
    assert fingerprint({"b": TREE["b"], "a": TREE["a"]}) == fingerprint(TREE)


def test_of_a_transposed_array_is_that_of_its_copy():
    assert fingerprint(TREE["a"].T) == fingerprint(np.ascontiguousarray(TREE["a"].T))


@pytest.mark.parametrize("other", [np.nextafter(np.float32(1), np.float32(2)), np.float32(-1), np.float32("nan")])
def test_shows_a_single_bit(other):
    assert fingerprint([np.float32(1), other]) != fingerprint([np.float32(1), np.float32(1)])


def test_tells_minus_zero_from_zero():
    assert fingerprint(np.float32(-0.0)) != fingerprint(np.float32(0.0))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "bool", "int64"])
def test_takes_every_dtype(dtype):
    values = np.ones(3, bool) if dtype == "bool" else np.asarray(jnp.ones(3, dtype if dtype != "int64" else "int32"))
    assert fingerprint(values) == hashlib.sha256(values.tobytes()).hexdigest()


def test_of_nothing_is_that_of_no_bytes():
    assert fingerprint({}) == fingerprint(np.zeros((0, 3))) == hashlib.sha256(b"").hexdigest()


def test_is_the_same_in_another_process(in_new_process):
    program = "import numpy as np, strategies\nprint(strategies.fingerprint({'x': np.arange(9, dtype=np.float32)}))\n"
    printed = in_new_process(program, PYTHONHASHSEED=str(os.getpid() % 1000))
    assert printed.strip() == fingerprint({"x": np.arange(9, dtype=np.float32)})
