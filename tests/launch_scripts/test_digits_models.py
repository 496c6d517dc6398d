"""Shapes, names and seeds of the reference models."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from popdist.examples.digits_models import MODELS, convolve, max_pool


def shapes(variables):
    return {
        "/".join(key.key for key in path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(variables)
    }


@pytest.mark.parametrize(("size", "flat"), [(8, 72), (28, 1352), (9, 72), (4, 8)])
def test_the_convolutional_network_has_the_shapes_of_the_mnist_examples(size, flat):
    assert shapes(MODELS["cnn"].init(0, (size, size, 1))) == {
        "conv/kernel": (3, 3, 1, 8),
        "conv/bias": (8,),
        "hidden/kernel": (flat, 8),
        "hidden/bias": (8,),
        "logits/kernel": (8, 10),
        "logits/bias": (10,),
    }


def test_the_perceptron_has_two_hidden_layers_of_1024():
    assert shapes(MODELS["mlp"].init(0, (28, 28, 1))) == {
        "hidden1/kernel": (784, 1024),
        "hidden1/bias": (1024,),
        "hidden2/kernel": (1024, 1024),
        "hidden2/bias": (1024,),
        "logits/kernel": (1024, 10),
        "logits/bias": (10,),
    }


@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize("shape", [(8, 8, 1), (28, 28, 1), (9, 12, 1), (5, 4, 3)])
def test_a_model_turns_images_of_any_size_into_ten_logits(model, shape):
    variables = MODELS[model].init(1, shape)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype("float32")}
    with jax.numpy_rank_promotion("allow"):
        logits = jax.jit(MODELS[model].apply)(variables, np.ones((3, *shape), np.float32))
    assert (logits.shape, logits.dtype) == ((3, 10), jnp.float32)


@pytest.mark.parametrize("model", sorted(MODELS))
def test_variables_depend_only_on_the_seed(model):
    first, again, other = (MODELS[model].init(seed, (8, 8, 1)) for seed in (3, 3, 4))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert any(not np.array_equal(*leaves) for leaves in zip(*map(jax.tree.leaves, (first, other)), strict=True))


@pytest.mark.parametrize("model", sorted(MODELS))
def test_every_variable_gets_a_gradient_after_one_update(model):
    images = np.random.default_rng(0).random((16, 8, 8, 1), np.float32)

    def loss(variables):
        return jax.nn.logsumexp(MODELS[model].apply(variables, images), axis=-1).mean() ** 2 + (
            MODELS[model].apply(variables, images)[:, 3].mean()
        )

    gradient = jax.jit(jax.grad(loss))
    variables = MODELS[model].init(0, (8, 8, 1))
    variables = jax.tree.map(
        lambda v, g: np.asarray(v) - np.float32(0.1) * np.asarray(g), variables, gradient(variables)
    )
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(jax.device_get(gradient(variables))))


def test_max_pool_takes_the_maximum_of_every_window_and_omits_odd_rows():
    images = np.arange(2 * 5 * 4).reshape(2, 5, 4, 1)
    assert max_pool(images)[..., 0].tolist() == [[[5, 7], [13, 15]], [[25, 27], [33, 35]]]


def test_too_small_images_are_refused():
    with pytest.raises(ValueError, match="images are 3x8; the convolutional network needs at least 4x4"):
        MODELS["cnn"].init(0, (3, 8, 1))


@pytest.mark.parametrize("kernel_shape", [(3, 3, 1, 8), (2, 3, 4, 5), (1, 1, 2, 1)])
@pytest.mark.parametrize("size", [(3, 3), (7, 5)])
def test_convolutions_and_their_gradients_equal_those_of_jax(kernel_shape, size):
    random = np.random.default_rng(0)
    kernel = random.standard_normal(kernel_shape, np.float32)
    images = random.standard_normal((kernel_shape[2], *size, 6), np.float32)

    def of_jax(kernel, images):
        return jax.lax.conv_general_dilated(images, kernel, (1, 1), "VALID", dimension_numbers=("CHWN", "HWIO", "CHWN"))

    def with_gradients(function, cotangents):
        result, gradients_of = jax.vjp(function, kernel, images)
        return result, *gradients_of(cotangents)

    cotangents = random.standard_normal(jax.eval_shape(of_jax, kernel, images).shape, np.float32)
    found, expected = (jax.jit(functools.partial(with_gradients, each))(cotangents) for each in (convolve, of_jax))
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
