"""Casts of batches in the compiled step: batches travel in a small dtype, with the bits of an earlier cast."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import strategies

RNG = np.random.default_rng(7)
IMAGES = RNG.integers(0, 256, (90, 6, 6), np.uint8)
LABELS = RNG.integers(0, 10, 90).astype(np.int32)


def loss_fn(variables, batch, key):
    hidden = jnp.tanh(batch["image"].reshape(len(batch["image"]), -1) @ variables["a"] + 0.5)
    losses = optax.softmax_cross_entropy_with_integer_labels(hidden @ variables["b"], batch["label"])
    return losses.mean(), {}


def trained(strategy, images, loss_fn=loss_fn, **options):
    """Return the fingerprint of some steps, and the bytes of images moved in each step."""
    dataset = strategy.distribute_dataset({"image": images, "label": LABELS}, batch_size=7, seed=1, **options)
    trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1))
    drawn = np.random.default_rng(0).normal
    state = trainer.init({"a": np.float32(drawn(0, 0.1, (36, 17))), "b": np.float32(drawn(0, 0.1, (17, 10)))})
    moved = set()
    for batch in dataset.epoch(0):
        moved.add(batch["image"].nbytes)
        state, _ = trainer.step(state, batch)
    return strategies.fingerprint(state.variables), moved


@pytest.fixture(scope="module")
def four():
    return strategies.IPUStrategy(num_replicas=4)


def test_bytes_cast_on_the_device_train_like_floats_and_move_a_quarter_of_the_bytes(four):
    before = trained(four, IMAGES.astype(np.float32) * np.float32(1 / 255))
    cast = strategies.casting(loss_fn, {"image": strategies.Cast(jnp.float32, scale=1 / 255)})
    on_device = trained(four, IMAGES, cast)
    assert on_device[0] == before[0]
    assert (on_device[1], before[1]) == ({4 * 7 * 36}, {4 * 7 * 36 * 4})


def test_floats_travel_in_half_the_bytes(four):
    floats = (IMAGES / 255).astype(np.float32)
    before = trained(four, floats.astype(np.float16).astype(np.float32))
    cast = strategies.casting(loss_fn, {"image": jnp.float32})
    on_device = trained(four, floats, cast, transfer_dtype={"image": np.float16})
    assert on_device == (before[0], {4 * 7 * 36 * 2})


def cast(batch, dtypes):
    return strategies.casting(lambda variables, batch: batch, dtypes)(None, batch)


def test_dtypes_are_given_for_all_leaves_or_in_the_structure_of_the_batch():
    pair = (np.ones(3, np.uint8), {"x": np.ones(3, np.int8), "y": np.ones(3, np.int8)})
    everywhere = cast(pair, jnp.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(everywhere)} == {np.dtype(np.float32)}
    first, second = cast(pair, (None, {"x": jnp.bfloat16}))
    assert (first.dtype, second["x"].dtype, second["y"].dtype) == (np.uint8, jnp.bfloat16, np.int8)


def test_the_mask_of_a_padded_batch_is_kept():
    masked = cast(strategies.Masked({"x": np.ones(3, np.uint8)}, np.ones(3, bool)), {"x": jnp.float32})
    assert (masked.values["x"].dtype, masked.mask.dtype) == (jnp.float32, bool)


@pytest.mark.parametrize(
    ("dtypes", "words"),
    [
        ({"image": np.float32}, r"the batch has no 'image'; it has 'x', 'y'"),
        (
            {"x": {"z": np.float32}},
            r"dtypes were given for 'z' of the batch\['x'\], which is one array of shape \(3,\)",
        ),
        ((np.float32,), "1 dtypes were given for the batch, which is a dict of 2"),
    ],
)
def test_dtypes_that_do_not_fit_the_batch_are_refused(dtypes, words):
    with pytest.raises(ValueError, match=words):
        cast({"x": np.ones(3, np.uint8), "y": np.ones(2)}, dtypes)


@pytest.mark.parametrize(
    ("rows", "dtype", "error", "words"),
    [
        (np.arange(300), np.uint8, ValueError, "the batch has numbers from 0 to 299, which uint8 cannot hold"),
        (np.full(300, 200, np.uint8), np.int8, ValueError, "numbers from 200 to 200, which int8 cannot hold"),
        (np.full(300, -1, np.int32), np.uint32, ValueError, "numbers from -1 to -1, which uint32 cannot hold"),
        (np.full(300, 2), np.bool_, ValueError, "numbers from 2 to 2, which bool cannot hold"),
        (np.ones(300), np.uint8, TypeError, "the batch is float64 and cannot travel as uint8"),
        (np.ones(300, np.complex64), np.float32, TypeError, "complex64 and cannot travel as float32"),
    ],
)
def test_casts_that_would_change_numbers_are_refused(four, rows, dtype, error, words):
    dataset = four.distribute_dataset(rows, 75, shuffle=False, transfer_dtype=dtype)
    with pytest.raises(error, match=words):
        next(dataset.epoch(0))
