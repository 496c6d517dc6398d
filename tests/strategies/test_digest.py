import hashlib
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import strategies
from strategies import fingerprint
from strategies.core.agreement import instances_that_differ
from strategies.jax.comparing.agreement import digest_of, flip_bit


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "bool"])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (7, 5), (0,)])
def test_every_flipped_bit_shows(dtype, shape):
    array = np.asarray(jnp.ones(shape, dtype))
    whole = digest_of({"a": jnp.asarray(array)})
    assert whole == digest_of({"a": jnp.asarray(array)})
    octets = array.reshape(-1).view(np.uint8)
    for position in range(octets.size):
        for bit in range(8 if dtype != "bool" else 1):
            changed = octets.copy()
            changed[position] ^= 1 << bit
            other = digest_of({"a": jnp.asarray(changed.view(array.dtype).reshape(shape))})
            assert other[0] != whole[0]
            assert other[1] != whole[1]


def test_arrays_that_change_places_show():
    one, two = jnp.arange(8.0), jnp.arange(8.0) + 1
    assert digest_of([one, two]) != digest_of([two, one])


@pytest.mark.parametrize("size", [16, 4096 * 2 * 3 + 6])
def test_numbers_that_change_places_show(size):
    """Also if whole words of 64 bits move, as in masks of halves, rows of an identity and signs."""
    mask = np.arange(size, dtype=np.float32) < size // 2
    rows = np.eye(4, dtype=np.float32).repeat(size // 4, 0).reshape(-1)[: 2 * size]
    arrays = [mask.astype(np.float32), 1 - mask.astype(np.float32), *(np.roll(rows, 2 * by) for by in range(4))]
    arrays += [np.roll(np.arange(size, dtype=np.float32), by) for by in (0, 2, size // 2)]
    assert len({digest_of(array) for array in arrays}) == len(arrays)


def test_random_keys_are_compared():
    assert digest_of(jax.random.key(0)) != digest_of(jax.random.key(1))


def test_flip_bit_flips_one_bit():
    variables = {"a": jnp.ones(3), "b": jnp.ones(2)}
    flipped = flip_bit(variables)
    words = [np.asarray(tree["a"]).view(np.uint32) for tree in (variables, flipped)]
    assert (words[0] ^ words[1]).tolist() == [1 << 16, 0, 0]
    assert digest_of(flipped) != digest_of(variables)


@pytest.mark.parametrize(
    ("digests", "differ"),
    [
        ("aaa", []),
        ("a", []),
        ("aba", [1]),
        ("baa", [0]),
        ("abaca", [1, 3]),
        ("ab", [0, 1]),
        ("aabb", [0, 1, 2, 3]),
        ("abc", [0, 1, 2]),
    ],
)
def test_the_minority_of_digests_is_named(digests, differ):
    assert instances_that_differ([(ord(each), 0) for each in digests]) == differ


def test_the_distance_is_not_negative():
    import optax

    with pytest.raises(ValueError, match="digest_every is -1"):
        strategies.Trainer(strategies.IPUStrategy(1), lambda *_: 0.0, optax.sgd(1.0), digest_every=-1)


# ---- a fingerprint is equal if and only if the bits are


TREE = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": [np.float32(1), np.int8([1, 2])]}


def test_a_fingerprint_is_the_sha256_of_the_leaves_in_tree_order():
    expected = hashlib.sha256(TREE["a"].tobytes() + TREE["b"][0].tobytes() + TREE["b"][1].tobytes())
    assert fingerprint(TREE) == expected.hexdigest()


def test_a_fingerprint_does_not_depend_on_the_kind_of_array():
    on_device = {"a": jnp.asarray(TREE["a"]), "b": [jnp.float32(1), jnp.int8([1, 2])]}
    assert fingerprint(on_device) == fingerprint(TREE)


def test_a_fingerprint_does_not_depend_on_the_order_of_insertion():
    assert fingerprint({"b": TREE["b"], "a": TREE["a"]}) == fingerprint(TREE)


def test_a_transposed_array_has_the_fingerprint_of_its_copy():
    assert fingerprint(TREE["a"].T) == fingerprint(np.ascontiguousarray(TREE["a"].T))


@pytest.mark.parametrize("other", [np.nextafter(np.float32(1), np.float32(2)), np.float32(-1), np.float32("nan")])
def test_a_fingerprint_shows_a_single_bit(other):
    assert fingerprint([np.float32(1), other]) != fingerprint([np.float32(1), np.float32(1)])


def test_a_fingerprint_distinguishes_minus_zero_from_zero():
    assert fingerprint(np.float32(-0.0)) != fingerprint(np.float32(0.0))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "bool", "int64"])
def test_a_fingerprint_takes_every_dtype(dtype):
    values = np.ones(3, bool) if dtype == "bool" else np.asarray(jnp.ones(3, dtype if dtype != "int64" else "int32"))
    assert fingerprint(values) == hashlib.sha256(values.tobytes()).hexdigest()


def test_the_fingerprint_of_nothing_is_that_of_no_bytes():
    assert fingerprint({}) == fingerprint(np.zeros((0, 3))) == hashlib.sha256(b"").hexdigest()


def test_a_fingerprint_is_the_same_in_another_process(in_new_process):
    program = "import numpy as np, strategies\nprint(strategies.fingerprint({'x': np.arange(9, dtype=np.float32)}))\n"
    printed = in_new_process(program, PYTHONHASHSEED=str(os.getpid() % 1000))
    assert printed.strip() == fingerprint({"x": np.arange(9, dtype=np.float32)})
