"""Boolean options: only True and False are accepted."""

import tempfile

import numpy as np
import optax
import pytest

import popdist.tensorflow
import strategies
from popdist.switches import require_switches, require_switches_or_none
from strategies import pipelining_ops
from strategies.core.evaluation import DataPass

ANYTHING_ELSE = ("yes", 1, 0.0, np.True_, [])


@pytest.mark.parametrize("value", ANYTHING_ELSE)
def test_only_booleans_count_as_true_or_false(value):
    require_switches(first=True, second=False)
    require_switches_or_none(first=True, second=False, third=None)
    with pytest.raises(TypeError, match="^second is .*; it is True or False$"):
        require_switches(first=True, second=value)
    with pytest.raises(TypeError, match="^second is .*; it is True or False, or None$"):
        require_switches_or_none(first=None, second=value)


def test_required_switches_refuse_none():
    with pytest.raises(TypeError, match="^is_on is None; it is True or False$"):
        require_switches(is_on=None)


def loss_fn(variables, batch, key):
    return 0.0


def restored(strategy, **option):
    with tempfile.TemporaryDirectory() as folder:
        trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(1))
        with strategies.Checkpoints(folder, trainer, every=1) as checkpoints:
            checkpoints.restore(None, **option)


TAKERS = {
    "pipelines of functions": (
        lambda strategy, **option: pipelining_ops.pipeline([lambda v, x: x] * 2, 4, **option),
        *("gradient_accumulation_for_captured_grads", "continuous_weight_updates", "outfeed_loss"),
        *("accumulate_outfeed", "offload_weight_update_variables", "replicated_optimizer_state_sharding"),
        *("offload_activations", "offload_gradient_accumulation_buffers", "replicated_weight_sharding"),
        "offload_weights",
    ),
    "pipelines of a trainer": (
        lambda strategy, **option: strategies.Pipelining([0, 1], **option),
        *("recompute", "offload_activations", "offload_gradient_accumulation_buffers", "allow_idle_devices"),
    ),
    "plans": (lambda strategy, **option: pipelining_ops.plan(2, 4, **option), "training", "recompute"),
    "trainers": (
        lambda strategy, **option: strategies.Trainer(strategy, loss_fn, optax.sgd(1), **option),
        *("check_numerics", "stochastic_rounding", "replicated_optimizer_state_sharding", "offload_optimizer_state"),
    ),
    "predictions": (lambda strategy, **option: DataPass(strategy.replicas, None, None, **option), "to_all"),
    "checkpoints": (restored, "other_replicas"),
    "data sets": (
        lambda strategy, **option: strategy.distribute_dataset(np.ones(8, np.float32), batch_size=1, **option),
        "shuffle",
    ),
    "values that are assumed equal": (
        lambda strategy, **option: strategies.cross_replica_ops.assume_equal_across_replicas(1.0, **option),
        "inplace",
    ),
    "benchmarks of data sets": (
        lambda strategy, **option: strategies.dataset_benchmark([np.ones(3)], 1, 1, **option),
        *("print_stats", "apply_debug_options", "do_memcpy"),
    ),
    "benchmarks of infeeds": (
        lambda strategy, **option: strategies.infeed_benchmark(None, 1, 1, **option),
        *("print_stats", "do_memcpy"),
    ),
    "configurations of an instance": (
        lambda strategy, **option: popdist.tensorflow.set_ipu_config(strategies.config.IPUConfig(), **option),
        "configure_device",
    ),
    "collectives": (
        lambda strategy, **option: strategy.run(
            lambda: strategies.cross_replica_ops.cross_replica_sum(1.0, 2, **option)
        ),
        "orthogonal",
    ),
}


@pytest.mark.parametrize(("taker", "name"), [(taker, name) for taker, (_, *names) in TAKERS.items() for name in names])
def test_a_word_is_no_switch(strategy, taker, name):
    with pytest.raises(TypeError, match=f"^{name} is 'no'; it is True or False"):
        TAKERS[taker][0](strategy, **{name: "no"})
