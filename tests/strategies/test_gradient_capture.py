"""Capture of gradients of marked arrays, out of pipelines; nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strategies import GradientCaptureContext, capture_upstream_gradients


def tanh_of_square(x):
    return jnp.tanh(capture_upstream_gradients(x**2, tag="tanh_grad"))


SLOPE = 1 - np.tanh(0.49) ** 2


def test_a_mark_changes_nothing():
    """The forward pass and the gradient are the same with a context and without."""
    plain = jax.value_and_grad(lambda x: jnp.tanh(x**2))(0.7)
    assert jax.value_and_grad(tanh_of_square)(0.7) == plain
    with GradientCaptureContext() as context:
        assert context.value_and_grad(tanh_of_square)(0.7) == plain


def test_the_gradient_of_a_marked_array_is_captured():
    """The tag names the gradient of tanh; the latest differentiation counts."""
    context = GradientCaptureContext()
    context.grad(tanh_of_square)(0.7)
    assert context.captured_gradients.keys() == {"tanh_grad"}
    assert context.captured_gradients["tanh_grad"] == pytest.approx(SLOPE)
    context.grad(tanh_of_square)(0.0)
    assert context.captured_gradients["tanh_grad"] == 1


def test_marks_in_compiled_functions_are_found():
    """A compiled function is called in another one; every call captures its gradient."""
    outlined = jax.jit(tanh_of_square)

    @jax.jit
    def program(x):
        context = GradientCaptureContext()
        return context.grad(outlined)(x), context.captured_gradients

    for x in (0.7, 0.2):
        gradient, captured = program(x)
        assert captured["tanh_grad"] == pytest.approx(1 - np.tanh(x**2) ** 2)
        assert gradient == pytest.approx(2 * x * captured["tanh_grad"])


def test_several_marks_arguments_and_results_are_captured():
    def function(weights, x):
        first = capture_upstream_gradients(x @ weights["a"], "first")
        unused = capture_upstream_gradients(first * 2, "unused")
        del unused
        last = capture_upstream_gradients(first * weights["b"] + 1, "last")
        return jnp.sum(last**2), {"last": last}

    weights, x = {"a": jnp.ones((2, 3)), "b": jnp.arange(3.0)}, jnp.ones((4, 2))
    context = GradientCaptureContext()
    (value, aux), (of_weights, of_x) = context.value_and_grad(function, (0, 1), has_aux=True)(weights, x)
    last = np.tile(2 * np.arange(3.0) + 1, (4, 1))
    assert value == np.sum(last**2)
    np.testing.assert_array_equal(aux["last"], last)
    captured = context.captured_gradients
    np.testing.assert_array_equal(captured["last"], 2 * last)
    np.testing.assert_array_equal(captured["first"], 2 * last * np.arange(3.0))
    np.testing.assert_array_equal(captured["unused"], np.zeros((4, 3)))
    expected = jax.grad(lambda *all_: function(*all_)[0], (0, 1))(weights, x)
    jax.tree.map(np.testing.assert_array_equal, (of_weights, of_x), expected)
    gradient, aux = context.grad(function, has_aux=True)(weights, x)
    np.testing.assert_array_equal(gradient["b"], of_weights["b"])
    assert aux.keys() == {"last"}


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (lambda x: capture_upstream_gradients(tanh_of_square(x), "tanh_grad"), ValueError, "marks two arrays"),
        (
            lambda x: jax.lax.fori_loop(0, 2, lambda _, y: capture_upstream_gradients(y, "inside") * 2, x),
            ValueError,
            "'inside' of a captured gradient is in a loop, a branch or",
        ),
        (lambda x: capture_upstream_gradients(x, 3), TypeError, "is 3, a int; use a string"),
        (lambda x: x * capture_upstream_gradients(jnp.int32(1), "one"), TypeError, "int32, which has no gradient"),
    ],
)
def test_gradients_that_cannot_be_captured_are_refused(function, error, words):
    with pytest.raises(error, match=words):
        GradientCaptureContext().grad(function)(0.5)


def test_reading_captured_gradients_before_differentiating_is_refused():
    with pytest.raises(RuntimeError, match="no gradient was captured yet"):
        _ = GradientCaptureContext().captured_gradients
