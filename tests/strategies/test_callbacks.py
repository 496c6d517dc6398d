"""Callbacks of a program, which run one after another in the order of the code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.extend import core

from strategies.jax.replicas.collective_equations import Collective, Reduce, ReplicaGroups, in_order

NUMBER = jax.ShapeDtypeStruct((), np.float32)


def say(seen, name, x):
    def called(x):
        seen.append(name)
        return np.float32(x + 1)

    return io_callback(called, NUMBER, x)


def straight(seen, x):
    return [say(seen, name, x) for name in range(6)]


def nested(seen, x):
    inner = jax.jit(lambda x: say(seen, "a", x) + say(seen, "b", x))
    y = inner(x)
    z = jax.lax.cond(x > 0, lambda x: say(seen, "c", x) + say(seen, "d", x), lambda x: x, x)
    return [y, z, say(seen, "e", x)]


def looping(seen, x):
    total, _ = jax.lax.scan(lambda c, x: (c + say(seen, "f", x) + say(seen, "g", x), None), x, jnp.ones(2))
    return [total, say(seen, "h", x)]


@pytest.mark.parametrize(
    ("function", "order", "results"),
    [
        (straight, [0, 1, 2, 3, 4, 5], [4.0] * 6),
        (nested, ["a", "b", "c", "d", "e"], [8.0, 8.0, 4.0]),
        (looping, ["f", "g", "f", "g", "h"], [11.0, 4.0]),
    ],
)
def test_callbacks_run_in_the_order_of_the_code(function, order, results):
    seen = []
    found = jax.jit(in_order(lambda x: function(seen, x)))(jnp.float32(3))
    assert [float(value) for value in found] == results
    assert seen == order


def test_callbacks_in_a_recomputed_block_run_in_the_order_of_the_code():
    """Values that replicas exchanged in a block of `jax.checkpoint` are kept, and not exchanged again."""
    seen = []

    def carry_out(collective, replica, value):
        seen.append((collective.name, replica))
        return 4 * value

    def total(name, x):
        return Collective(name, Reduce("sum"), ReplicaGroups(), 4, carry_out)(np.int32(2), x)

    loss = jax.checkpoint(lambda x: total("c", jnp.sin(total("b", jnp.sin(total("a", x))))))
    found = jax.jit(in_order(jax.grad(loss)))(jnp.float32(1))
    assert float(found) == pytest.approx(64 * np.cos(4) * np.cos(4 * np.sin(4)), rel=1e-5)
    names = ["a", "b", "c", "c/gradient", "b/gradient", "a/gradient"]
    assert seen == [(name, 2) for name in names]


def test_a_function_without_callbacks_is_unchanged():
    found = jax.jit(in_order(lambda tree: {"sum": tree["a"] + tree["b"]}))({"a": jnp.ones(2), "b": jnp.arange(2.0)})
    assert found["sum"].tolist() == [1, 2]


def test_each_callback_reads_the_result_of_the_one_before():
    """The program itself does not order these callbacks."""
    closed = jax.make_jaxpr(in_order(lambda x: straight([], x)))(jnp.float32(3))
    calls = [equation for equation in closed.jaxpr.eqns if equation.primitive.name == "io_callback"]
    made = {variable: equation for equation in closed.jaxpr.eqns for variable in equation.outvars}

    def needs(equation, other):
        read = [made[atom] for atom in equation.invars if isinstance(atom, core.Var) and atom in made]
        return other in read or any(needs(each, other) for each in read)

    assert len(calls) == 6
    assert all(needs(later, earlier) for earlier, later in zip(calls, calls[1:], strict=False))
