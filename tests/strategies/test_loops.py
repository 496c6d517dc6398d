"""Loops on the devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from feed_data import Increasing

import strategies
from strategies import InfeedQueue, OutfeedQueue, loops

ZEROS = np.zeros((4, 4), np.float32)


def add(v, x):
    return v + x


@pytest.fixture(params=["from Python", "in run"])
def place(request):
    """Provide a function that calls another as programs call loops: from Python, or in a function on all replicas."""
    if request.param == "from Python":
        return lambda function: function()
    return lambda function: strategies.IPUStrategy(2).run(function)[0]


class TestLoopVariables:
    def test_all_loop_variables_are_replaced_at_once(self, place):
        assert place(lambda: loops.repeat(4, lambda a, b: (a + b, a), [1, 0])) == [5, 3]

    def test_a_loop_variable_can_become_another(self, place):
        assert place(lambda: loops.repeat(4, lambda a, b: (a, a + b), [1, 0])) == [1, 4]

    def test_one_variable_comes_back_without_a_list(self, place):
        assert place(lambda: loops.repeat(3, lambda x: jax.nn.relu(x * x), [2.0])) == 256

    def test_loops_can_be_nested(self, place):
        def inner(x):
            return loops.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, x * 2), [0, x], maximum_iterations=10)[1]

        def outer(j, x, y):
            return j + 1, inner(x), inner(inner(y))

        assert place(lambda: loops.while_loop(lambda j, x, y: j < 3, outer, [0, 2, 2], maximum_iterations=10)) == [
            3,
            128,
            8192,
        ]

    def test_loop_variables_can_be_trees(self):
        result = loops.repeat(3, lambda v: {"a": v["a"] + v["b"], "b": v["b"]}, {"a": 0.0, "b": 2.0})
        assert result == {"a": 6, "b": 2}
        assert loops.repeat(2, lambda pair: (pair[1], pair[0]), [(1, 2)]) == (1, 2)

    def test_a_loop_without_variables_has_no_result(self):
        outfeed = OutfeedQueue()
        assert loops.repeat(3, lambda: outfeed.enqueue(np.int32(7))) is None
        assert list(outfeed.dequeue()) == [7, 7, 7]

    def test_results_of_enqueue_can_follow_the_loop_variables(self):
        outfeed = OutfeedQueue()
        assert loops.repeat(3, lambda v: (v + 1, outfeed.enqueue(v)), [0]) == 3
        assert list(outfeed.dequeue()) == [0, 1, 2]

    def test_values_before_the_loop_variables_are_refused(self):
        outfeed = OutfeedQueue()
        with pytest.raises(ValueError, match="returns None before a loop variable"):
            loops.repeat(3, lambda v: (outfeed.enqueue(v), v), [0])

    @pytest.mark.parametrize("body", [lambda v: v + 0.5, lambda v: (v, v), lambda v: jnp.stack([v, v])])
    def test_a_changed_structure_shape_or_dtype_is_refused(self, place, body):
        with pytest.raises(
            TypeError, match=r"takes the loop variables \['int32\[\]'\] but returns .*they must be the same"
        ):
            place(lambda: loops.repeat(3, body, [1]))

    def test_float64_is_refused(self):
        with pytest.raises(TypeError, match="Unsupported data type for input: float64"):
            loops.repeat(3, lambda v: v, [np.float64(1)])


class TestIterations:
    @pytest.mark.parametrize("n", [0, 1, 7])
    def test_a_loop_makes_the_given_number_of_iterations(self, place, n):
        assert place(lambda: loops.repeat(n, lambda v: v + 1, [0])) == n

    def test_the_number_of_iterations_can_be_computed_by_the_program(self, strategy):
        results = strategy.run(
            lambda n: loops.repeat(2 * n, lambda v: v + 1, [0]), args=(strategy.per_replica(np.int32),)
        )
        assert list(results) == [0, 2, 4, 6]
        assert loops.repeat(jnp.int32(5), lambda v: v + 1, [0]) == 5
        assert jax.jit(lambda n: loops.repeat(n, lambda v: v + 1, [0]))(6) == 6

    @pytest.mark.parametrize(
        ("n", "error"),
        [
            (-1, ValueError),
            (2**31, ValueError),
            (1.5, TypeError),
            ("3", TypeError),
            (True, TypeError),
            (None, TypeError),
        ],
    )
    def test_an_invalid_number_of_iterations_is_refused(self, n, error):
        with pytest.raises(error, match="n is "):
            loops.repeat(n, lambda v: v, [0])

    def test_an_invalid_maximum_of_iterations_is_refused(self):
        with pytest.raises(ValueError, match="maximum_iterations is 2147483648; a loop runs at most 2147483647 times"):
            loops.while_loop(lambda v: v < 5, lambda v: v, [0], maximum_iterations=2**31)

    def test_bodies_and_conditions_that_are_no_functions_are_refused(self):
        with pytest.raises(TypeError, match="the body of the loop is None, a NoneType; use a function"):
            loops.repeat(1, None, [0])
        with pytest.raises(TypeError, match="the condition of the loop is None"):  # an endless loop must not start
            loops.while_loop(None, lambda v: v + 1, [0])

    def test_iterations_end_with_the_condition_or_the_maximum(self, place):
        assert place(lambda: loops.while_loop(lambda v: v < 5, lambda v: v + 2, [0])) == 6
        assert place(lambda: loops.while_loop(lambda v: v < 5, lambda v: v + 2, [0], maximum_iterations=2)) == 4

    def test_a_condition_that_is_not_boolean_is_refused(self):
        with pytest.raises(TypeError, match=r"the condition returned int32\[\]"):
            loops.while_loop(lambda v: v, lambda v: v, [1])

    def test_loops_are_compiled_once_for_each_body(self):
        traced = []

        def body(v):
            traced.append(v)
            return v + 1

        assert [int(loops.repeat(n, body, [0])) for n in (1, 2, 3)] == [1, 2, 3]
        assert len(traced) == 1


class TestGradients:
    """Gradients through loops."""

    @staticmethod
    def power(a):
        return loops.repeat(5, lambda x: a * x, [1.0])

    def test_gradients_flow_through_repeat(self, strategy):
        assert jax.grad(self.power)(2.0) == 80
        assert jax.jit(jax.grad(self.power))(2.0) == 80
        assert [float(g) for g in strategy.run(jax.grad(self.power), args=(strategy.per_replica(float),))] == [
            5 * r**4 for r in range(4)
        ]

    def test_forward_derivatives_flow_through_repeat(self):
        assert jax.jvp(self.power, (2.0,), (1.0,)) == (32, 80)

    def test_gradients_of_a_loop_train_with_momentum(self):
        def loss_of(a):
            return (self.power(a) - 1) ** 2

        def step(a, momentum):
            momentum = 0.9 * momentum + jax.grad(loss_of)(a)
            return a - 0.001 * momentum, momentum

        a, _ = loops.repeat(300, step, [1.2, 0.0])
        assert abs(a - 1) < 1e-2

    def test_gradients_leave_every_feed_unchanged(self, strategy):
        """JAX drops callbacks or moves them out of the loop if it differentiates and nothing depends on them."""
        infeed, outfeed = InfeedQueue(Increasing(100, ())), OutfeedQueue()

        def inner(a, x):
            def body(v, e):
                outfeed.enqueue(v)
                return a * v + e

            return loops.repeat(3, body, [x], infeed)

        def value(a):
            return loops.repeat(2, lambda x: inner(a, x), [1.0])

        def wanted(a, r):
            v = 1.0
            for k in range(6):
                v = a * v + 4 * k + r
            return v

        results = strategy.run(jax.value_and_grad(value), args=(2.0,))
        for r, (found, gradient) in enumerate(results):
            assert found == wanted(2.0, r)
            assert gradient == jax.grad(wanted)(2.0, r)
        values = outfeed.dequeue()
        assert values.shape == (6, 4)
        assert list(values[:3, 1]) == [1, 3, 11]


class TestBodies:
    def test_bodies_with_other_arguments_are_refused(self, place):
        for wrong in (lambda: 0, lambda v, x, y: v):
            with pytest.raises(TypeError, match="1 loop variables and 1 elements of the infeed"):
                place(lambda body=wrong: loops.repeat(2, body, [ZEROS], InfeedQueue(Increasing(3))))
        with pytest.raises(TypeError, match="does not take its arguments: 2 loop variables"):
            place(lambda: loops.repeat(2, lambda v: v, [1, 2]))
        named = InfeedQueue([{"a": np.int32(1)}])
        with pytest.raises(TypeError, match="the keywords a of the infeed"):
            place(lambda: loops.repeat(2, lambda v, b: v, [1], named))

    def test_bodies_without_an_element_are_refused_as_not_dequeuing(self, place):
        with pytest.raises(ValueError, match="has not been dequeued"):
            place(lambda: loops.repeat(2, lambda v: v, [ZEROS], InfeedQueue(Increasing(3))))

    def test_an_exception_of_a_body_is_raised_and_leaves_no_trace(self, place):
        def fails(v):
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            place(lambda: loops.repeat(2, fails, [0]))
        assert place(lambda: loops.repeat(2, lambda v: v + 1, [0])) == 2
