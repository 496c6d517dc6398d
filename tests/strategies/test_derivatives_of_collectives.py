"""Derivatives of any order through collectives between replicas, however these are spread over instances.

What is compared with: the same functions of the values of all replicas, stacked, in plain JAX. A replica's gradient is
that of the sum of what all replicas compute.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strategies import cross_replica_ops as ops
from strategies import get_replica_context

REPLICAS = 4
PAIRS = np.float32([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]])
ACROSS = np.float32([[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]])


def of_rows(mixing):
    return lambda stacked: jnp.tensordot(jnp.asarray(mixing, stacked.dtype), stacked, 1)


def everything(stacked):
    return jnp.broadcast_to(stacked, (REPLICAS, *stacked.shape))


def parts(stacked):
    return stacked.sum(0).reshape(REPLICAS, -1)


WHOLE = np.ones((REPLICAS, REPLICAS), np.float32)
KINDS = {
    "all_reduce sum": (lambda x: get_replica_context().all_reduce("sum", x), of_rows(WHOLE)),
    "all_reduce mean": (lambda x: get_replica_context().all_reduce("mean", x), of_rows(WHOLE / REPLICAS)),
    "sum": (ops.cross_replica_sum, of_rows(WHOLE)),
    "sum of pairs": (lambda x: ops.cross_replica_sum(x, 2), of_rows(PAIRS)),
    "mean": (ops.cross_replica_mean, of_rows(WHOLE / REPLICAS)),
    "mean across": (lambda x: ops.cross_replica_mean(x, 2, orthogonal=True), of_rows(ACROSS / 2)),
    "gather": (ops.all_gather, everything),
    "exchange": (
        lambda x: ops.all_to_all(x, 0, 1),
        lambda stacked: stacked.reshape(REPLICAS, REPLICAS, -1, 2).transpose(1, 2, 0, 3).reshape(REPLICAS, -1, 8),
    ),
    "scatter": (lambda x: ops.reduce_scatter(x.reshape(-1)), parts),
    "scattered mean": (lambda x: ops.reduce_scatter(x.reshape(-1), op="MEAN"), lambda stacked: parts(stacked) / 4),
    "scattered squares": (lambda x: ops.reduce_scatter(x.reshape(-1), op="SQUARE_ADD"), lambda x: parts(x * x)),
    "local": (
        lambda x: ops.reduce_scatter(x.reshape(-1), op="LOCAL"),
        lambda stacked: jnp.stack([stacked[r].reshape(REPLICAS, -1)[r] for r in range(REPLICAS)]),
    ),
}

VALUES = np.random.default_rng(0).uniform(-1, 1, (REPLICAS, 4, 2)).astype(np.float32)
TANGENTS = np.random.default_rng(1).uniform(-1, 1, (REPLICAS, 4, 2)).astype(np.float32)


def derivatives(loss, x, tangent):
    """Whatever JAX makes of a scalar function, for one replica or for all of them, stacked."""

    def penalty(y):
        return jnp.sum(jnp.sin(jax.grad(loss)(y)))

    def penalty_of_penalty(y):
        return jnp.sum(jax.grad(penalty)(y) ** 2)

    _, forward = jax.jvp(jax.grad(penalty), (x,), (tangent,))
    _, linear = jax.linearize(jax.grad(loss), x)
    return {
        "first": jax.grad(loss)(x),
        "second": jax.grad(penalty)(x),
        "third": jax.grad(penalty_of_penalty)(x),
        "jvp": jax.jvp(jax.grad(loss), (x,), (tangent,))[1],
        "jvp of the second": forward,
        "linearize": linear(tangent),
        "vmap": jax.vmap(lambda k: jax.grad(penalty)(k * x))(jnp.arange(1.0, 3.0)),
        "checkpoint": jax.grad(lambda y: jnp.sum(jnp.sin(jax.grad(jax.checkpoint(loss))(y))))(x),
    }


def of_replica(collective):
    def program(given):
        x, tangent = given

        def loss(y):
            return jnp.sum(jnp.sin(2 * collective(jnp.cos(y)))) * (ops.replication_index() + 1.0)

        # Seeds of all replicas at once: the column of the Hessian for an element of all of them.
        return derivatives(loss, x, tangent) | {"hessian": jax.hessian(loss)(x)}

    return program


def stacked(reference):
    def loss(y):
        of_each = jnp.sin(2 * reference(jnp.cos(y))).reshape(REPLICAS, -1).sum(1)
        return jnp.sum(of_each * jnp.arange(1.0, REPLICAS + 1))

    def column(element):
        seed = jnp.broadcast_to(element.reshape(VALUES.shape[1:]), VALUES.shape)
        return jax.jvp(jax.grad(loss), (jnp.asarray(VALUES),), (seed,))[1]

    columns = jax.vmap(column, out_axes=-1)(jnp.eye(VALUES[0].size))
    found = derivatives(loss, jnp.asarray(VALUES), jnp.asarray(TANGENTS))
    found["vmap"] = jnp.moveaxis(found["vmap"], 0, 1)
    return found | {"hessian": columns.reshape(*VALUES.shape, *VALUES.shape[1:])}


def on_all(on_instances, instances, program, values):
    """What each replica got, in their order."""

    def one(strategy):
        return list(strategy.run(program, args=(strategy.per_replica(lambda r: jax.tree.map(lambda x: x[r], values)),)))

    return [result for part in on_instances(instances, REPLICAS, one) for result in part]


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_those_of_the_sum_of_what_all_replicas_compute(on_instances, bits, kind):
    collective, reference = KINDS[kind]
    wanted = jax.jit(lambda: stacked(reference))()
    alone = on_all(on_instances, 1, of_replica(collective), (VALUES, TANGENTS))
    for name, value in wanted.items():
        found = np.stack([result[name] for result in alone])
        np.testing.assert_allclose(found, value, rtol=2e-4, atol=2e-3, err_msg=name)
    for instances in (2, 4):
        spread = on_all(on_instances, instances, of_replica(collective), (VALUES, TANGENTS))
        for mine, theirs in zip(alone, spread, strict=True):
            assert [name for name in mine if bits(mine[name]) != bits(theirs[name])] == []
