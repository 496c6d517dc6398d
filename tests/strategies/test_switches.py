"""Options that are on or off: nothing else counts as one of the two."""

import numpy as np
import optax
import pytest

import popdist.tensorflow
import strategies
from strategies import pipelining_ops
from strategies.evaluation.data_pass import DataPass
from strategies.switches import require_switches, require_switches_or_none

OF_PIPELINES = (
    "gradient_accumulation_for_captured_grads",
    "continuous_weight_updates",
    "outfeed_loss",
    "accumulate_outfeed",
)
OF_PIPELINES_OR_NONE = (
    "offload_weight_update_variables",
    "replicated_optimizer_state_sharding",
    "offload_activations",
    "offload_gradient_accumulation_buffers",
    "replicated_weight_sharding",
    "offload_weights",
)
ANYTHING_ELSE = ("yes", 1, 0.0, np.True_, [])


@pytest.mark.parametrize("value", ANYTHING_ELSE)
def test_nothing_counts_as_true_or_false_but_these(value):
    require_switches(first=True, second=False)
    require_switches_or_none(first=True, second=False, third=None)
    with pytest.raises(TypeError, match="^second is .*; it is True or False$"):
        require_switches(first=True, second=value)
    with pytest.raises(TypeError, match="^second is .*; it is True or False, or None$"):
        require_switches_or_none(first=None, second=value)


def test_what_may_not_be_left_open_is_not_none():
    with pytest.raises(TypeError, match="^is_on is None; it is True or False$"):
        require_switches(is_on=None)


@pytest.mark.parametrize("name", [*OF_PIPELINES, *OF_PIPELINES_OR_NONE])
def test_of_pipelines_of_functions(name):
    with pytest.raises(TypeError, match=f"^{name} is 'yes'; it is True or False"):
        pipelining_ops.pipeline([lambda v, x: x] * 2, 4, **{name: "yes"})


@pytest.mark.parametrize(
    "name", ["recompute", "offload_activations", "offload_gradient_accumulation_buffers", "allow_idle_devices"]
)
def test_of_pipelines_of_a_trainer(name):
    with pytest.raises(TypeError, match=f"^{name} is 'yes'; it is True or False"):
        strategies.Pipelining([0, 1], **{name: "yes"})


@pytest.mark.parametrize("name", ["training", "recompute"])
def test_of_plans(name):
    with pytest.raises(TypeError, match=f"^{name} is 'no'; it is True or False"):
        pipelining_ops.plan(2, 4, **{name: "no"})


@pytest.mark.parametrize(
    "name",
    [
        "check_numerics",
        "stochastic_rounding",
        "replicated_optimizer_state_sharding",
        "offload_optimizer_state",
    ],
)
def test_of_trainers(strategy, name):
    with pytest.raises(TypeError, match=f"^{name} is 'no'; it is True or False"):
        strategies.Trainer(strategy, lambda variables, batch, key: 0.0, optax.sgd(1), **{name: "no"})


def test_of_predictions(strategy):
    with pytest.raises(TypeError, match="^to_all is 'no'; it is True or False"):
        DataPass(strategy.replicas, None, None, to_all="no")


def test_of_checkpoints(strategy, tmp_path):
    trainer = strategies.Trainer(strategy, lambda variables, batch, key: 0.0, optax.sgd(1))
    with (
        strategies.Checkpoints(tmp_path, trainer, every=1) as checkpoints,
        pytest.raises(TypeError, match="^other_replicas is 'no'; it is True or False"),
    ):
        checkpoints.restore(None, other_replicas="no")


def test_of_data_sets(strategy):
    with pytest.raises(TypeError, match="^shuffle is 'no'; it is True or False"):
        strategy.distribute_dataset(np.ones(8, np.float32), batch_size=1, shuffle="no")


def test_of_values_that_are_assumed_equal():
    with pytest.raises(TypeError, match="^inplace is 'no'; it is True or False"):
        strategies.cross_replica_ops.assume_equal_across_replicas(1.0, inplace="no")


@pytest.mark.parametrize("name", ["print_stats", "apply_debug_options", "do_memcpy"])
def test_of_benchmarks_of_data_sets(name):
    with pytest.raises(TypeError, match=f"^{name} is 'no'; it is True or False"):
        strategies.dataset_benchmark([np.ones(3)], 1, 1, **{name: "no"})


@pytest.mark.parametrize("name", ["print_stats", "do_memcpy"])
def test_of_benchmarks_of_infeeds(name):
    with pytest.raises(TypeError, match=f"^{name} is 'no'; it is True or False"):
        strategies.infeed_benchmark(None, 1, 1, **{name: "no"})


def test_of_configurations_of_an_instance():
    with pytest.raises(TypeError, match="^configure_device is 'no'; it is True or False"):
        popdist.tensorflow.set_ipu_config(strategies.config.IPUConfig(), configure_device="no")


def test_of_collectives(strategy):
    with pytest.raises(TypeError, match="^orthogonal is 'no'; it is True or False"):
        strategy.run(lambda: strategies.cross_replica_ops.cross_replica_sum(1.0, 2, orthogonal="no"))
