"""Products are rounded by themselves: the bits of NumPy, which rounds after each operation, at any length."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import strategies
from strategies.programs.xla_pitfalls import with_rounded_products

ROWS = np.random.default_rng(2).standard_normal((4, 65_537)).astype(np.float32)


def two_products(a, b, c, d):
    return a * b + c * d


def in_a_loop(a, b, c, d):
    return jax.lax.fori_loop(0, 1, lambda _, total: total + two_products(a, b, c, d), jnp.zeros_like(a))


def while_it_is_wanted(a, b, c, d):
    def one_more(state):
        return state[0] + 1, state[1] + two_products(a, b, c, d)

    return jax.lax.while_loop(lambda state: state[0] < 1, one_more, (0, jnp.zeros_like(a)))[1]


def in_a_branch(a, b, c, d):
    return jax.lax.cond(a[0] > 100, lambda: a, lambda: two_products(a, b, c, d))


@jax.custom_jvp
def with_its_own_gradient(a, b, c, d):
    return jax.jit(two_products)(a, b, c, d)


with_its_own_gradient.defjvp(lambda numbers, changes: (two_products(*numbers), changes[0]))


@pytest.mark.parametrize("length", [1, 33, 65_537])
@pytest.mark.parametrize(
    "function",
    [two_products, in_a_loop, while_it_is_wanted, in_a_branch, with_its_own_gradient, jax.remat(two_products)],
    ids=["plain", "loop", "while", "branch", "custom_jvp", "remat"],
)
def test_no_product_is_contracted_with_a_sum(function, length):
    numbers = ROWS[:, :length]
    found = jax.jit(with_rounded_products(function))(*numbers)
    np.testing.assert_array_equal(found, two_products(*numbers))


def test_what_combines_elements_is_no_call():
    """A reduction by a function of one's own has a program in it, and as many operands as that takes."""

    def total(x):
        return jax.lax.reduce(x, np.float32(0), lambda a, b: a + jnp.abs(b), (0,))

    np.testing.assert_array_equal(jax.jit(with_rounded_products(total))(ROWS[0, :33]), total(ROWS[0, :33]))


@pytest.mark.parametrize("length", [1, 33, 65_537])
def test_roots_are_rounded_before_anything_is_done_with_them(length):
    a, b = np.abs(ROWS[0, :length]), ROWS[1, :length]
    quotient, reciprocal, total = jax.jit(
        with_rounded_products(lambda a, b: (b / jnp.sqrt(a), jax.lax.rsqrt(a), jnp.sqrt(a) + b))
    )(a, b)
    root = np.sqrt(a)
    np.testing.assert_array_equal(quotient, b / root)
    np.testing.assert_array_equal(reciprocal, np.float32(1) / root)
    np.testing.assert_array_equal(total, root + b)


def test_results_are_those_of_a_scan_and_keep_their_structure():
    def sums(tree, *, scale):
        total, every = jax.lax.scan(lambda total, row: (total + scale * row, total), tree["first"], tree["rows"])
        return {"total": total, "every": every}, jnp.int32(3)

    tree = {"first": ROWS[0, :33], "rows": ROWS[1:, :33]}
    (found, three), (wanted, _) = (jax.jit(each)(tree, scale=2.0) for each in (with_rounded_products(sums), sums))
    assert three == 3
    jax.tree.map(np.testing.assert_array_equal, found, wanted)  # 2 times a number is exact


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_products_are_rounded_to_16_bits(dtype):
    a, b, c, d = numbers = [jnp.asarray(row[:129], dtype) for row in ROWS]
    wide = np.float32(np.asarray(jnp.asarray(np.float32(a) * np.float32(b), dtype)))
    wide += np.float32(np.asarray(jnp.asarray(np.float32(c) * np.float32(d), dtype)))
    found = jax.jit(with_rounded_products(two_products))(*numbers)
    np.testing.assert_array_equal(np.float32(found), np.float32(jnp.asarray(wide, dtype)))


OPTIMIZERS = {
    "schedule_free": contrib.schedule_free_adamw(0.1, warmup_steps=2),
    "multi_steps": optax.MultiSteps(optax.adam(0.01), 2),
    "clipped": optax.chain(strategies.clip_by_global_norm(0.5), optax.adamw(0.01)),
    "adan": optax.adan(0.01),
    "rmsprop": optax.rmsprop(0.01),
}


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(optimizer, id=name, marks=() if name in ("schedule_free", "clipped") else pytest.mark.complete)
        for name, optimizer in OPTIMIZERS.items()
    ],
)
def test_parts_of_any_length_are_updated_as_the_whole(optimizer):
    """As `ShardedStateUpdate` relies on it: an update of a piece has the bits of that piece of the update."""
    optimizer = optax.with_extra_args_support(optimizer)

    @jax.jit
    def update(variable, state, gradient):
        change, state = with_rounded_products(optimizer.update)(gradient, state, variable, gradient_norm=jnp.float32(3))
        return optax.apply_updates(variable, change), state

    def trained(piece):
        variable, state = jnp.asarray(ROWS[0, piece]), optimizer.init(jnp.asarray(ROWS[0, piece]))
        for gradient in ROWS[1:]:
            variable, state = update(variable, state, gradient[piece])
        return np.asarray(variable)

    whole = trained(slice(None))
    for piece in (slice(0, 1), slice(3, 36), slice(30_000, 51_001)):
        np.testing.assert_array_equal(trained(piece), whole[piece])
