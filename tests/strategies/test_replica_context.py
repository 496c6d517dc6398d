"""`all_reduce` of the replica context inside a compiled function, and its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adding import added
from jax.experimental import io_callback

import strategies
from collectives import UnsupportedBufferError
from strategies import get_replica_context
from strategies.cross_replica_ops import cross_replica_mean
from strategies.errors import EndOfDataError


def all_reduce(op, value):
    return get_replica_context().all_reduce(op, value)


def on_replicas(strategy, function, values):
    """Return the results of `function(value)` on each replica, in replica order."""
    return list(strategy.run(function, args=(strategy.per_replica(lambda r: values[r]),)))


@pytest.fixture
def run(strategy):
    """Provide `on_replicas` for four replicas; tests/jobs/test_promises.py covers several instances."""
    return lambda function, values: on_replicas(strategy, function, values)


@pytest.mark.parametrize(("op", "wanted"), [("sum", 10.0), ("mean", 2.5), ("min", 1.0), ("max", 4.0)])
def test_every_replica_gets_the_result(run, op, wanted):
    assert run(lambda x: all_reduce(op, x), [1.0, 2.0, 3.0, 4.0]) == [wanted] * 4


@pytest.mark.parametrize(("op", "wanted"), [("sum", -7), ("mean", -1), ("min", -4), ("max", 1)])
@pytest.mark.parametrize("dtype", [np.int8, np.int32])
def test_integers_stay_integers_and_means_are_truncated_towards_zero(run, op, wanted, dtype):
    for result in run(lambda x: all_reduce(op, x), [dtype(-4), dtype(1), dtype(-2), dtype(-2)]):
        assert (result, result.dtype) == (wanted, dtype)


@pytest.mark.parametrize(("dtype", "largest"), [("uint8", 255), ("int16", 2**15 - 1), ("uint32", 2**32 - 1)])
@pytest.mark.parametrize("instances", [1, 2, 4])
def test_means_of_integers_are_right_even_if_their_sum_overflows(on_instances, instances, dtype, largest):
    def program(strategy):
        values = strategy.per_replica(lambda r: np.array([largest - r, r], dtype))
        outside = strategy.reduce("mean", values).tolist()
        inside = strategy.run(lambda x: all_reduce("mean", x), args=(values,))
        in_groups = strategy.run(lambda x: cross_replica_mean(x, 2), args=(values,))
        return [outside, *(value.tolist() for value in inside)], [value.tolist() for value in in_groups]

    results = on_instances(instances, 4, program)
    assert all(means == [[largest - 2, 1]] * len(means) for means, _ in results)
    assert sum((groups for _, groups in results), []) == [[largest - 1, 0]] * 2 + [[largest - 3, 2]] * 2


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_floats_are_added_in_float32_and_rounded_once(run, bits, op, dtype):
    parts = [jnp.asarray(np.random.default_rng(r).standard_normal(7) * 100, dtype) for r in range(4)]
    total = added([np.asarray(part).astype(np.float32) for part in parts])
    wanted = (total / np.float32(4) if op == "mean" else total).astype(parts[0].dtype)
    for result in run(lambda x: all_reduce(op, x), [np.asarray(part) for part in parts]):
        assert bits(result) == bits(wanted)


@pytest.mark.parametrize("replicas", [2, 3, 6, 8])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_the_result_is_the_ordered_sum_for_every_number_of_replicas(bits, op, replicas):
    parts = np.random.default_rng(1).standard_normal((replicas, 3, 5)).astype(np.float32) * 1e3
    wanted = added(parts)
    if op == "mean":
        wanted = wanted / np.float32(replicas)
    strategy = strategies.IPUStrategy(num_replicas=replicas)
    for result in on_replicas(strategy, lambda x: all_reduce(op, x), parts):
        assert bits(result) == bits(wanted)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 3), (2, 3, 4)])
def test_shapes_are_kept(run, shape):
    for result in run(lambda x: all_reduce("sum", x), [np.ones(shape, np.float32)] * 4):
        np.testing.assert_array_equal(result, np.full(shape, 4))


def test_every_leaf_of_a_tree_is_reduced(run):
    def fn(x):
        return all_reduce("sum", {"a": x, "b": [x * 2, jnp.int32(1)]})

    for result in run(fn, [1.0, 2.0, 3.0, 4.0]):
        assert (result["a"], *result["b"]) == (10, 20, 4)


def test_results_can_be_reduced_again(run):
    """The result is s * s of the sum s of squares, summed again over four replicas."""

    def fn(x):
        return all_reduce("sum", all_reduce("sum", x * x) ** 2)

    assert run(fn, [1.0, 2.0, 3.0, 4.0]) == [4 * 30.0**2] * 4


def test_several_independent_reductions_do_not_disturb_each_other(run):
    def fn(x):
        return [all_reduce(op, x + k) for k in range(6) for op in ("sum", "max")]

    wanted = [value for k in range(6) for value in (10 + 4 * k, 4 + k)]
    for result in run(fn, [1.0, 2.0, 3.0, 4.0]):
        assert result == wanted


def test_reductions_work_inside_a_scan(run):
    def fn(x):
        def body(total, k):
            reduced = all_reduce("sum", x * k)
            return total + reduced, reduced

        return jax.lax.scan(body, jnp.float32(0), jnp.arange(1.0, 6.0))

    for total, each in run(fn, [1.0, 2.0, 3.0, 4.0]):
        assert total == 150
        np.testing.assert_array_equal(each, [10, 20, 30, 40, 50])


@pytest.mark.parametrize(("flag", "wanted"), [(True, 10), (False, 4)])
def test_reductions_work_inside_a_branch_that_all_replicas_take(run, flag, wanted):
    def fn(x):
        return jax.lax.cond(flag, lambda y: all_reduce("sum", y), lambda y: all_reduce("max", y), x)

    assert run(fn, [1.0, 2.0, 3.0, 4.0]) == [wanted] * 4


def test_reductions_work_in_a_loop_whose_end_depends_on_them(run):
    def fn(x):
        return jax.lax.while_loop(lambda y: y < 100.0, lambda y: all_reduce("sum", y), x)

    assert run(fn, [1.0, 1.0, 1.0, 1.0]) == [256.0] * 4


def test_reductions_work_inside_a_nested_jit(run):
    assert run(lambda x: jax.jit(lambda y: all_reduce("sum", y))(x), [1.0, 2.0, 3.0, 4.0]) == [10.0] * 4


class TestGradient:
    """Gradients of reductions: the same reduction of the gradients."""

    def test_the_gradient_of_a_sum_is_the_sum(self, run):
        def fn(x):
            return jax.grad(lambda y: all_reduce("sum", y) * (get_replica_context().replica_id_in_sync_group + 1.0))(x)

        assert run(fn, [1.0, 2.0, 3.0, 4.0]) == [10.0] * 4

    def test_the_gradient_of_a_mean_is_the_mean(self, run):
        def fn(x):
            return jax.grad(lambda y: all_reduce("mean", y) * (get_replica_context().replica_id_in_sync_group + 1.0))(x)

        assert run(fn, [1.0, 2.0, 3.0, 4.0]) == [2.5] * 4

    def test_gradients_go_through_a_scan(self, run):
        def loss(x):
            return jax.lax.scan(lambda c, k: (c + all_reduce("sum", x * k), None), 0.0, jnp.arange(1.0, 4.0))[0]

        assert run(jax.grad(loss), [1.0, 2.0, 3.0, 4.0]) == [24.0] * 4

    def test_value_and_grad_returns_the_value(self, run):
        def fn(x):
            return jax.value_and_grad(lambda y: all_reduce("mean", y * y))(x)

        found = run(fn, [1.0, 2.0, 3.0, 4.0])
        assert found == [(7.5, 2.0 * x) for x in (1.0, 2.0, 3.0, 4.0)]

    @pytest.mark.parametrize("op", ["min", "max"])
    def test_minima_and_maxima_have_no_gradient(self, strategy, op):
        with pytest.raises(TypeError, match=f"all_reduce\\('{op}'\\) has no gradient; use 'sum' or 'mean'"):
            strategy.run(jax.grad(lambda x: all_reduce(op, x)), args=(1.0,))


class TestErrors:
    def test_an_unknown_operation(self, strategy):
        with pytest.raises(ValueError, match="Unsupported reduce op: 'product'"):
            strategy.run(lambda x: all_reduce("product", x), args=(1.0,))

    @pytest.mark.parametrize("value", [True, 1j])
    def test_one_instance_refuses_dtypes_that_several_could_not_reduce(self, strategy, value):
        with pytest.raises(UnsupportedBufferError, match="replicas cannot reduce (bool|complex64); convert it to"):
            strategy.run(lambda: all_reduce("max", value))

    def test_replicas_do_not_wait_for_a_failed_one(self, strategy):
        def unlucky(replica):
            if replica == 2:
                raise ValueError("no luck today")
            return replica

        def program(fails):
            replica = get_replica_context().replica_id_in_sync_group
            found = io_callback(unlucky, jax.ShapeDtypeStruct((), np.int32), replica) if fails else replica
            return all_reduce("sum", found)

        with pytest.raises(jax.errors.JaxRuntimeError, match="no luck today"):
            strategy.run(lambda: program(fails=True))
        assert list(strategy.run(lambda: program(fails=False))) == [6] * 4

    def test_the_first_error_is_the_one_raised(self, strategy):
        reducer = strategy.replicas.reducer
        reducer.last_error = None
        for error in (EndOfDataError("end"), ValueError("cause"), KeyError("consequence"), EndOfDataError("end")):
            reducer.fail(error)
        assert str(reducer.last_error) == "cause"

    def test_asking_for_the_replica_outside_of_run_is_refused(self):
        with pytest.raises(RuntimeError, match="call get_replica_context inside strategy.run or a loss function"):
            get_replica_context()


class TestTheReplicaContext:
    def test_the_context_knows_all_replicas(self, strategy):
        assert list(strategy.run(lambda: get_replica_context().num_replicas_in_sync)) == [4, 4, 4, 4]

    def test_values_stay_local_without_cross_replica_reductions(self, on_instances):
        def program(strategy):
            return [float(x) for x in strategy.run(lambda x: all_reduce("sum", x), args=(strategy.per_replica(float),))]

        found = on_instances(2, 4, program, add_cross_replica_reductions=False)
        assert found == [[0, 1], [2, 3]]

    def test_a_loss_function_has_a_replica_context(self, strategy):
        import optax

        def loss_fn(variables, batch, key):
            context = get_replica_context()
            return variables["w"] * 0, {"indices": context.all_reduce("sum", context.replica_id_in_sync_group)}

        trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1))
        state = trainer.init({"w": jnp.float32(1)})
        _, metrics = trainer.step(state, np.zeros(4, np.float32))
        assert metrics["indices"] == 6
