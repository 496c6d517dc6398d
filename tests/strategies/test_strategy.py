"""Strategies: `run` runs a function once per replica; `per_replica`, `reduce`, `gather` and `broadcast` move values."""

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import collectives
import strategies
from collectives import LayoutMismatchError, UnsupportedBufferError
from collectives.tree import combined
from strategies import PerReplica, get_replica_context
from strategies.values import as_per_replica

LIMIT_S = 60


def replica_index():
    return get_replica_context().replica_id_in_sync_group


class TestReplicas:
    def test_all_replicas_are_in_this_process(self, strategy):
        assert strategy.num_replicas_in_sync == 4
        assert (strategy.num_instances, strategy.instance_index) == (1, 0)
        assert strategy.local_replicas == range(4)

    def test_one_replica_is_the_default(self):
        assert strategies.IPUStrategy().num_replicas_in_sync == 1

    @pytest.mark.parametrize("number", [0, -1])
    def test_fewer_than_one_replica_is_refused(self, number):
        with pytest.raises(ValueError, match=f"num_replicas is {number}"):
            strategies.IPUStrategy(num_replicas=number)

    @pytest.mark.parametrize("number", [2.5, "/device:IPU:0"])
    def test_a_number_of_replicas_that_is_no_integer_is_refused(self, number):
        with pytest.raises(TypeError, match="num_replicas is .*; an integer of at least 1 is needed"):
            strategies.IPUStrategy(number)

    def test_a_device_of_the_original_is_no_switch(self, in_new_process):
        in_new_process(
            "import pytest, strategies\n"
            "with pytest.raises(TypeError, match=\"add_ipu_cross_replica_reductions is '/device:IPU:0'; it is\"):\n"
            "    strategies.PopDistStrategy('/device:IPU:0')\n"
        )

    def test_an_instance_drives_its_block_of_the_replicas(self, on_instances):
        blocks = on_instances(3, 6, lambda strategy: list(strategy.local_replicas))
        assert blocks == [[0, 1], [2, 3], [4, 5]]

    @pytest.mark.complete
    def test_without_a_launcher_popdist_strategy_is_one_instance(self, in_new_process):
        program = (
            "import strategies\n"
            "strategy = strategies.PopDistStrategy()\n"
            "print(strategy.num_replicas_in_sync, strategy.num_instances, strategy.instance_index)\n"
        )
        assert in_new_process(program) == "1 1 0\n"

    def test_the_strategy_of_the_scope_is_the_current_one(self, strategy):
        assert strategies.get_strategy() is None
        with strategy.scope() as outer:
            assert strategies.get_strategy() is outer is strategy
            with strategies.IPUStrategy().scope() as inner:
                assert strategies.get_strategy() is inner
            assert strategies.get_strategy() is strategy
        assert strategies.get_strategy() is None

    def test_the_scope_ends_when_an_exception_leaves_it(self, strategy):
        with pytest.raises(KeyError), strategy.scope():
            raise KeyError
        assert strategies.get_strategy() is None


class TestPerReplica:
    def test_each_replica_gets_the_value_of_its_index(self, strategy):
        values = strategy.per_replica(lambda r: r * r)
        assert list(values) == [0, 1, 4, 9]
        assert (len(values), values[2]) == (4, 4)

    def test_values_are_only_made_for_local_replicas(self, on_instances):
        assert on_instances(2, 4, lambda s: list(s.per_replica(lambda r: r))) == [[0, 1], [2, 3]]


class TestRun:
    def test_a_function_runs_once_per_replica(self, strategy):
        assert [int(r) for r in strategy.run(replica_index)] == [0, 1, 2, 3]

    @pytest.mark.parametrize("replicas", [1, 2, 3, 5, 8])
    def test_run_works_on_any_number_of_replicas(self, replicas):
        strategy = strategies.IPUStrategy(num_replicas=replicas)
        assert [int(r) for r in strategy.run(replica_index)] == list(range(replicas))

    def test_replicas_of_all_instances_are_numbered_through(self, on_instances):
        found = on_instances(3, 6, lambda s: [int(r) for r in s.run(replica_index)])
        assert found == [[0, 1], [2, 3], [4, 5]]

    def test_a_plain_argument_goes_whole_to_every_replica(self, strategy):
        matrix = np.arange(12, dtype=np.float32).reshape(4, 3)
        for result in strategy.run(lambda x: x + replica_index(), args=(matrix,)):
            assert result.shape == (4, 3)
        np.testing.assert_array_equal(result, matrix + 3)

    def test_each_replica_gets_its_own_part_of_a_per_replica_argument(self, strategy):
        rows = strategy.per_replica(lambda r: np.full((2, 3), r, np.float32))
        for r, result in enumerate(strategy.run(lambda x, y: x + y, args=(rows, 1.0))):
            np.testing.assert_array_equal(result, np.full((2, 3), r + 1))

    def test_arguments_and_results_can_be_nested(self, strategy):
        given = strategy.per_replica(lambda r: {"a": np.float32(r), "b": (np.int32(r), [np.ones(2, np.float32)])})

        def fn(tree, scale):
            return {"sum": tree["a"] + scale["x"], "rest": [tree["b"][0], tree["b"][1]], "empty": ()}

        for r, result in enumerate(strategy.run(fn, args=(given, {"x": np.float32(10)}))):
            assert (result["sum"], result["rest"][0], result["empty"]) == (r + 10, r, ())
            np.testing.assert_array_equal(result["rest"][1][0], [1, 1])

    def test_values_per_replica_can_stand_anywhere_in_an_argument(self, strategy):
        results = strategy.run(lambda tree: tree["a"] * tree["b"], args=({"a": strategy.per_replica(float), "b": 2.0},))
        assert [float(x) for x in results] == [0, 2, 4, 6]
        assert strategy.reduce("sum", {"a": results, "b": 1})["a"] == 12

    @pytest.mark.parametrize(
        "call",
        [
            lambda strategy, five: strategy.run(lambda x: x, args=(five,)),
            lambda strategy, five: strategy.reduce("sum", five),
            lambda strategy, five: strategy.variable(0.0, "on_read").assign(five),
        ],
        ids=["run", "reduce", "assign"],
    )
    def test_each_local_replica_has_one_value(self, strategy, call):
        with pytest.raises(ValueError, match="a PerReplica has 5 values, but this instance has 4 replicas"):
            call(strategy, PerReplica([1.0] * 5))

    def test_values_of_different_shapes_or_structures_are_refused(self, strategy):
        with pytest.raises(ValueError, match=r"the replicas' values have different shapes, \[0\] and \[1\]"):
            strategy.run(lambda x: x, args=(strategy.per_replica(lambda r: np.zeros(r, np.float32)),))
        with pytest.raises(ValueError, match="replicas have values of different structures"):
            strategy.reduce("sum", strategy.per_replica(lambda r: {f"{r}": 1.0}))

    @pytest.mark.parametrize("call", ["run", "reduce", "gather", "broadcast", "variable"])
    def test_calling_the_strategy_inside_a_replica_is_refused(self, strategy, call):
        arguments = {"run": (replica_index,), "reduce": ("sum", 1.0), "gather": (1.0, 0)}
        with pytest.raises(RuntimeError, match=f"strategy.{call} was called by a replica"):
            strategy.run(lambda: getattr(strategy, call)(*arguments.get(call, (1.0,))))

    def test_arguments_are_a_tuple_and_a_dictionary(self, strategy):
        for value in (1.0, strategy.per_replica(float), np.ones(1, np.float32)):
            with pytest.raises(TypeError, match=r"^args is .*; give a tuple, such as args=\(value,\)"):
                strategy.run(lambda *x: x[0], args=value)
        with pytest.raises(TypeError, match="kwargs is .*; give a dictionary"):
            strategy.run(lambda x: x, kwargs=[1.0])

    def test_keyword_arguments_of_both_kinds_are_accepted(self, strategy):
        results = strategy.run(
            lambda x, *, scale, shift: x * scale + shift,
            args=(np.float32(3),),
            kwargs={"shift": strategy.per_replica(float), "scale": np.float32(2)},
        )
        assert [float(x) for x in results] == [6, 7, 8, 9]

    def test_one_function_can_be_called_with_other_kinds_of_arguments(self, strategy):
        def fn(x):
            return x + 1

        assert [float(x) for x in strategy.run(fn, args=(1.0,))] == [2, 2, 2, 2]
        assert [float(x) for x in strategy.run(fn, args=(strategy.per_replica(float),))] == [1, 2, 3, 4]
        assert strategy.run(fn, args=(np.zeros((2, 2), np.float32),))[0].shape == (2, 2)
        assert [float(x) for x in strategy.run(fn, kwargs={"x": 2.0})] == [3, 3, 3, 3]

    def test_run_compiles_once_per_function_and_shape(self, strategy):
        traced = []

        def fn(x):
            traced.append(x.shape)
            return x

        for _ in range(3):
            strategy.run(fn, args=(np.zeros(2, np.float32),))
        strategy.run(fn, args=(np.zeros(3, np.float32),))
        assert traced == [(2,), (3,)]

    def test_a_function_without_results_gives_none_per_replica(self, strategy):
        assert list(strategy.run(lambda: None)) == [None] * 4

    def test_a_constant_is_a_result(self, strategy):
        assert [int(x) for x in strategy.run(lambda: 7)] == [7, 7, 7, 7]

    @pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int32", "float16", "bfloat16", "float32"])
    def test_dtypes_are_kept(self, strategy, dtype):
        given = jnp.ones(3, dtype)
        for result in strategy.run(lambda x: x, args=(given,)):
            assert result.dtype == given.dtype

    def test_empty_arrays_are_arrays(self, strategy):
        assert strategy.run(lambda x: x, args=(np.zeros((0, 3), np.float32),))[3].shape == (0, 3)

    def test_results_of_run_can_be_arguments_of_run(self, strategy):
        once = strategy.run(lambda x: x + 1, args=(strategy.per_replica(float),))
        assert [float(x) for x in strategy.run(lambda x: x * 2, args=(once,))] == [2, 4, 6, 8]

    def test_an_exception_of_the_function_is_raised_and_later_runs_work(self, strategy):
        def fails():
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            strategy.run(fails)
        with pytest.raises(RuntimeError, match="strategy.run"):
            get_replica_context()
        assert len(strategy.run(replica_index)) == 4


class TestFloat64IsRefused:
    """Float64 values: JAX would silently make them float32."""

    @pytest.mark.parametrize("value", [np.float64(1), np.ones(2), {"deep": [np.ones(2)]}])
    def test_float64_is_refused_as_an_argument(self, strategy, value):
        with pytest.raises(TypeError, match="Unsupported data type for input: float64"):
            strategy.run(lambda x: x, args=(value,))

    def test_float64_is_refused_as_a_keyword_argument(self, strategy):
        with pytest.raises(TypeError, match="Unsupported data type for input: float64"):
            strategy.run(lambda x: x, kwargs={"x": np.ones(2)})

    def test_float64_is_refused_as_an_argument_of_one_replica(self, strategy):
        with pytest.raises(TypeError, match="Unsupported data type for input: float64"):
            strategy.run(lambda x: x, args=(strategy.per_replica(np.float64),))

    def test_float64_is_refused_as_a_result(self, strategy):
        with pytest.raises(TypeError, match="Unsupported data type for output: float64"):
            strategy.run(lambda: np.ones(2))

    def test_numbers_of_python_are_fine(self, strategy):
        assert strategy.run(lambda x: x, args=(1.5,))[0].dtype == np.float32


class TestValuesThatJaxWouldChange:
    """Values that JAX would change: it truncates integers of 64 bits, and masked arrays would lose their masks."""

    @pytest.mark.parametrize("value", [np.int64(2**31), np.array([1, -(2**31) - 1]), np.uint64(2**32)])
    def test_integers_that_do_not_fit_are_refused(self, strategy, value):
        for call in (
            lambda: strategy.run(lambda x: x, args=(value,)),
            lambda: strategy.run(lambda x: x, args=(strategy.per_replica(lambda _: value),)),
            lambda: strategy.broadcast({"steps": value}),
            lambda: strategy.variable(value),
        ):
            with pytest.raises(
                ValueError, match=r"do not fit into u?int32, which JAX would keep; use smaller numbers, or enable"
            ):
                call()
        largest = np.array([2**31 - 1, -(2**31)])
        assert strategy.broadcast(largest).tolist() == largest.tolist()
        assert strategy.reduce("max", strategy.per_replica(lambda _: value)).tolist() == value.tolist()

    def test_masked_arrays_are_refused(self, strategy):
        masked = np.ma.masked_equal(np.arange(4, dtype=np.float32), 2)
        for call in (
            lambda: strategy.reduce("mean", strategy.per_replica(lambda _: masked)),
            lambda: strategy.broadcast([masked]),
            lambda: strategy.run(lambda x: x, args=(strategy.per_replica(lambda _: masked),)),
        ):
            with pytest.raises(collectives.UnsupportedBufferError, match="is masked, and its mask would be lost"):
                call()


class TestReduce:
    @pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int32, np.uint32, np.int64, np.uint64])
    def test_means_of_integers_are_right_even_if_their_sum_overflows(self, strategy, dtype):
        largest = np.iinfo(dtype).max
        found = strategy.reduce("mean", strategy.per_replica(lambda r: np.array([largest - r], dtype)))
        assert (found.dtype, found.tolist()) == (dtype, [largest - 2])

    @pytest.mark.parametrize(("op", "wanted"), [("sum", 6.0), ("mean", 1.5), ("min", 0.0), ("max", 3.0)])
    def test_values_are_reduced_over_all_replicas(self, strategy, op, wanted):
        assert strategy.reduce(op, strategy.per_replica(float)) == wanted

    def test_operations_can_be_written_in_capitals(self, strategy):
        assert strategy.reduce("SUM", strategy.per_replica(float)) == 6

    @pytest.mark.parametrize("instances", [1, 2, 3, 6])
    @pytest.mark.parametrize(("op", "wanted"), [("sum", 15), ("mean", 2), ("min", 0), ("max", 5)])
    def test_values_are_reduced_over_all_replicas_of_all_instances(self, on_instances, instances, op, wanted):
        found = on_instances(instances, 6, lambda s: int(s.reduce(op, s.per_replica(np.int32))))
        assert found == [wanted] * instances

    def test_a_value_that_all_replicas_share_counts_once_per_replica(self, on_instances):
        assert on_instances(2, 4, lambda s: float(s.reduce("sum", np.float32(2)))) == [8, 8]

    def test_a_mean_of_integers_is_truncated_towards_zero(self, strategy):
        assert strategy.reduce("mean", strategy.per_replica(lambda r: np.int32(-r))) == -1

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_16_bit_floats_are_added_in_float32(self, strategy, dtype):
        values = strategy.per_replica(lambda r: np.asarray(jnp.asarray([256.0, 1.0, 1.0, 1.0][r] * 8, dtype)))
        assert strategy.reduce("sum", values) == np.asarray(jnp.asarray(259.0 * 8, dtype))

    def test_a_16_bit_mean_does_not_overflow(self, strategy):
        values = strategy.per_replica(lambda r: np.float16(40000))
        assert strategy.reduce("mean", values) == np.float16(40000)

    def test_replicas_are_added_in_the_order_of_the_tree(self, on_instances, bits):
        parts = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32) * 1e3
        wanted = ((parts[0] + parts[1]) + (parts[2] + parts[3])) + (parts[4] + parts[5])
        for instances in (1, 2, 3, 6):
            for result in on_instances(instances, 6, lambda s: s.reduce("sum", s.per_replica(parts.__getitem__))):
                assert bits(result) == bits(wanted)

    def test_every_leaf_of_a_tree_is_reduced(self, strategy):
        given = strategy.per_replica(lambda r: {"a": np.full((2, 2), r, np.float32), "b": (np.int32(r),)})
        found = strategy.reduce("sum", given)
        np.testing.assert_array_equal(found["a"], np.full((2, 2), 6))
        assert found["b"] == (6,)

    def test_an_unknown_operation_is_refused_with_the_known_ones(self, strategy):
        with pytest.raises(ValueError, match="Unsupported reduce op: 'product'; use one of sum, mean, min, max"):
            strategy.reduce("product", strategy.per_replica(float))

    def test_contributions_stay_unchanged(self, strategy):
        values = strategy.per_replica(lambda r: np.full(3, r, np.float32))
        strategy.reduce("sum", values)
        for r, value in enumerate(values):
            np.testing.assert_array_equal(value, [r] * 3)


class TestReduceAlongAnAxis:
    """Reduction along an axis: every row of every replica counts once, as if it were the value of a replica."""

    ROWS = np.random.default_rng(0).standard_normal((14, 3)).astype(np.float32) * 1e3
    ENDS = (0, 1, 4, 6, 9, 13, 14)  # replicas have 1, 3, 2, 3, 4 and 1 rows

    def rows_of(self, replica):
        return self.ROWS[self.ENDS[replica] : self.ENDS[replica + 1]]

    def test_rows_are_added_in_the_order_of_one_tree(self, on_instances, bits):
        wanted = combined(list(self.ROWS), np.add)
        for instances in (1, 2, 3, 6):
            for found in on_instances(
                instances, 6, lambda s: s.reduce("sum", s.per_replica(lambda r: self.rows_of(r)), axis=0)
            ):
                assert bits(found) == bits(wanted)

    @pytest.mark.parametrize(("op", "of"), [("mean", np.mean), ("min", np.min), ("max", np.max)])
    def test_a_mean_is_that_of_all_rows(self, on_instances, op, of):
        found = on_instances(3, 6, lambda s: s.reduce(op, s.per_replica(lambda r: self.rows_of(r)), axis=0))
        for each in found:
            np.testing.assert_allclose(each, of(self.ROWS, axis=0), rtol=1e-4)

    @pytest.mark.parametrize("axis", [0, 1, 2, -1, (0, 2), (-1, 0), [0, 1, 2]])
    def test_values_are_reduced_along_any_axis_or_several(self, strategy, axis):
        values = np.arange(4 * 2 * 3 * 5, dtype=np.int32).reshape(4, 2, 3, 5)
        found = strategy.reduce("sum", strategy.per_replica(values.__getitem__), axis=axis)
        np.testing.assert_array_equal(found, values.sum(0).sum(tuple(axis) if isinstance(axis, list) else axis))

    def test_means_along_an_axis_of_one_row_are_those_over_replicas(self, strategy, bits):
        values = strategy.per_replica(lambda r: self.ROWS[r : r + 1])
        assert bits(strategy.reduce("mean", values, axis=0)) == bits(strategy.reduce("mean", values)[0])

    @pytest.mark.parametrize("largest", [np.int8(127), np.int64(2**63 - 1), np.float16(65504)])
    def test_means_do_not_overflow(self, strategy, largest):
        found = strategy.reduce("mean", np.full(300, largest), axis=0)
        assert (found.dtype, found) == (largest.dtype, largest)

    def test_results_of_run_can_be_reduced_along_an_axis(self, strategy):
        rows = strategy.per_replica(lambda r: np.arange(3 * r, 3 * r + 3, dtype=np.float32))
        losses = strategy.run(lambda x: x * x, args=(rows,))
        assert strategy.reduce("sum", losses, axis=0) == np.sum(np.arange(12) ** 2)

    @pytest.mark.parametrize(
        ("axis", "error", "message"),
        [
            (1, ValueError, r"axis is 1, but a replica's value has the shape \[2\]; name an axis that it has"),
            (-2, ValueError, "axis is -2"),
            ((0, 0), ValueError, r"names one axis of \[2\] twice"),
            ("0", TypeError, "axis is '0'; it must be an integer, or a tuple of integers"),
            (True, TypeError, "axis is True"),
        ],
    )
    def test_an_axis_that_does_not_exist_is_refused(self, strategy, axis, error, message):
        with pytest.raises(error, match=message):
            strategy.reduce("sum", np.zeros(2, np.float32), axis=axis)

    def test_an_empty_axis_is_refused(self, strategy):
        with pytest.raises(ValueError, match=r"of the shape \[0, 2\] is empty along it; give each replica at least"):
            strategy.reduce("sum", np.zeros((0, 2), np.float32), axis=0)

    def test_instances_that_name_different_axes_are_refused(self, on_instances):
        with pytest.raises(LayoutMismatchError, match="reduce/0 along"):
            on_instances(2, 2, lambda s: s.reduce("sum", np.zeros((2, 2), np.float32), axis=s.instance_index))


class TestGather:
    @pytest.mark.parametrize("instances", [1, 2, 3, 6])
    def test_values_come_in_the_order_of_the_replicas(self, on_instances, instances):
        found = on_instances(instances, 6, lambda s: s.gather(s.per_replica(lambda r: np.float32([r, -r])), axis=0))
        for each in found:
            assert each.tolist() == [sign * r for r in range(6) for sign in (1, -1)]

    def test_replicas_can_have_different_lengths(self, on_instances, bits):
        values = [np.arange(2 * length, dtype=np.int32).reshape(2, length) for length in (2, 0, 3, 1)]
        wanted = np.concatenate(values, axis=1)
        for axis in (1, -1):
            for found in on_instances(2, 4, lambda s, axis=axis: s.gather(s.per_replica(values.__getitem__), axis)):
                assert bits(found) == bits(wanted)

    @pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "bfloat16", "float64"])
    def test_dtypes_are_kept(self, strategy, dtype):
        value = np.zeros(1, jnp.dtype(dtype))
        assert strategy.gather(value, 0).dtype == value.dtype

    def test_every_leaf_of_a_tree_is_gathered(self, strategy):
        given = strategy.per_replica(lambda r: {"a": np.full((1, 2), r, np.float32), "b": (np.int32([r]),)})
        found = strategy.gather(given, axis=0)
        np.testing.assert_array_equal(found["a"], [[r, r] for r in range(4)])
        np.testing.assert_array_equal(found["b"][0], range(4))

    def test_gathering_empty_arrays_gives_an_empty_array(self, on_instances):
        found = on_instances(2, 4, lambda s: s.gather(np.zeros((0, 3), np.float32), axis=0).shape)
        assert found == [(0, 3), (0, 3)]

    @pytest.mark.parametrize(
        ("value", "axis", "error", "message"),
        [
            (
                np.float32(1),
                0,
                ValueError,
                r"has the shape \[\]; .*give values with one more",
            ),
            (np.zeros(2, np.float32), 1, ValueError, "axis is 1"),
            (np.zeros(2, np.float32), (0,), TypeError, r"axis is \(0,\); it must be an integer"),
            (np.array(["word"]), 0, UnsupportedBufferError, "replicas cannot exchange <U4"),
            (np.array([{}], object), 0, UnsupportedBufferError, "replicas cannot exchange object"),
        ],
    )
    def test_invalid_values_and_axes_are_refused(self, strategy, value, axis, error, message):
        with pytest.raises(error, match=message):
            strategy.gather(value, axis)

    def test_replicas_that_differ_in_shape_or_dtype_are_refused(self, strategy, on_instances):
        with pytest.raises(ValueError, match=r"have float32\[1\] and float32\[2\] along the gathered axis"):
            strategy.gather(strategy.per_replica(lambda r: np.zeros((1, 1 + r // 2), np.float32)), axis=0)
        with pytest.raises(LayoutMismatchError, match=r"gather/0 of (float32|int32)\[\] along 0"):
            on_instances(2, 2, lambda s: s.gather(np.zeros(2, ["float32", "int32"][s.instance_index]), axis=0))


class TestNamesOfTheOriginal:
    def test_experimental_run_v2_names_its_replacement(self, strategy):
        with pytest.raises(RuntimeError, match=r"experimental_run_v2 is gone, .* call strategy\.run"):
            strategy.experimental_run_v2(lambda x: x, args=(1,))

    def test_reductions_to_a_destination_reach_all_instances(self, on_instances):
        def program(strategy):
            values = [strategy.per_replica(float), strategy.per_replica(lambda r: np.float32([r, 1]))]
            one = strategy.extended.reduce_to("SUM", values[0], destinations=values[0])
            several = strategy.extended.batch_reduce_to("mean", [(value, value) for value in values])
            return [float(one), float(several[0]), several[1].tolist()]

        assert on_instances(2, 4, program) == [[6.0, 1.5, [1.5, 1.0]]] * 2


class TestBroadcast:
    def test_broadcasting_on_one_instance_gives_the_same_values(self, strategy):
        tree = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": 2.0, "flag": np.array([True, False])}
        found = strategy.broadcast(tree)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(found))
        jax.tree.map(np.testing.assert_array_equal, found, tree)

    def test_all_instances_get_the_values_of_instance_0(self, on_instances):
        found = on_instances(3, 3, lambda s: np.asarray(s.broadcast(np.full(2, s.instance_index + 7.0, np.float32))))
        assert [list(value) for value in found] == [[7, 7]] * 3

    def test_broadcast_values_do_not_follow_later_changes(self, strategy):
        given = np.zeros(1024, np.float32)
        found = strategy.broadcast(given)
        given[:] = 1
        assert not np.asarray(found).any()

    @pytest.mark.parametrize("other", [np.zeros(3, np.float32), np.zeros(2, np.int32)])
    def test_a_leaf_that_differs_is_named(self, on_instances, other):
        def program(strategy):
            tree = {
                "first": np.float32(0),
                "second": other if strategy.instance_index else np.zeros(2, np.float32),
            }
            with pytest.raises(collectives.LayoutMismatchError) as caught:
                strategy.broadcast(tree)
            return str(caught.value)

        for message in on_instances(2, 2, program):
            assert "Tensor layouts did not match on all instances" in message
            assert "second" in message

    @pytest.mark.parametrize("is_short", [0, 1])
    def test_an_additional_leaf_is_named(self, on_instances, is_short):
        def program(strategy):
            tree = {"a": np.float32(0)} | ({} if strategy.instance_index == is_short else {"b": np.float32(1)})
            with pytest.raises(collectives.LayoutMismatchError) as caught:
                strategy.broadcast(tree)
            return str(caught.value)

        for message in on_instances(2, 2, program):
            assert "'b'" in message


def test_a_per_replica_value_is_not_kept_alive_by_run():
    strategy = strategies.IPUStrategy(num_replicas=2)
    array = np.zeros(4, np.float32)
    strategy.run(lambda x: x + 1, args=(PerReplica((array, array)),))
    freed = threading.Event()
    weakref.finalize(array, freed.set)
    del array
    gc.collect()
    assert freed.wait(LIMIT_S)  # threads of replicas drop their arguments after they have told their results


def test_results_can_be_random_keys(strategy):
    keys = strategy.run(lambda: jax.random.key(3))
    assert [jax.random.key_data(key).tolist() for key in keys] == [jax.random.key_data(jax.random.key(3)).tolist()] * 4


def test_an_array_on_one_device_goes_whole_to_all_replicas(strategy):
    for value in (jnp.arange(3.0), strategy.variable(np.arange(3, dtype=np.float32)).value):
        assert [list(result) for result in strategy.run(lambda v: v * 2, args=(value,))] == [[0, 2, 4]] * 4


# ---- values per replica


def test_per_replica_is_a_sequence_of_local_values():
    values = PerReplica((4, 5, 6))
    assert (list(values), len(values), values[1]) == ([4, 5, 6], 3, 5)


def test_trees_without_values_per_replica_are_dealt_unchanged():
    tree = {"a": 1, "b": (2, 3)}
    assert as_per_replica(tree, range(2)) is tree
    whole = PerReplica((1, 2))
    assert as_per_replica(whole, range(2)) is whole


def test_every_replica_gets_a_whole_tree_with_its_own_value_in_it():
    tree = {"shared": 7, "own": (PerReplica((1, 2)), PerReplica(("x", "y")))}
    found = as_per_replica(tree, range(2))
    assert list(found) == [{"shared": 7, "own": (1, "x")}, {"shared": 7, "own": (2, "y")}]


@pytest.mark.parametrize("value", [PerReplica((1, 2, 3)), [0, PerReplica((1,))]])
def test_another_number_of_values_is_refused(value):
    with pytest.raises(ValueError, match=r"has [13] values, but this instance has 2 replicas; make it with strategy"):
        as_per_replica(value, range(2))


def test_values_of_other_replicas_are_refused():
    values = PerReplica((1, 2), range(2, 4))
    assert list(as_per_replica([values], range(2, 4))) == [[1], [2]]
    with pytest.raises(ValueError, match=r"to the replicas \[2, 3\], but this instance has \[0, 1\]; make it with"):
        as_per_replica([values], range(2))
