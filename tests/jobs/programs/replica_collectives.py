"""Collectives between replicas inside compiled functions; every instance checks its own, instance 0 says so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import collectives
import popdist
import strategies

popdist.init()
strategy = strategies.PopDistStrategy()
TOTAL = strategy.num_replicas_in_sync
PARTS = np.random.default_rng(1).standard_normal((TOTAL, 3, 5)).astype(np.float32) * 1e3
ONE_TO_R = strategy.per_replica(lambda r: float(r + 1))
SUM = TOTAL * (TOTAL + 1) // 2


def all_reduce(op, value):
    return strategies.get_replica_context().all_reduce(op, value)


def expect(wanted, function, *args):
    """Every local replica's result has the bits of `wanted`."""
    for result in strategy.run(function, args=args or (ONE_TO_R,)):
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, np.asarray(b)), result, wanted)


def ordered_sum(parts):
    if len(parts) == 1:
        return parts[0]
    middle = 1 << (len(parts) - 1).bit_length() - 1
    return ordered_sum(parts[:middle]) + ordered_sum(parts[middle:])


mine = strategy.per_replica(lambda r: PARTS[r])
expect(ordered_sum(PARTS), lambda x: all_reduce("sum", x), mine)
expect(ordered_sum(PARTS) / np.float32(TOTAL), lambda x: all_reduce("mean", x), mine)
expect(PARTS.min(axis=0), lambda x: all_reduce("min", x), mine)
expect(PARTS.max(axis=0), lambda x: all_reduce("max", x), mine)

halves = PARTS.astype(np.float16)
rounded_once = ordered_sum(halves.astype(np.float32)).astype(np.float16)
expect(rounded_once, lambda x: all_reduce("sum", x), strategy.per_replica(lambda r: halves[r]))
minus = strategy.per_replica(lambda r: np.int32(-r))
expect(np.int32(-((TOTAL - 1) // 2)), lambda x: all_reduce("mean", x), minus)

# Nested, in a scan, in a loop whose end depends on it, in a branch, several at once, in a jit.
expect(float(TOTAL * SUM**2), lambda x: all_reduce("sum", all_reduce("sum", x) ** 2))
expect(
    np.float32([k * SUM for k in range(1, 6)]),
    lambda x: jax.lax.scan(lambda c, k: (c, all_reduce("sum", x * k)), 0.0, jnp.arange(1.0, 6.0))[1],
)
expect(True, lambda x: jax.lax.while_loop(lambda y: y < 1e4, lambda y: all_reduce("sum", y), x) >= 1e4)
expect(float(SUM), lambda x: jax.lax.cond(True, lambda y: all_reduce("sum", y), lambda y: y, x))
expect(
    [float(value) for k in range(6) for value in (SUM + TOTAL * k, TOTAL + k)],
    lambda x: [all_reduce(op, x + k) for k in range(6) for op in ("sum", "max")],
)
expect(float(SUM), lambda x: jax.jit(lambda y: all_reduce("sum", y))(x))
expect({"a": [float(SUM)], "b": TOTAL}, lambda x: all_reduce("sum", {"a": [x], "b": jnp.int32(1)}))


def weighted(op):
    def loss(x):
        return all_reduce(op, x) * (strategies.get_replica_context().replica_id_in_sync_group + 1.0)

    return jax.grad(loss)


# The gradient of a sum is the sum of the gradients, that of a mean their mean.
expect(float(SUM), weighted("sum"))
expect(np.float32(SUM) / np.float32(TOTAL), weighted("mean"))


def again(x):
    return all_reduce("sum", x)


for number in range(50):
    expect(float(TOTAL * number), again, float(number))

# Different shapes on different instances are an error on all of them, and nothing is broken afterwards.
if strategy.num_instances > 1:
    text = "Tensor layouts did not match on all instances"
    with pytest.raises(collectives.LayoutMismatchError, match=text):
        strategy.run(again, args=(np.ones(2 + strategy.instance_index, np.float32),))
    expect(float(TOTAL), again, 1.0)

popdist.synchronize()
if strategy.instance_index == 0:
    print("all held", flush=True)
