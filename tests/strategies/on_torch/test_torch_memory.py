"""Memory plan of a module's training, compared with its actual memory."""

from __future__ import annotations

import jax
import pytest
import torch
from torch import nn

import strategies.torch

REPLICAS, WIDTH = 4, 700
OPTIONS = {
    "plain": {},
    "streamed": {"stream_gradients": True},
    "sharded": {"replicated_optimizer_state_sharding": True},
    "of 16 bits": {"gradient_transfer_dtype": torch.bfloat16},
}


def new_module():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3))


def held_by(trainer, batch):
    """Return the memory that a training holds after a step, by the names of the plan."""
    trainer.step(batch)
    local = trainer._engine._local
    exchange = local.exchange
    buckets = range(len(exchange.plan.layouts))
    state = [value for of_one in trainer.optimizer.state.values() for value in of_one.values()]
    results = [array for bucket in exchange.buckets for array in bucket.results]
    return {
        "variables": sum(each.nbytes for each in trainer.module.parameters()),
        "optimizer state": sum(each.nbytes for each in state),
        "model state": sum(each.nbytes for each in trainer.module.buffers()),
        "buffers at the beginning": sum(one.nbytes for one in local.turns._kept.values()),
        "gradients": sum(a.nbytes for n in buckets for of_buffer in local.exchange.buffers(n) for a in of_buffer),
        "means": sum(a.nbytes for a in results),
        "batch": sum(leaf.nbytes for leaf in jax.tree.leaves(batch)),
    }


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("instances", [1, 2])
def test_the_plan_matches_the_memory_of_a_training(options, instances, on_instances):
    def check(strategy):
        module = new_module()
        optimizer = torch.optim.Adam(module.parameters())
        trainer = strategies.torch.Trainer(
            strategy, module, lambda own, batch: own(batch).square().mean(), optimizer, **options
        )
        batch = torch.ones(2 * len(strategy.local_replicas), WIDTH)
        plan = trainer.plan(batch)
        held = held_by(trainer, batch)
        trainer.close()
        found = {what: sum(each.nbytes for each in plan.held if each.what == what) for what in held}
        found["means"] = sum(each.nbytes for each in plan.held if each.what.startswith("mean gradients"))
        assert found == held
        assert trainer.plan(batch) == plan
        assert "variables" in str(plan)

    on_instances(instances, REPLICAS, check, mechanism="window")
