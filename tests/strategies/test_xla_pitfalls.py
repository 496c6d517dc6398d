"""Products rounded by themselves: the bits of NumPy, which rounds after each operation, at any length."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import strategies
from strategies.jax.programs.xla_pitfalls import (
    THREADS_RESERVE_BYTES,
    behind,
    check_no_float64,
    describe_lack,
    is_true,
    with_rounded_products,
)

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


def test_the_reducer_of_a_reduction_is_no_call():
    """A reduction by a custom function contains a program with its own number of operands."""

    def total(x):
        return jax.lax.reduce(x, np.float32(0), lambda a, b: a + jnp.abs(b), (0,))

    np.testing.assert_array_equal(jax.jit(with_rounded_products(total))(ROWS[0, :33]), total(ROWS[0, :33]))


@pytest.mark.parametrize("length", [1, 33, 65_537])
def test_roots_are_rounded_before_further_operations(length):
    a, b = np.abs(ROWS[0, :length]), ROWS[1, :length]
    quotient, reciprocal, total = jax.jit(
        with_rounded_products(lambda a, b: (b / jnp.sqrt(a), jax.lax.rsqrt(a), jnp.sqrt(a) + b))
    )(a, b)
    root = np.sqrt(a)
    np.testing.assert_array_equal(quotient, b / root)
    np.testing.assert_array_equal(reciprocal, np.float32(1) / root)
    np.testing.assert_array_equal(total, root + b)


def test_results_match_a_scan_and_keep_their_structure():
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
    """`ShardedStateUpdate` relies on this: an update of a piece has the bits of that piece of the update."""
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


# ---- refusal of values that JAX would silently make float32


@pytest.mark.parametrize("value", [np.float64(1), {"x": [np.zeros(2)]}])
def test_float64_is_refused_anywhere_in_a_tree(value):
    with pytest.raises(TypeError, match="Unsupported data type for infeed: float64; convert it to float32"):
        check_no_float64(value, "infeed")


@pytest.mark.parametrize("value", [1.0, np.float32(1), {"x": (jnp.ones(2), np.int64(3))}, None])
def test_other_values_are_returned_unchanged(value):
    assert check_no_float64(value) is value


# ---- a value in a compiled program that waits for another one


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool"])
@pytest.mark.parametrize("value", [0, 1])
def test_a_waiting_value_is_unchanged_by_the_awaited_value(dtype, value):
    waited_for = jnp.full((2, 2), value).astype(dtype)
    found = jax.jit(lambda condition, array: behind(is_true(condition), array))([waited_for], jnp.arange(3.0))
    assert found.tolist() == [0, 1, 2]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_values_can_be_awaited(value):
    assert bool(jax.jit(is_true)([jnp.full(1, value)]))


def test_empty_arrays_are_ready_at_once():
    assert bool(is_true([]))
    assert bool(is_true([jnp.zeros((0, 3))]))


def test_the_compiler_cannot_remove_the_wait():
    def program(waited_for, array):
        return behind(is_true([waited_for]), array)

    text = jax.jit(program).lower(jnp.zeros(3), jnp.ones(3)).compile().as_text()
    entry = text[text.index("ENTRY") :]
    assert entry.count("parameter(") == 2
    assert "constant(true)" not in entry


# ---- the message about a limit of address space that is too low for XLA


ROOT = Path(__file__).parents[2]
PROGRAM = """\
import resource
import strategies
from strategies.jax.programs.xla_pitfalls import THREADS_RESERVE_BYTES, _used_bytes
resource.setrlimit(resource.RLIMIT_AS, (_used_bytes() + THREADS_RESERVE_BYTES - (300 << 20), resource.RLIM_INFINITY))
strategy = strategies.IPUStrategy()
"""
STARTED = PROGRAM.replace("resource.setrlimit", "import jax; jax.devices(); resource.setrlimit")


def test_a_sufficient_limit_is_not_mentioned():
    assert describe_lack(10**9 + THREADS_RESERVE_BYTES, 10**9) == ""


def test_an_insufficient_limit_is_explained_with_its_numbers():
    assert describe_lack(15 * 10**8, 45 * 10**7).startswith(
        "this process may use 1.50 GB of address space (ulimit -v) and uses 0.45 GB; XLA's threads reserve 1.34 GB"
    )


@pytest.mark.complete
def test_the_limit_is_the_first_message_of_the_process():
    said = run(PROGRAM).stderr
    assert said.startswith("this process may use ")
    assert "raise the limit" in said.splitlines()[0]


def test_the_limit_is_not_mentioned_if_xla_has_started():
    assert "this process may use" not in run(STARTED).stderr


def run(program):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
