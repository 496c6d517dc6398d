"""`popdist.compat`: programs of the original change one line, and errors for missing names tell the replacement."""

import importlib

import jax.numpy as jnp
import numpy as np
import pytest

import popdist
import popdist.compat
import strategies
from popdist import horovod
from popdist.compat import ipu

LOADED_WITH_KERAS = {"keras"}


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
        (lambda: ipu.optimizers.GradientAccumulationOptimizerV2, "gradient_accumulation_count and reduction_method"),
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
