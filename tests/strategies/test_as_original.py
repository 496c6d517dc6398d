"""`popdist.compat`: programs of the original change one line, and errors for missing names tell the replacement."""

import importlib
import inspect
import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import popdist
import popdist.compat
import strategies
from popdist import horovod
from popdist.compat import ipu

LOADED_WITH_KERAS = {"keras", "keras.layers"}


def test_a_program_of_the_original_runs_as_written():
    """The program reads an infeed and iterates a data set in a scope."""
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 2
    config.configure_ipu_system()
    try:
        strategy = ipu.ipu_strategy.IPUStrategy("/device:IPU:0")
        infeed = ipu.ipu_infeed_queue.IPUInfeedQueue([np.float32(k) for k in range(24)], prefetch_depth=2)
        outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue(outfeed_mode=ipu.ipu_outfeed_queue.IPUOutfeedMode.ALL)

        def body(total, x):
            outfeed.enqueue(x)
            return total + x

        def program():
            with ipu.scopes.ipu_scope("/device:IPU:0"):
                total = ipu.loops.repeat(2, body, [jnp.zeros(())], infeed_queue=infeed)
            return total + 100 * ipu.ops.replication_ops.replication_index()

        found = [[float(value) for value in strategy.run(program)] for _ in range(3)]
        assert found == [[2, 104], [10, 112], [18, 120]]
        assert outfeed.dequeue().shape == (6, 2)
    finally:
        ipu.utils.reset_ipu_configuration()


def test_an_infeed_has_the_elements_of_its_instance(on_instances):
    def run(strategy):
        infeed = ipu.ipu_infeed_queue.IPUInfeedQueue([np.float32(10 * strategy.instance_index)] * 2)
        return float(strategy.run(infeed.dequeue).values[0])

    assert on_instances(2, 2, run) == [0, 10]


def test_an_infeed_is_initialised_once_and_deleted():
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue([np.float32(k) for k in range(4)])
    alone = strategies.LocalStrategy(1)
    infeed.initializer  # noqa: B018  the access starts the queue, as in the original
    assert [float(alone.run(infeed.dequeue)[0]) for _ in range(2)] == [0, 1]
    with pytest.raises(ValueError, match="can only be started once"):
        infeed.initializer  # noqa: B018
    infeed.deleter  # noqa: B018
    infeed.initializer  # noqa: B018
    assert float(alone.run(infeed.dequeue)[0]) == 0


def test_a_benchmark_returns_a_list_of_one_text():
    def epochs(result):
        [text] = result
        return len(json.loads(text)["epochs"])

    data = [np.float32(k) for k in range(8)]
    assert epochs(ipu.dataset_benchmark.dataset_benchmark(data, 2, 4, print_stats=False)) == 2
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(data)
    assert epochs(ipu.dataset_benchmark.infeed_benchmark(infeed, 2, 4, print_stats=False)) == 2


def test_arguments_of_the_original_are_taken_in_their_order():
    mode = ipu.ipu_outfeed_queue.IPUOutfeedMode.LAST
    assert ipu.ipu_outfeed_queue.IPUOutfeedQueue(mode, 0, 5, True).mode is mode
    assert ipu.ipu_outfeed_queue.ScopedIPUOutfeedQueue(mode, device_ordinal=0).mode is mode
    assert list(inspect.signature(ipu.loops.repeat).parameters)[-2:] == ["infeed_queue", "use_while_v1"]
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue([np.float32(k) for k in range(8)], 0, 2, True)
    body = lambda total, x: total + x  # noqa: E731
    assert float(ipu.loops.while_loop(lambda total: total < 3, body, [np.float32(0)], infeed, 9, True)) == 3
    assert float(ipu.loops.repeat(1, body, [np.float32(0)], infeed_queue=infeed, use_while_v1=False)) == 3
    with pytest.raises(TypeError, match="too many positional arguments"):
        ipu.ipu_strategy.IPUStrategy("/device:IPU:0", True, True, 4)


class TestOptimizers:
    """The wrappers of `ipu.optimizers`, in loops of the program's own, and in a Trainer."""

    @pytest.mark.parametrize(("method", "divisor"), [("sum", 1), ("MEAN", 2), ("running_mean", 2)])
    def test_variables_change_after_all_mini_batches(self, method, divisor):
        optimizer = ipu.optimizers.GradientAccumulationOptimizerV2(optax.sgd(0.5), 2, reduction_method=method)

        def program(gradients):
            values, state, found = jnp.full(2, 10.0), optimizer.init(jnp.full(2, 10.0)), []
            for gradient in gradients:
                changes, state = optimizer.update(gradient, state, values)
                values = optax.apply_updates(values, changes)
                found.append(values)
            return jnp.stack(found)

        a, b, c, d = gradients = np.array([[1, -2], [3, 4], [5, 0.5], [-1, 1]], np.float32)
        first = 10 - 0.5 * (a + b) / divisor
        expected = [np.full(2, 10), first, first, first - 0.5 * (c + d) / divisor]
        found = strategies.LocalStrategy(1).run(program, args=[gradients])[0]
        np.testing.assert_allclose(found, expected, rtol=1e-6)

    @pytest.mark.parametrize("dtype", [jnp.float32, lambda variable: jnp.float32], ids=["dtype", "function"])
    def test_accumulators_have_the_dtype_that_is_asked_for(self, dtype):
        optimizer = ipu.optimizers.GradientAccumulationOptimizerV2(optax.sgd(1.0), 2, dtype=dtype)
        largest = jnp.full(2, np.finfo(np.float16).max, jnp.float16)
        _, state = optimizer.update(largest, optimizer.init(jnp.ones(2, jnp.float16)))
        changes, _ = optimizer.update(largest, state)
        assert changes.tolist() == [-2 * 65504] * 2

    @pytest.mark.parametrize("version", ["", "V2"])
    def test_replicas_average_what_they_have_accumulated(self, version):
        wrapper = getattr(ipu.optimizers, f"CrossReplicaGradientAccumulationOptimizer{version}")
        optimizer = wrapper(optax.sgd(1.0), 2)

        def program(gradient):
            first, state = optimizer.update(gradient, optimizer.init(jnp.zeros(())))
            second, _ = optimizer.update(2 * gradient, state)
            return jnp.stack([first, second])

        gradients = strategies.PerReplica((np.float32(1), np.float32(2), np.float32(6)))
        found = strategies.LocalStrategy(3).run(program, args=[gradients])
        assert [one.tolist() for one in found] == [[0, -9]] * 3

    def test_replicas_average_gradients_of_each_update(self):
        optimizer = ipu.optimizers.CrossReplicaOptimizer(optax.sgd(1.0))
        gradients = strategies.PerReplica((np.float32(1), np.float32(3)))
        found = strategies.LocalStrategy(2).run(lambda one: optimizer.update(one, optimizer.init(one))[0], [gradients])
        assert [float(one) for one in found] == [-2, -2]

    @pytest.mark.parametrize(("count", "expected"), [(1, [-2, -4, -6]), (3, [0, 0, -6])])
    def test_a_trainer_takes_a_wrapper(self, count, expected):
        """The mean gradient of each step is 2."""
        optimizer = ipu.optimizers.CrossReplicaGradientAccumulationOptimizerV2(optax.sgd(1.0), count)
        strategy = strategies.LocalStrategy(2)
        trainer = strategies.Trainer(strategy, lambda w, batch, key: jnp.mean(w * batch), optimizer)
        state, found = trainer.init(np.zeros((), np.float32)), []
        for batch in strategy.distribute_dataset(np.array([1, 3] * 3, np.float32), 1, shuffle=False).epoch(0):
            state, _ = trainer.step(state, batch)
            found.append(float(state.variables))
        assert found == expected

    def test_wrong_arguments_are_refused(self):
        own = ipu.optimizers
        with pytest.raises(ValueError, match="num_mini_batches is 0"):
            own.GradientAccumulationOptimizer(optax.sgd(1.0), 0)
        with pytest.raises(ValueError, match="optimizer state must be offloaded to be sharded"):
            own.GradientAccumulationOptimizerV2(optax.sgd(1.0), 2, False, True)
        with pytest.raises(ValueError, match="Cannot parse 'Exp' as one of GradientAccumulationReductionMethod"):
            own.GradientAccumulationOptimizerV2(optax.sgd(1.0), 2, reduction_method="Exp")
        with pytest.raises(TypeError, match="use a gradient transformation of optax"):
            own.GradientAccumulationOptimizerV2("sgd", 2)


@pytest.mark.parametrize("kind", ["infeed", "outfeed", "optimizer"])
def test_an_object_among_the_arguments_of_run_is_refused_with_a_way_out(kind):
    things = {"infeed": strategies.InfeedQueue([np.float32(0)]), "outfeed": strategies.OutfeedQueue()}
    with pytest.raises(TypeError, match="leave it out of the arguments, and use it in the function by its name"):
        strategies.LocalStrategy(1).run(lambda x, _: x, args=[np.float32(1), things.get(kind, optax.sgd(1.0))])


@pytest.mark.parametrize("place", [place for place in popdist.compat._NAMES if place not in LOADED_WITH_KERAS])
def test_every_name_exists_and_its_module_can_be_imported(place):
    module = importlib.import_module(f"popdist.compat.ipu.{place}".rstrip("."))
    for name in popdist.compat._NAMES[place]:
        assert callable(getattr(module, name)), name


def test_names_are_those_of_this_project():
    from popdist.compat.ipu import distributed, pipelining_ops
    from popdist.compat.ipu.horovod.popdist_strategy import PopDistStrategy

    assert distributed.allreduce is popdist.allreduce
    assert pipelining_ops.pipeline is strategies.pipelining_ops.pipeline
    assert ipu.horovod.allreduce is horovod.allreduce
    assert ipu.config.IPUConfig is strategies.config.IPUConfig
    assert PopDistStrategy is ipu.distributed.PopDistStrategy
    assert {"allreduce", "popdist_strategy"} <= set(dir(ipu.horovod))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: ipu.ipu_compiler, r"use strategy.run\(function\)"),
        (lambda: ipu.utils.create_ipu_config, r"use ipu.config.IPUConfig\(\)"),
        (lambda: ipu.loops.forever, "ipu.loops has no forever here; it has repeat, while_loop"),
    ],
)
def test_a_name_without_a_counterpart_names_the_replacement(ask, message):
    with pytest.raises(AttributeError, match=message):
        ask()


def test_a_number_in_the_place_of_a_device_is_refused():
    with pytest.raises(TypeError, match="ipu_device is 4, a int"):
        ipu.ipu_strategy.IPUStrategy(4)
    with pytest.raises(ValueError, match="only PopDistStrategy can omit reductions"):
        ipu.ipu_multi_worker_strategy.IPUMultiWorkerStrategyV1(None, add_ipu_cross_replica_reductions=False)
