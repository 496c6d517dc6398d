"""Collectives between replicas in one process: the original's tests, gradients and errors.

tests/jobs/test_promises.py covers several instances.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import strategies
from strategies import cross_replica_ops as ops
from strategies.jax.replicas.collective_equations import ReplicaGroups

ROWS = np.float32([[0, 0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5]])


def on_replicas(replicas, function, values):
    """Return the results of `function(value)` on each replica, in replica order."""
    strategy = strategies.IPUStrategy(replicas)
    return list(strategy.run(function, args=(strategy.per_replica(lambda r: values[r]),)))


def test_sums_match_the_original():
    def program(_):
        variable = jnp.float32(10)
        inner = ops.cross_replica_sum([jnp.float32(1) * 2, jnp.int32(1) * 2 + 1])
        sliced = jax.lax.dynamic_slice(jnp.float32([2, 4]), (ops.replication_index(),), (1,))
        return {
            "a constant": ops.cross_replica_sum(jnp.float32(1) + 1),
            "a list": inner,
            "a variable": ops.cross_replica_sum(variable + variable),
            "nested sums": ops.cross_replica_sum(variable * ops.cross_replica_sum(inner[0] + inner[1] + 2)),
            "a slice": ops.cross_replica_sum(sliced),
        }

    for result in on_replicas(2, program, [0, 0]):
        assert jax.tree.map(lambda x: x.tolist(), result) == {
            "a constant": 4,
            "a list": [4, 6],
            "a variable": 40,
            "nested sums": 480,
            "a slice": [6],
        }
    assert on_replicas(1, ops.cross_replica_sum, [np.float32(3)]) == [3]


def test_a_summed_loss_has_a_summed_gradient():
    def program(b):
        return jax.value_and_grad(lambda b: ops.cross_replica_sum(1 + b))(b)

    assert on_replicas(2, program, [3.0, 3.0]) == [(8, 2)] * 2


def test_normalisation_divides_by_the_number_of_replicas():
    for half, one_and_a_half in on_replicas(
        2, lambda x: (ops.replication_normalise(x), x + ops.replication_normalise(x)), np.ones((2, 3), np.float32)
    ):
        assert (half.tolist(), one_and_a_half.tolist()) == ([0.5] * 3, [1.5] * 3)
    with pytest.raises(TypeError, match="convert it to a floating-point dtype"):
        on_replicas(2, ops.replication_normalise, [1, 2])


def test_means_do_not_overflow():
    rows = np.arange(16, dtype=np.float32).reshape(4, 4)
    largest = np.float16(65504)
    for mean, of_largest in on_replicas(
        4, lambda x: (ops.cross_replica_mean(x), ops.cross_replica_mean(largest)), rows
    ):
        assert mean.tolist() == rows.mean(axis=0).tolist()
        assert (of_largest, of_largest.dtype) == (65504, np.float16)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_groups_are_kept_apart(size):
    def program(x):
        return ops.cross_replica_sum(x, size), ops.all_gather(x, size), ops.reduce_scatter(x, size)

    for replica, (total, gathered, part) in enumerate(on_replicas(4, program, ROWS)):
        group = ROWS[replica // size * size :][:size]
        assert total.tolist() == group.sum(axis=0).tolist()
        assert gathered.tolist() == group.tolist()
        assert part.tolist() == np.split(group.sum(axis=0), size)[replica % size].tolist()


def test_groups_that_do_not_divide_the_replicas_are_refused():
    words = (
        r"The replica group size \(got 3\) does not evenly divide the total number of replicas \(got 4\); use one of"
    )
    with pytest.raises(ValueError, match=words):
        on_replicas(4, lambda x: ops.cross_replica_sum(x, 3), ROWS)
    for size in ("2", 1.5, [2]):
        with pytest.raises(TypeError, match=r"replica_group_size is .*; an integer of at least 0 is needed"):
            on_replicas(4, lambda x, size=size: ops.all_gather(x, size), ROWS)
    with pytest.raises(TypeError, match=r"a dimension of all_to_all is '1'; an integer"):
        on_replicas(4, lambda x: ops.all_to_all(x, 0, "1"), ROWS)


def test_one_instance_refuses_dtypes_that_instances_cannot_exchange():
    for replicas in (1, 2):
        for size in (None, 1):
            with pytest.raises(TypeError, match="replicas cannot reduce bool"):
                on_replicas(
                    replicas, lambda x, size=size: ops.cross_replica_sum(x, size), [np.ones(2, bool)] * replicas
                )
        with pytest.raises(TypeError, match="replicas cannot exchange complex64"):
            on_replicas(replicas, ops.all_gather, [np.ones(2, np.complex64)] * replicas)


def test_gathered_values_in_lists_are_stacked():
    values = [[np.full((2, 4), r, np.float16), np.arange(3, dtype=np.int32) * r] for r in range(8)]
    for halves, integers in on_replicas(8, ops.all_gather, values):
        assert (halves.shape, halves.dtype, integers.dtype) == ((8, 2, 4), np.float16, np.int32)
        assert halves.tolist() == [value[0].tolist() for value in values]
        assert integers.tolist() == [value[1].tolist() for value in values]


def test_serialised_updates_are_summed_and_normalised():
    def program(_):
        indices = jnp.arange(16) % 12
        table = jnp.zeros((12, 4)).at[indices].add(2.0)
        return ops.replication_normalise(ops.cross_replica_sum(table))

    for table in on_replicas(8, program, range(8)):
        assert table[:, 0].tolist() == [4.0] * 4 + [2.0] * 8  # rows 0 to 3 come twice


@pytest.mark.parametrize("op", ["ADD", "MEAN"])
def test_parts_are_padded_with_zeros(op):
    values = [(i * np.arange(i)).astype(np.float32) for i in range(1, 6)]
    scale = 4 if op == "ADD" else 1
    parts = on_replicas(4, lambda x: ops.reduce_scatter(x, op=f"COLLECTIVE_OP_{op}"), [values] * 4)
    for number, value in enumerate(values):
        whole = np.concatenate([part[number] for part in parts])
        wanted = np.zeros(8 if number == 4 else 4, np.float32)
        wanted[: value.size] = scale * value
        assert whole.tolist() == wanted.tolist()


def test_every_operation_of_reduce_scatter():
    values = np.int32([[3, -2, 0, 5], [1, 0, 0, 2], [2, 4, 0, -1], [5, 1, 0, 1]])
    wanted = {
        "ADD": values.sum(0),
        "MUL": values.prod(0),
        "MIN": values.min(0),
        "MAX": values.max(0),
        "LOGICAL_AND": values.all(0),
        "LOGICAL_OR": values.any(0),
        "SQUARE_ADD": (values**2).sum(0),
        "MEAN": np.trunc(values.mean(0)),
        "LOCAL": values.diagonal(),
    }
    parts = on_replicas(4, lambda x: {op: ops.reduce_scatter(x, op=op) for op in wanted}, values)
    for op, whole in wanted.items():
        assert [int(part[op][0]) for part in parts] == whole.astype(int).tolist(), op
    assert parts[0]["LOGICAL_AND"].dtype == np.int32
    with pytest.raises(ValueError, match="'XOR' is not a collective operation; use one of ADD, "):
        on_replicas(4, lambda x: ops.reduce_scatter(x, op="XOR"), values)
    with pytest.raises(ValueError, match="rank 1, not of shape"):
        on_replicas(4, lambda x: ops.reduce_scatter(x[None]), values)


@pytest.mark.parametrize("is_orthogonal", [False, True])
def test_eight_replicas_gather_in_adjacent_and_orthogonal_groups(is_orthogonal):
    first = (0, 2, 4, 6) if is_orthogonal else (0, 1, 2, 3)
    groups = ReplicaGroups(4, is_orthogonal)
    assert groups.members(8)[0] == first
    assert ReplicaGroups.of(groups.members(8)) == groups
    assert ReplicaGroups(0, is_orthogonal).members(8) == ReplicaGroups().members(8) == (tuple(range(8)),)
    gathered = on_replicas(8, lambda x: ops.all_gather(x, 4, orthogonal=is_orthogonal), np.arange(8))
    for members in groups.members(8):
        assert [tuple(gathered[member].tolist()) for member in members] == [members] * 4


@pytest.mark.parametrize("groups", [[], [[]], [[0, 1], [2]], [[0, 3], [1, 2]], [[1, 0], [3, 2]]])
def test_irregular_groups_are_refused(groups):
    with pytest.raises(ValueError, match="are irregular or empty"):
        ReplicaGroups.of(groups)


@pytest.mark.parametrize("replicas", [2, 4])
def test_replicas_branch_on_equal_values(replicas):
    def program(x):
        total = ops.assume_equal_across_replicas(ops.cross_replica_sum(x))
        return jax.lax.cond(total > 1, lambda: ops.cross_replica_sum(total), lambda: total)

    assert on_replicas(replicas, program, [1.0] * replicas) == [replicas**2] * replicas


def test_all_to_all_exchanges_blocks_and_its_gradient_returns_them():
    values = np.arange(2 * 4 * 6, dtype=np.float32).reshape(2, 4, 6)

    def program(x):
        exchanged = ops.all_to_all(x, 0, 1)
        weight = jnp.arange(exchanged.size, dtype=jnp.float32).reshape(exchanged.shape) * (ops.replication_index() + 1)
        return exchanged, weight, jax.grad(lambda y: jnp.sum(ops.all_to_all(y, 0, 1) * weight))(x)

    results = on_replicas(2, program, values)
    for replica, (exchanged, _, gradient) in enumerate(results):
        rows = slice(2 * replica, 2 * replica + 2)
        assert exchanged.tolist() == np.concatenate([values[0, rows], values[1, rows]], axis=1).tolist()
        columns = slice(6 * replica, 6 * replica + 6)
        assert gradient.tolist() == np.concatenate([weight[:, columns] for _, weight, _ in results]).tolist()
    with pytest.raises(ValueError, match="splits dimension 1 of shape .* among 4 replicas"):
        on_replicas(4, lambda x: ops.all_to_all(x, 1, 0), np.zeros((4, 4, 6), np.float32))
    with pytest.raises(ValueError, match="all_to_all along dimension"):
        on_replicas(4, lambda x: ops.all_to_all(x, 0, 2), np.zeros((4, 4, 6), np.float32))


def test_gradients_belong_to_the_sum_of_the_losses_of_all_replicas():
    """Each function is linear: its gradient is compared with the transposed matrix of all replicas."""
    linear = {
        "sum": ops.cross_replica_sum,
        "mean": ops.cross_replica_mean,
        "pairs": lambda x: ops.cross_replica_sum(x, 2, orthogonal=True),
        "gather": lambda x: ops.all_gather(x, 2).reshape(-1),
        "exchange": lambda x: ops.all_to_all(x, 0, 0),
        "scatter": ops.reduce_scatter,
        "scattered mean": lambda x: ops.reduce_scatter(x, 2, "MEAN"),
        "local": lambda x: ops.reduce_scatter(x, op="LOCAL"),
    }

    def program(given):
        x, cotangents = given
        return {
            name: (lambda out, back, c=cotangents: (out, back(c[: out.size])[0]))(*jax.vjp(function, x))
            for name, function in linear.items()
        }

    random = np.random.default_rng(0)
    values = [
        (random.integers(-9, 9, 4).astype(np.float32), random.integers(-9, 9, 8).astype(np.float32)) for _ in "abcd"
    ]
    results = on_replicas(4, program, values)
    for name in linear:
        pairs = [(*result[name], x, c) for result, (x, c) in zip(results, values, strict=True)]
        forth = sum(float(np.dot(out, c[: out.size])) for out, _, _, c in pairs)
        back = sum(float(np.dot(gradient, x)) for _, gradient, x, _ in pairs)
        assert forth == back, name
    with pytest.raises(TypeError, match="reduce_scatter with MAX has no gradient"):
        on_replicas(4, jax.grad(lambda x: ops.reduce_scatter(x, op="MAX").sum()), ROWS)


def test_reducing_outside_of_replicas_is_refused():
    with pytest.raises(RuntimeError, match="no replica runs here"):
        ops.cross_replica_sum(1.0)


# ---- division of replicas into groups


@pytest.mark.parametrize(
    ("groups", "members"),
    [
        (ReplicaGroups(), ((0, 1, 2, 3, 4, 5),)),
        (ReplicaGroups(2), ((0, 1), (2, 3), (4, 5))),
        (ReplicaGroups(3), ((0, 1, 2), (3, 4, 5))),
        (ReplicaGroups(2, is_orthogonal=True), ((0, 3), (1, 4), (2, 5))),
        (ReplicaGroups(3, is_orthogonal=True), ((0, 2, 4), (1, 3, 5))),
        (ReplicaGroups(1), ((0,), (1,), (2,), (3,), (4,), (5,))),
        (ReplicaGroups(0, is_orthogonal=True), ((0, 1, 2, 3, 4, 5),)),
    ],
)
def test_every_replica_is_in_one_group(groups, members):
    assert groups.members(6) == members
    assert sorted(replica for group in members for replica in group) == list(range(6))
    for group in members:
        assert [groups.rank(replica, 6) for replica in group] == list(range(len(group)))


@pytest.mark.parametrize("groups", [ReplicaGroups(2), ReplicaGroups(3, is_orthogonal=True), ReplicaGroups(6)])
def test_lists_of_replicas_describe_their_division(groups):
    assert ReplicaGroups.of(groups.members(6)).members(6) == groups.members(6)


@pytest.mark.parametrize("lists", [[], [[]], [[0, 1], [2]], [[1, 0], [2, 3]], [[0, 3], [1, 2]], [[2, 3], [0, 1]]])
def test_other_lists_are_refused(lists):
    with pytest.raises(ValueError, match="are irregular or empty; use groups of equal size"):
        ReplicaGroups.of(lists)


def test_a_size_that_does_not_divide_the_replicas_is_refused_with_those_that_do():
    with pytest.raises(ValueError, match=r"\(got 4\) does not evenly divide .* \(got 6\); use one of 1, 2, 3, 6"):
        ReplicaGroups(4).members(6)


@pytest.mark.parametrize(("size", "error"), [(-1, ValueError), (2.0, TypeError)])
def test_a_size_is_a_number_of_replicas(size, error):
    with pytest.raises(error, match="replica_group_size"):
        ReplicaGroups(size)
