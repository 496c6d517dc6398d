"""Feeds and loops in a traced program: its token, and the collection of enqueued values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strategies.data.layout import Replication, is_in_program
from strategies.jax.programs.feed_program import (
    COLLECTED_BYTES,
    FAILED,
    FeedProgram,
    current_program,
    next_token,
    tracing,
)

ONE = Replication(range(1), 1)
SCALAR = [jax.ShapeDtypeStruct((), np.float32)]


def program(token=0, replica=0, report=lambda error: None):
    return FeedProgram(np.int32(replica), ONE, report, jnp.int32(token))


def run(body, token=0, replica=0):
    """Run `body(program)` compiled once, and return the token, the result, and the reported errors."""
    reported = []

    def traced(token, replica):
        traced = FeedProgram(replica, ONE, reported.append, token)
        result = body(traced)
        return traced.token, result

    after, result = jax.block_until_ready(jax.jit(traced)(np.int32(token), np.int32(replica)))
    return int(after), result, reported


def leave_by_exception(context, look):
    """Enter a context, look around, and raise."""
    with context:
        look()
        raise KeyError


class TestTokens:
    @pytest.mark.parametrize(("token", "wanted"), [(0, 1), (41, 42), (FAILED, FAILED), (-7, FAILED)])
    def test_tokens_count_calls_until_one_has_failed(self, token, wanted):
        assert next_token(token) == wanted
        assert next_token(token).dtype == np.int32

    def test_tokens_wrap_around_before_they_would_be_negative(self):
        assert next_token(2**30 - 1) == 0

    def test_a_loop_body_has_its_own_tokens(self):
        outside = program(token=5)
        before, inside = outside.token, []
        with pytest.raises(KeyError):
            leave_by_exception(outside.inside(jnp.int32(9)), lambda: inside.append(outside.token))
        assert inside == [9]
        assert outside.token is before


class TestCalls:
    def test_calls_return_the_result_and_the_next_token(self):
        def function(replica, values):
            return [np.float32(replica + values.sum())]

        token, [found], reported = run(lambda p: p.call(function, SCALAR, [jnp.arange(4.0)]), token=6, replica=2)
        assert (token, found, reported) == (7, 8, [])

    def test_calls_run_one_after_another(self):
        """JAX's own effects do not order them: without the token each call is independent."""
        seen = []

        def body(p):
            for number in (3, 1, 2):
                p.call(lambda replica, number: seen.append(int(number)) or (), [], [jnp.int32(number)])

        assert run(body) == (3, None, [])
        assert seen == [3, 1, 2]

    def test_a_failing_call_is_reported_and_later_calls_are_not_made(self):
        made = []

        def fails(replica):
            made.append("fails")
            raise KeyError("mine")

        def body(p):
            first = p.call(fails, SCALAR, [])
            return first, p.call(lambda replica: made.append("behind") or [np.float32(5)], SCALAR, [])

        token, zeros, [error] = run(body)
        assert (token, made) == (FAILED, ["fails"])
        assert zeros == ([0], [0])
        assert isinstance(error, KeyError)

    def test_an_error_of_the_report_ends_the_program(self):
        def fails(replica):
            raise KeyError("mine")

        with pytest.raises(jax.errors.JaxRuntimeError, match="KeyError: 'mine'"):
            jax.block_until_ready(jax.jit(lambda: current_program().call(fails, SCALAR, []))())

    def test_calls_in_a_branch_leave_the_outer_token_unchanged(self):
        made = []

        def body(p):
            before = p.token
            jax.lax.cond(p.replica == 0, lambda: p.call(lambda replica: made.append(1) or (), [], []), lambda: [])
            assert p.token is before
            return p.call(lambda replica: made.append(2) or (), [], [])

        assert run(body)[0] == 1
        assert sorted(made) == [1, 2]


class TestPutValues:
    def test_put_values_can_be_kept(self):
        kept = []

        def put(replica, values):
            kept.append((replica, values))

        arrays = [jnp.arange(3.0), jnp.full((2, 3000), 7, jnp.int32), jnp.ones(4, bool)]
        token, _, _ = run(lambda p: p.put(put, arrays), replica=3)
        [(replica, values)] = kept
        assert (token, replica) == (1, 3)
        for array, value in zip(arrays, values, strict=True):
            np.testing.assert_array_equal(value, array)
            assert value.flags.owndata
            assert value.flags.writeable

    def test_values_are_delivered_at_once_without_collecting(self):
        calls = []

        def body(p):
            with p.collecting(False) as collected:
                p.put(lambda replica, values: calls.append(values), [jnp.float32(1)])
            return len(collected)

        token, collected, _ = run(body)
        assert (token, collected, len(calls)) == (1, 0, 1)


class TestCollecting:
    @staticmethod
    def put(replica, values):
        raise AssertionError("it was handed over at once")

    def test_collecting_keeps_the_order_of_values(self):
        def body(p):
            with p.collecting() as collected:
                for number in range(3):
                    p.put(self.put, [p.token + number, jnp.float32(number)])
                assert p.collected_arrays == [array for enqueued in collected for array in enqueued.arrays]
                assert {enqueued.put for enqueued in collected} == {self.put}
            return [enqueued.arrays for enqueued in collected]

        token, arrays, reported = run(body, token=10)
        assert (token, reported) == (10, [])
        assert arrays == [[10, 0], [11, 1], [12, 2]]

    @pytest.mark.parametrize(("more", "wanted"), [(0, 1), (1, 0)])
    def test_collecting_is_limited_to_small_values_in_total(self, more, wanted):
        """Larger values leave at once, because a loop would copy them once more."""
        half = COLLECTED_BYTES // 2

        def body(p):
            with p.collecting() as collected:
                p.put(lambda replica, values: None, [jnp.zeros(half, bool), jnp.zeros(half + more, bool)])
            return len(collected)

        token, collected, _ = run(body)
        assert (token, collected) == (1 - wanted, wanted)

    @pytest.mark.parametrize("is_known", [False, True])
    def test_values_in_a_branch_are_not_collected(self, is_known):
        """The program may skip the branch, whether the value is known outside or not."""
        calls = []

        def body(p):
            outside = jnp.float32(4)

            def put():
                value = outside if is_known else outside + p.replica
                p.put(lambda replica, values: calls.append(values[0].item()), [value])

            with p.collecting() as collected:
                jax.lax.cond(p.replica == 1, put, lambda: None)
            return len(collected)

        assert [run(body, replica=replica)[1] for replica in (0, 1)] == [0, 0]
        assert calls == [4 if is_known else 5]

    def test_collecting_ends_with_its_loop_even_by_an_exception(self):
        outer = program()
        with outer.collecting() as of_outer:
            with pytest.raises(KeyError):
                leave_by_exception(outer.collecting(), lambda: outer.put(self.put, [jnp.float32(1)]))
            outer.put(self.put, [jnp.float32(2)])
            with outer.collecting(False):
                assert outer.collected_arrays == []
                assert outer.collected is None  # the outer loop has none either
        assert [enqueued.arrays for enqueued in of_outer] == [[2]]
        assert outer.collected is None
        assert outer.collected_arrays == []


class TestTheCurrentProgram:
    def test_outside_our_programs_one_replica_is_ordered_by_jax(self):
        found = current_program()
        assert not is_in_program()
        assert (found.replica, found.replication, found.is_ordered) == (0, ONE, True)
        assert current_program() is not found  # their tokens are unrelated
        with pytest.raises(KeyError):
            found.report(KeyError())

    def test_the_current_program_is_the_innermost_traced_one(self):
        outer, inner, found = program(), program(), []
        with tracing(outer) as given:
            assert given is current_program() is outer
            assert is_in_program()
            with pytest.raises(KeyError):
                leave_by_exception(tracing(inner), lambda: found.append(current_program()))
            assert found == [inner]
            assert current_program() is outer
        assert not is_in_program()
