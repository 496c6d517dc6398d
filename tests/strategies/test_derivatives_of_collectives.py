"""Derivatives of any order through collectives between replicas, for every spread over instances.

The reference is the same function of the stacked values of all replicas in plain JAX. The gradient of a replica is that
of the sum over all replicas.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import strategies
from strategies import cross_replica_ops as ops
from strategies import get_replica_context

pytestmark = pytest.mark.long

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


def derivatives(loss, x, tangent, names):
    """Return the named derivatives of a scalar function by JAX, for one replica or for all of them, stacked."""

    def penalty(y):
        return jnp.sum(jnp.sin(jax.grad(loss)(y)))

    def penalty_of_penalty(y):
        return jnp.sum(jax.grad(penalty)(y) ** 2)

    every = {
        "first": lambda: jax.grad(loss)(x),
        "second": lambda: jax.grad(penalty)(x),
        "third": lambda: jax.grad(penalty_of_penalty)(x),
        "jvp": lambda: jax.jvp(jax.grad(loss), (x,), (tangent,))[1],
        "jvp of the second": lambda: jax.jvp(jax.grad(penalty), (x,), (tangent,))[1],
        "linearize": lambda: jax.linearize(jax.grad(loss), x)[1](tangent),
        "vmap": lambda: jax.vmap(lambda k: jax.grad(penalty)(k * x))(jnp.arange(1.0, 3.0)),
        "checkpoint": lambda: jax.grad(lambda y: jnp.sum(jnp.sin(jax.grad(jax.checkpoint(loss))(y))))(x),
    }
    return {name: every[name]() for name in names if name in every}


def of_replica(collective, names):
    def program(given):
        x, tangent = given

        def loss(y):
            return jnp.sum(jnp.sin(2 * collective(jnp.cos(y)))) * (ops.replication_index() + 1.0)

        # Seeds of all replicas at once: the column of the Hessian for an element of all of them.
        hessian = {"hessian": jax.hessian(loss)(x)} if "hessian" in names else {}
        return derivatives(loss, x, tangent, names) | hessian

    return program


def stacked(reference, names):
    def loss(y):
        of_each = jnp.sin(2 * reference(jnp.cos(y))).reshape(REPLICAS, -1).sum(1)
        return jnp.sum(of_each * jnp.arange(1.0, REPLICAS + 1))

    def column(element):
        seed = jnp.broadcast_to(element.reshape(VALUES.shape[1:]), VALUES.shape)
        return jax.jvp(jax.grad(loss), (jnp.asarray(VALUES),), (seed,))[1]

    found = derivatives(loss, jnp.asarray(VALUES), jnp.asarray(TANGENTS), names)
    if "vmap" in names:
        found["vmap"] = jnp.moveaxis(found["vmap"], 0, 1)
    if "hessian" in names:
        columns = jax.vmap(column, out_axes=-1)(jnp.eye(VALUES[0].size))
        found["hessian"] = columns.reshape(*VALUES.shape, *VALUES.shape[1:])
    return found


def on_all(on_instances, instances, program, values):
    """Return the results of each replica, in order."""

    def one(strategy):
        return list(strategy.run(program, args=(strategy.per_replica(lambda r: jax.tree.map(lambda x: x[r], values)),)))

    return [result for part in on_instances(instances, REPLICAS, one) for result in part]


HALVES = ("first", "third", "jvp", "vmap", "hessian"), ("second", "jvp of the second", "linearize", "checkpoint")
EVERY = HALVES[0] + HALVES[1]
QUICK = {"mean across": 0, "gather": 1}
"""The half of the derivatives for each kind: one kind adds, the other one only moves values."""
WHOLLY = ("sum of pairs", "gather", "exchange", "scattered squares")
"""Kinds with a derivative of their own: one adds, one moves, one exchanges, and one is not linear."""
IN_PART = {
    "all_reduce sum": 0,
    "all_reduce mean": 1,
    "sum": 1,
    "mean": 0,
    "mean across": 1,
    "scatter": 0,
    "scattered mean": 1,
    "local": 0,
}
"""The half of the derivatives for kinds similar to those above: `sum` and `mean` together have both halves."""


def test_all_kinds_are_tested():
    assert {*WHOLLY, *IN_PART} == set(KINDS)


@pytest.mark.parametrize(
    ("kind", "spreads", "names"),
    [
        *[pytest.param(kind, (1, 2), HALVES[half], id=kind) for kind, half in QUICK.items()],
        *[pytest.param(kind, (1, 2, 4), EVERY, id=f"{kind} everywhere", marks=pytest.mark.complete) for kind in WHOLLY],
        *[
            pytest.param(kind, (1, 4), HALVES[half], id=f"{kind} on four", marks=pytest.mark.complete)
            for kind, half in IN_PART.items()
        ],
    ],
)
def test_derivatives_are_those_of_the_sum_over_all_replicas(on_instances, bits, kind, spreads, names):
    collective, reference = KINDS[kind]
    wanted = jax.jit(lambda: stacked(reference, names))()
    alone, *others = [
        on_all(on_instances, count, of_replica(collective, names), (VALUES, TANGENTS)) for count in spreads
    ]
    assert sorted(wanted) == sorted(alone[0]) == sorted(names)
    for name, value in wanted.items():
        found = np.stack([result[name] for result in alone])
        np.testing.assert_allclose(found, value, rtol=2e-4, atol=2e-3, err_msg=name)
    for spread in others:
        for mine, theirs in zip(alone, spread, strict=True):
            assert [name for name in mine if bits(mine[name]) != bits(theirs[name])] == []


@pytest.mark.parametrize("spreads", [(1, 2), pytest.param((1, 2, 4), marks=pytest.mark.complete)], ids=str)
def test_a_gradient_penalty_over_a_synchronised_mean_trains_to_the_same_bits(on_instances, bits, spreads):
    rows = np.random.default_rng(2).uniform(-1, 1, (48, 3)).astype(np.float32)

    def loss_fn(variables, batch, key):
        def error(x):
            hidden = jnp.tanh(x @ variables["first"])
            return jnp.mean(((hidden - ops.cross_replica_mean(hidden.mean(0))) @ variables["last"]) ** 2)

        return error(batch) + 10 * jnp.mean(jax.grad(error)(batch) ** 2)

    def trained(strategy):
        trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.5))
        state = trainer.init({"first": jnp.linspace(-1, 1, 12).reshape(3, 4), "last": jnp.linspace(1, 0, 4)})
        for batch in strategy.distribute_dataset(rows, batch_size=3, seed=1).epoch(0):
            state, _ = trainer.step(state, batch)
        return {name: np.asarray(value) for name, value in state.variables.items()}

    found = [variables for instances in spreads for variables in on_instances(instances, REPLICAS, trained)]
    for variables in found:
        assert {name: bits(value) for name, value in variables.items()} == {
            name: bits(value) for name, value in found[0].items()
        }


@pytest.mark.complete
def test_derivatives_work_inside_loops_and_branches(on_instances, bits):
    """Cases: a scan, a branch, both under vmap, and a loop in forward mode."""

    def looping(x):
        def body(carried, k):
            taken = jax.lax.cond(k > 1, lambda y: jnp.sin(ops.cross_replica_mean(y)), lambda y: 2 * y, carried)
            return taken, ops.cross_replica_sum(taken * k)

        last, each = jax.lax.scan(body, x, jnp.arange(1.0, 4.0))
        return jnp.sum(last**2) + jnp.sum(jnp.cos(each))

    def as_stacked(stacked):
        last, total = stacked, 0.0
        for k in (1.0, 2.0, 3.0):
            last = jnp.sin(jnp.broadcast_to(last.mean(0), last.shape)) if k > 1 else 2 * last
            total += REPLICAS * jnp.sum(jnp.cos(last.sum(0) * k))
        return jnp.sum(last**2) + total

    def penalty(function):
        return lambda x: jnp.sum(jax.grad(function)(x) ** 2)

    def program(x):
        repeated = jax.lax.fori_loop
        return {
            "second": jax.grad(penalty(looping))(x),
            "of a batch": jax.vmap(jax.grad(penalty(looping)))(jnp.stack([x, -x]))[0],
            "loop": jax.jvp(lambda y: repeated(0, 3, lambda _, z: jnp.sin(ops.cross_replica_sum(z)), y), (x,), (x,))[1],
        }

    def loop(x):
        for _ in range(3):
            x = jnp.sin(jnp.broadcast_to(x.sum(0), x.shape))
        return x

    values = VALUES[:, 0]
    second = jax.jit(jax.grad(penalty(as_stacked)))(values)
    wanted = {"second": second, "of a batch": second, "loop": jax.jvp(loop, (values,), (values,))[1]}
    alone = on_all(on_instances, 1, program, values)
    for name, value in wanted.items():
        np.testing.assert_allclose([result[name] for result in alone], value, rtol=2e-4, atol=2e-3, err_msg=name)
    for mine, theirs in zip(alone, on_all(on_instances, 2, program, values), strict=True):
        assert [name for name in mine if bits(mine[name]) != bits(theirs[name])] == []


def test_collectives_without_a_derivative_can_stand_beside_others(on_instances):
    """Only a derivative that needs the other collective is refused, at any order."""

    def program(x):
        def loss(y):
            return jnp.sum(ops.cross_replica_sum(y) ** 2), get_replica_context().all_reduce("max", y)

        def penalty(y):
            gradient, largest = jax.grad(loss, has_aux=True)(y)
            return jnp.sum(gradient**2), largest

        return jax.grad(penalty, has_aux=True)(x)

    for gradient, largest in on_all(on_instances, 2, program, np.float32([1, 2, 3, 4])):
        assert (gradient, largest) == (512 * 10, 4)
    with pytest.raises(TypeError, match=r"all_reduce\('max'\) has no gradient; use 'sum' or 'mean'"):
        on_all(
            on_instances,
            1,
            jax.grad(lambda x: jax.grad(lambda y: get_replica_context().all_reduce("max", y) ** 2)(x)),
            np.float32([1, 2, 3, 4]),
        )


def test_the_equations_are_the_same_for_every_spread(on_instances):
    def printed(strategy):
        traced = []

        def program(x):
            loss = lambda y: jnp.sum(jnp.sin(ops.all_gather(y, 2)) + ops.cross_replica_sum(y))  # noqa: E731
            traced.append(str(jax.make_jaxpr(jax.grad(lambda y: jnp.sum(jax.grad(loss)(y) ** 2)))(x)))
            return x

        strategy.run(program, args=(jnp.ones(3),))
        return traced

    found = [traced for instances in (1, 2, 4) for traced in on_instances(instances, REPLICAS, printed)]
    assert found[0]
    assert all(one == found[0] for one in found)


def test_scalars_are_gathered_and_reduced_in_groups_across_instances(on_instances):
    def program(x):
        return ops.all_gather(x), ops.cross_replica_sum(x, 2, orthogonal=True), ops.cross_replica_mean(x, 4)

    for replica, (all_of_them, of_pair, mean) in enumerate(on_all(on_instances, 2, program, np.float32([1, 2, 3, 5]))):
        assert (all_of_them.tolist(), of_pair, mean) == ([1, 2, 3, 5], (4, 7)[replica % 2], 2.75)
