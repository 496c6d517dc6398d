"""Text of programs: the same for the same code, and different for different numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from strategies.jax.comparing.agreement import lines_of, scalars_by_name

POINTS = np.linspace(0, 1, 12, dtype=np.float32).reshape(4, 3)


def text(function, *arguments):
    return lines_of(jax.make_jaxpr(function)(*(arguments or (POINTS,))))


def scaled(factor):
    return lambda x: jnp.sum(x * factor)


def looped(operation):
    return lambda x: jax.lax.scan(lambda carried, row: (operation(carried, row), None), x[0], x)[0]


def branched(one, other):
    return lambda x: jax.lax.cond(x[0, 0] > 0, one, other, x)


def test_the_text_shows_types_operations_and_numbers():
    assert text(lambda x: -x + 1.5, np.float32(3)) == [
        "program0:",
        "takes v0:float32[]",
        "v1:float32[] = neg v0",
        "v2:float32[] = add v1 1.5",
        "returns v2",
    ]


def test_functions_made_twice_have_the_same_text():
    assert text(scaled(2.0)) == text(scaled(2.0))


@pytest.mark.parametrize("other", [2.0000002, -2.0, jnp.float32(2), jnp.full(3, 2.0), np.nan])
def test_other_numbers_change_the_text(other):
    assert text(scaled(2.0)) != text(scaled(other))


def test_numbers_have_all_their_digits():
    one, next_one = np.float32(0.1), np.nextafter(np.float32(0.1), np.float32(1))
    assert text(scaled(one)) != text(scaled(next_one))


@pytest.mark.parametrize("size", [3, 3000])
def test_values_of_captured_arrays_change_the_text(size):
    weights = np.random.default_rng(0).random(size).astype(np.float32)
    others = weights.copy()
    others[-1] = np.nextafter(others[-1], np.float32(2))
    assert text(scaled(weights), weights) == text(scaled(weights.copy()), weights)
    assert text(scaled(weights), weights) != text(scaled(others), weights)


@pytest.mark.parametrize("size", [16, 9000])
def test_numbers_of_captured_arrays_that_change_places_change_the_text(size):
    mask = np.float32(np.arange(size) < size // 2)
    assert text(scaled(mask), mask) != text(scaled(1 - mask), mask)


def test_captured_random_keys_change_the_text():
    def drawn(seed):
        key = jax.random.key(seed)
        return lambda x: x + jax.random.normal(key, x.shape)

    assert text(drawn(1)) == text(drawn(1))
    assert text(drawn(1)) != text(drawn(2))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: jax.nn.relu(x).sum(), lambda x: jax.nn.relu6(x).sum()),
        (looped(jnp.add), looped(jnp.subtract)),
        (branched(jnp.sin, jnp.cos), branched(jnp.cos, jnp.sin)),
        (lambda x: x.sum(0), lambda x: x.sum(1)),
        (lambda x: x.astype(jnp.bfloat16), lambda x: x.astype(jnp.float16)),
        (jax.grad(lambda x: (x**2).sum()), jax.grad(lambda x: (x**3).sum())),
    ],
)
def test_code_inside_loops_branches_and_calls_changes_the_text(one, other):
    assert text(one) == text(one)
    assert text(one) != text(other)


def test_code_that_affects_no_result_does_not_change_the_text():
    def printing(x):
        jax.debug.print("the first is {}", x[0, 0] * 3)
        return x * 2

    assert text(printing) == text(lambda x: x * 2)


def test_a_function_that_is_called_from_many_places_is_written_once():
    @jax.jit
    def doubled(x):
        return x + x

    lines = text(lambda x: doubled(doubled(doubled(x))))
    assert [line for line in lines if " add" in line] == ["v1:float32[4, 3] = add v0 v0"]


def test_addresses_of_objects_are_not_in_the_text():
    """Addresses in custom derivatives and callbacks are left out."""

    def calling(x):
        back = jax.pure_callback(functools.partial(np.multiply, 2), jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return jax.nn.softmax(back) + jax.nn.silu(x)

    lines = text(jax.checkpoint(calling))
    assert lines == text(jax.checkpoint(calling))
    assert not [line for line in lines if " at 0x" in line]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (optax.sgd(0.1), optax.sgd(0.2)),
        (optax.adam(0.1), optax.adam(0.1, b2=0.99)),
        (optax.adam(0.1), optax.adamw(0.1)),
        (optax.sgd(optax.cosine_decay_schedule(0.1, 10)), optax.sgd(optax.cosine_decay_schedule(0.1, 11))),
        (optax.chain(optax.clip(1.0), optax.sgd(0.1)), optax.chain(optax.clip(2.0), optax.sgd(0.1))),
    ],
)
def test_hyperparameters_of_optimizers_change_the_text(one, other):
    def of(optimizer):
        return text(optimizer.update, POINTS, optimizer.init(POINTS), POINTS)

    assert of(one) == of(one)
    assert of(one) != of(other)


def test_scalars_have_their_paths():
    tree = {"rate": jnp.float32(0.1), "count": jnp.zeros((), jnp.int32), "w": np.ones(3), "key": jax.random.key(0)}
    assert scalars_by_name(tree) == {"['count']": "0", "['rate']": "0.1"}
