"""A function of each micro-batch's gradients, applied before any addition."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import strategies
from strategies import MapGradientOptimizer, Pipelining, pipelining_ops
from strategies.jax.updates.optimizers import unwrapped

SLOPES = np.float32([3, -2, 5, 0.5, 4, 2, -7, 1])
"""The gradients of two replicas with four micro-batches of one row each."""


def clipped(gradient, variable):
    return jnp.clip(gradient, -1, 1)


def loss_fn(variables, batch, key):
    return jnp.sum(variables["w"] * batch)


def trained(strategy, optimizer=None, loss_fn=loss_fn, **options):
    options = {"gradient_accumulation_count": 4, "reduction_method": "sum"} | options
    trainer = strategies.Trainer(strategy, loss_fn, optimizer or optax.sgd(1.0), **options)
    state = trainer.init({"w": np.float32([0])})
    replicas = strategy.local_replicas
    state, _ = trainer.step(state, SLOPES.reshape(2, 4, 1)[replicas.start : replicas.stop].reshape(-1, 1))
    return state.variables["w"].tolist()


def two():
    return strategies.IPUStrategy(2)


def test_each_micro_batch_on_each_replica_is_mapped_before_the_sum():
    of_replicas = np.clip(SLOPES, -1, 1).reshape(2, 4).sum(axis=1)
    assert trained(two(), map_gradient=clipped) == [-of_replicas.mean()]
    assert trained(two()) == [-SLOPES.sum() / 2]


def test_an_optimizer_that_maps_is_the_option():
    assert trained(two(), MapGradientOptimizer(optax.sgd(1.0), clipped)) == trained(two(), map_gradient=clipped)


def test_without_accumulation_each_replica_is_mapped():
    alone = trained(two(), map_gradient=clipped, gradient_accumulation_count=1)
    assert alone == [-np.clip(SLOPES.reshape(2, 4).sum(axis=1), -1, 1).mean()]


def test_the_inner_of_two_functions_comes_first():
    inner = MapGradientOptimizer(optax.sgd(1.0), lambda gradient, variable: gradient + 1)
    _, both = unwrapped(MapGradientOptimizer(inner, lambda gradient, variable: gradient * variable))
    assert both(2.0, 10.0) == 30.0


def test_the_function_gets_the_variable_of_the_gradient():
    decayed = MapGradientOptimizer(optax.sgd(1.0), lambda gradient, variable: gradient + 0.5 * (variable + 2))
    assert trained(two(), decayed) == [-(SLOPES.sum() / 2 + 4)]


@pytest.mark.parametrize("method", ["sum", "mean", "running_mean"])
def test_the_bits_are_the_same_for_every_number_of_instances(on_instances, method):
    def one(strategy):
        return trained(strategy, map_gradient=clipped, reduction_method=method)

    assert on_instances(2, 2, one) == [trained(two(), map_gradient=clipped, reduction_method=method)] * 2


def test_the_function_does_not_see_the_loss_scale():
    assert trained(two(), map_gradient=clipped, loss_scaling=1024.0) == trained(two(), map_gradient=clipped)


def test_a_gradient_that_overflows_is_not_hidden_by_the_function():
    """Clipping turns infinity into 1, and the step would be applied."""

    def overflows(variables, batch, key):
        return jnp.sum(variables["w"] * batch) * jnp.float32(1e38)

    with pytest.raises(strategies.NonFiniteGradientError):
        trained(two(), loss_fn=overflows, map_gradient=clipped, check_numerics=True)
    assert trained(two(), loss_fn=overflows, map_gradient=clipped, loss_scaling="dynamic") == [0]


def test_another_shape_than_that_of_the_gradient_is_refused():
    with pytest.raises(ValueError, match=r"map_gradient returns shape \[\] for a gradient of \[1\]"):
        trained(two(), map_gradient=lambda gradient, variable: gradient.sum())


def test_a_value_that_is_no_function_is_refused():
    with pytest.raises(TypeError, match="map_gradient is 3, a int"):
        trained(two(), map_gradient=3)
    with pytest.raises(TypeError, match="the gradient_mapping_function is 3"):
        trained(two(), MapGradientOptimizer(optax.sgd(1.0), 3))


# ---- in pipelines


def staged(variables, batch, key):
    with strategies.pipeline_stage(0):
        hidden = batch * variables["a"]
    with strategies.pipeline_stage(1):
        return jnp.sum(hidden * variables["b"])


def of_stages(pipeline, loss_fn=staged, **options):
    trainer = strategies.Trainer(
        strategies.IPUStrategy(2, ipus_per_replica=2),
        loss_fn,
        MapGradientOptimizer(optax.sgd(1.0), clipped),
        gradient_accumulation_count=4,
        reduction_method="sum",
        pipeline=pipeline,
        **options,
    )
    state = trainer.init({"a": np.float32([2]), "b": np.float32([0.5])})
    return jax.tree.map(lambda leaf: float(leaf[0]), trainer.step(state, SLOPES[:, None])[0].variables)


@pytest.mark.parametrize("schedule", ["grouped", "sequential", "zero_bubble"])
def test_a_pipeline_maps_each_micro_batch(schedule):
    found = of_stages(Pipelining([0, 1], schedule))
    assert found == of_stages(None)
    wanted = [np.clip(SLOPES * factor, -1, 1).sum() / 2 for factor in (0.5, 2)]
    assert found == {"a": 2 - wanted[0], "b": 0.5 - wanted[1]}


@pytest.mark.parametrize("pipeline", [None, Pipelining([0, 1], "grouped")])
def test_a_changed_value_that_only_the_function_reads_is_refused(pipeline):
    settings = SimpleNamespace(scale=1.0)
    trainer = strategies.Trainer(
        strategies.IPUStrategy(2, ipus_per_replica=2),
        staged,
        optax.sgd(1.0),
        gradient_accumulation_count=4,
        map_gradient=lambda gradient, variable: gradient * settings.scale,
        pipeline=pipeline,
    )
    state, _ = trainer.step(trainer.init({"a": np.float32([2]), "b": np.float32([0.5])}), SLOPES[:, None])
    settings.scale = 100.0
    with pytest.raises(RuntimeError, match=r"reads settings.scale, .* has changed since"):
        trainer.step(state, SLOPES[:, None])


def test_a_variable_of_several_stages_is_refused_in_a_pipeline():
    def shared(variables, batch, key):
        return staged({"a": variables["a"], "b": variables["a"] * variables["b"]}, batch, key)

    with pytest.raises(ValueError, match="variable 0 is used by several stages"):
        of_stages(Pipelining([0, 0], "sequential"), shared)


def test_a_pipeline_with_a_loss_scale_is_refused():
    with pytest.raises(ValueError, match="map_gradient would get gradients that loss_scaling has multiplied"):
        of_stages(Pipelining([0, 1]), loss_scaling=2.0)


def test_an_optimizer_function_can_return_an_optimizer_that_maps():
    optimizer = MapGradientOptimizer(optax.sgd(1.0), clipped)
    net = pipelining_ops.pipeline(
        [lambda variables, x: x * variables["a"], lambda variables, hidden: hidden * variables["b"]],
        4,
        infeed_queue=strategies.InfeedQueue(list(SLOPES[:4])),
        optimizer_function=lambda loss: pipelining_ops.OptimizerFunctionOutput(optimizer, loss),
        outfeed_queue=strategies.OutfeedQueue(),
        device_mapping=[0, 1],
    )
    state = net(net.init({"a": np.float32(2), "b": np.float32(0.5)}))
    assert float(state.variables["a"]) == 2 - np.clip(SLOPES[:4] * 0.5, -1, 1).sum()
