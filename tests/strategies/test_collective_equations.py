"""Collectives as equations of JAX, without a strategy: their kinds and the number of calls of Python.

`test_derivatives_of_collectives.py` checks their derivatives.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from collectives.reduction import OPERATIONS
from strategies.jax.replicas.collective_equations import BlockExchange, Collective, Gather, Reduce, ReplicaGroups

KINDS = [
    *map(Reduce, OPERATIONS),
    Gather(),
    *(BlockExchange(split, concat) for split in (0, 1) for concat in (0, 1)),
]
VALUES = np.random.default_rng(0).integers(-5, 6, (3, 2, 6, 3)).astype(np.float32)  # of three replicas, twice each
X = jnp.float32([1, 2, 4])


class Meeting:
    """A meeting of replicas 0 and 1; the other replica has ten times the values of the first."""

    def __init__(self):
        self.came = []

    def __call__(self, collective, replica, value):
        self.came.append((collective.name, type(replica), replica, type(value), value.shape))
        return collective.kind.combine([value, 10 * value])[replica]

    @property
    def names(self):
        return [name for name, *_ in self.came]


@pytest.fixture
def meeting():
    return Meeting()


@pytest.fixture
def summing(meeting):
    """Return a function of a replica's index and value that gives the sum of both values."""
    return Collective("sum", Reduce("sum"), ReplicaGroups(), 2, meeting)


def run(function, *arguments):
    return jax.block_until_ready(jax.jit(function)(*arguments))


@pytest.mark.parametrize("kind", KINDS, ids=str)
class TestKinds:
    def test_each_kind_has_the_shape_of_its_result(self, kind):
        found = kind.combine(list(VALUES[:, 0]))
        assert [each.shape for each in found] == [kind.shape((6, 3), 3)] * 3
        assert {each.dtype for each in found} == {np.dtype(np.float32)}

    def test_batched_kinds_match_unbatched_ones(self, kind):
        batched, axis = kind.batched()
        found = batched.combine(list(VALUES))
        singly = [kind.combine(list(VALUES[:, number])) for number in range(2)]
        for replica, of_batch in enumerate(found):
            np.testing.assert_array_equal(np.moveaxis(of_batch, axis, 0), [each[replica] for each in singly])

    def test_values_are_left_unchanged(self, kind):
        values = list(VALUES[:, 0].copy())
        kind.combine(values)
        np.testing.assert_array_equal(values, VALUES[:, 0])


def test_blocks_that_are_exchanged_go_back_the_other_way():
    values = list(VALUES[:, 0])
    there = BlockExchange(0, 1).combine(values)
    assert not np.array_equal(there[0], values[0])
    np.testing.assert_array_equal(BlockExchange(1, 0).combine(there), values)


class TestCalls:
    def test_calls_pass_the_index_of_the_replica_and_its_value(self, summing, meeting):
        assert run(summing, np.int32(1), X).tolist() == [11, 22, 44]
        assert meeting.came == [("sum", int, 1, np.ndarray, (3,))]

    def test_calls_are_made_even_if_the_result_is_unused(self, summing, meeting):
        """The other replicas wait for this one."""
        assert run(lambda x: (summing(0, x), x)[1], X).tolist() == X.tolist()
        assert meeting.names == ["sum"]

    def test_tangents_make_separate_calls(self, summing, meeting):
        value, tangent = run(lambda x: jax.jvp(lambda y: summing(0, y), (x,), (2 * x,)), X)
        assert (value.tolist(), tangent.tolist()) == ([11, 22, 44], [22, 44, 88])
        assert sorted(meeting.names) == ["sum", "sum/gradient"]

    def test_a_batch_makes_one_call(self, summing, meeting):
        found = run(jax.vmap(lambda x: summing(0, x), in_axes=1, out_axes=1), jnp.stack([X, -X], 1))
        np.testing.assert_array_equal(found, 11 * np.stack([X, -X], 1))
        assert meeting.came == [("sum", int, 0, np.ndarray, (2, 3))]

    def test_a_batched_index_alone_makes_one_call(self, summing, meeting):
        """JAX hands the index to both branches of a batched condition."""
        found = run(jax.vmap(summing, in_axes=(0, None)), jnp.zeros(4, jnp.int32), X)
        np.testing.assert_array_equal(found, [11 * X] * 4)
        assert meeting.came == [("sum", int, 0, np.ndarray, (3,))]


@pytest.mark.parametrize("op", ["min", "max"])
def test_nonlinear_collectives_have_no_derivative(meeting, op):
    collective = Collective("one", Reduce(op), ReplicaGroups(), 2, meeting)
    with pytest.raises(TypeError, match=rf"Reduce\(op='{op}'\) of replicas has no derivative; use a sum or a mean"):
        run(lambda x: jax.jvp(lambda y: collective(0, y), (x,), (x,)), X)
