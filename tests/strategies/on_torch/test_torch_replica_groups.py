"""Groups of replicas with own rows of parameters, and per-replica buffers: the same bits on any number of instances."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch_modules import distributed, new_module, sgd_trainer

import strategies
import strategies.torch
import strategies.torch.poptorch as poptorch
from strategies import StrategyError
from strategies.compat.poptorch.options import Options
from strategies.torch import ReplicaGroups, group_replicas

REPLICAS = 4
STEPS = 3


class Grouped(nn.Module):
    """A table with one row per group of replicas, and a layer shared by all."""

    def __init__(self, count):
        super().__init__()
        self.table = nn.Parameter(torch.arange(count * 6.0).reshape(count, 3, 2) / 7)
        self.layer = nn.Linear(2, 1)
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, x):
        if self.training:
            self.calls += x.sum()
        return (self.layer(x @ (self.table if self.table.ndim == 2 else self.table[0])) - 1).square().mean()


def batch(replicas=REPLICAS):
    return torch.linspace(-1, 1, replicas * 2 * 3).reshape(-1, 3)


def new_grouped(count):
    """Make the same module each time, without the generator of the process, which instances on threads share."""
    module = Grouped(count)
    with torch.no_grad():
        module.layer.weight.copy_(torch.tensor([[0.3, -0.5]]))
        module.layer.bias.fill_(0.1)
    return module


def trained(strategy, groups, count, **options):
    module = new_grouped(count)
    group_replicas(module.table, groups)
    trainer = sgd_trainer(strategy, module, lambda module, x: module(x), momentum=0.9, **options)
    dataset = strategies.torch.distribute_dataset(strategy, batch(), batch_size=2, shuffle=False)
    for _ in range(STEPS):
        for rows in dataset.epoch(0):
            trainer.step(rows)
    return module


def plainly(group_of, count):
    """Train by plain PyTorch: a row gets the mean of its group, the layer the mean of all replicas."""
    module = new_grouped(count)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for group, rows in zip(group_of, batch().chunk(REPLICAS), strict=True):
            loss = (module.layer(rows @ module.table[group]) - 1).square().mean()
            loss.backward()
        module.table.grad /= REPLICAS / count
        for parameter in module.layer.parameters():
            parameter.grad /= REPLICAS
        optimizer.step()
    return module


KINDS = [
    (ReplicaGroups(), 4, [0, 1, 2, 3]),
    (ReplicaGroups(2), 2, [0, 0, 1, 1]),
    (ReplicaGroups(2, consecutive=False), 2, [0, 1, 0, 1]),
    (ReplicaGroups(None), 1, [0, 0, 0, 0]),
]


@pytest.mark.parametrize(("groups", "count", "group_of"), KINDS)
def test_a_row_is_trained_by_its_group(groups, count, group_of, everywhere):
    expected = plainly(group_of, count)
    found = everywhere(REPLICAS, lambda strategy: trained(strategy, groups, count))
    for name, value in expected.named_parameters():
        torch.testing.assert_close(found[0].get_parameter(name), value, rtol=1e-5, atol=1e-6)
        assert all(torch.equal(each.get_parameter(name), found[0].get_parameter(name)) for each in found)


def test_a_row_is_trained_by_its_group_with_sharded_state_or_16_bit_gradients(on_instances):
    whole = trained(strategies.IPUStrategy(REPLICAS), ReplicaGroups(), 4)
    options = {"replicated_optimizer_state_sharding": True, "min_elements_for_sharding": 1}
    for each in on_instances(2, REPLICAS, lambda s: trained(s, ReplicaGroups(), 4, **options)):
        assert torch.equal(each.table, whole.table)
    short = trained(strategies.IPUStrategy(REPLICAS), ReplicaGroups(), 4, gradient_transfer_dtype="bfloat16")
    torch.testing.assert_close(short.table, whole.table, rtol=0.05, atol=0.05)


def test_unsuitable_groups_are_refused():
    strategy = strategies.IPUStrategy(REPLICAS)
    with pytest.raises(StrategyError, match=r"table is of shape \[3, 3, 2\], but 4 replicas make 4 groups"):
        trained(strategy, ReplicaGroups(), 3)
    with pytest.raises(StrategyError, match="groups of 3; use a size that divides"):
        trained(strategy, ReplicaGroups(3), 3)
    module = new_grouped(1)
    group_replicas(module.table, ReplicaGroups())
    with pytest.raises(StrategyError, match=r"a DistributedModel is a single replica; use strategies\.torch\.Trainer"):
        strategies.torch.DistributedModel(module, strategies.IPUStrategy(1))


class TestPopTorch:
    def model(self, reduction, optimizer=poptorch.optim.SGD):
        module = new_grouped(2)
        options = Options().replicationFactor(REPLICAS)
        options.Training.accumulationAndReplicationReductionType(reduction)
        training = poptorch.trainingModel(module, options, optimizer(module.parameters(), lr=0.1))
        training.table.replicaGrouping(poptorch.CommGroupType.Orthogonal, 2, poptorch.VariableRetrievalMode.OnePerGroup)
        return module, training

    @pytest.mark.parametrize("reduction", [poptorch.ReductionType.Mean, poptorch.ReductionType.Sum])
    def test_gradients_are_reduced_over_the_group(self, reduction):
        module, training = self.model(reduction)
        plain = new_grouped(2)
        training(batch())
        for group, rows in zip([0, 1, 0, 1], batch().chunk(REPLICAS), strict=True):
            (plain.layer(rows @ plain.table[group]) - 1).square().mean().backward()
        divisor = 2 if reduction is poptorch.ReductionType.Mean else 1
        torch.testing.assert_close(module.table, plain.table - 0.1 * plain.table.grad / divisor)
        training.destroy()

    def test_each_replica_infers_with_its_row(self):
        module, training = self.model(poptorch.ReductionType.Mean)
        options = Options().replicationFactor(REPLICAS)
        losses = poptorch.inferenceModel(module, options)(batch())
        expected = [
            (module.layer(rows @ module.table[group]) - 1).square().mean()
            for group, rows in zip([0, 1, 0, 1], batch().chunk(REPLICAS), strict=True)
        ]
        assert losses.tolist() == pytest.approx([each.item() for each in expected])
        training.destroy()

    def test_optimizers_and_modes_that_mix_rows_are_refused(self):
        module, training = self.model(poptorch.ReductionType.Mean, poptorch.optim.LAMB)
        with pytest.raises(StrategyError, match="but LAMB is not known to compute every element by itself"):
            training(batch())
        with pytest.raises(StrategyError, match=r"use VariableRetrievalMode\.OnePerGroup"):
            module.table.replicaGrouping(
                poptorch.CommGroupType.NoGrouping, 0, poptorch.VariableRetrievalMode.AllReplicas
            )


class TestBuffersOfEachReplica:
    def run(self, strategy, steps=2):
        module = new_grouped(1)
        group_replicas(module.table, ReplicaGroups(None))
        trainer = sgd_trainer(
            strategy, module, lambda module, x: module(x), model_state_aggregation={"calls": "per_replica"}
        )
        for rows in strategies.torch.distribute_dataset(strategy, batch(), batch_size=2, shuffle=False).epoch(0):
            for _ in range(steps):
                trainer.step(rows)
        state = trainer.state.model_state
        return torch.from_numpy(state["calls of each replica"].copy()), module.calls.clone()

    @pytest.mark.parametrize("instances", [1, 2, 4])
    def test_all_instances_keep_and_save_the_buffers(self, instances, on_instances):
        expected = torch.zeros(REPLICAS, 2)
        for _ in range(2):
            expected += torch.stack([rows.sum() for rows in batch().chunk(REPLICAS)])[:, None]
        for each, shown in on_instances(instances, REPLICAS, self.run):
            assert torch.equal(each, expected)
            assert torch.equal(shown, expected[0]), "the module has those of replica 0"

    def test_each_replica_predicts_with_its_own_buffers(self):
        module, strategy = new_grouped(1), strategies.IPUStrategy(REPLICAS)
        options = {"model_state_aggregation": {"calls": "per_replica"}}
        trainer = sgd_trainer(strategy, module, lambda module, x: module(x), **options)
        trainer.step(batch())
        dataset = strategies.torch.distribute_dataset(strategy, batch(), 2, shuffle=False, remainder="pad")
        (told,) = trainer.predict(dataset, lambda module, x: module.calls[0].expand(len(x)))
        torch.testing.assert_close(
            torch.from_numpy(told), torch.cat([rows.sum().expand(2) for rows in batch().chunk(REPLICAS)])
        )

    def test_a_distributed_model_keeps_its_buffers_in_the_module(self, on_instances):
        module = new_module("convolutions")

        def run(strategy):
            own, model = distributed(strategy, module, model_state_aggregation="per_replica")
            model(torch.full((2, 8, 8), 1.0 + strategy.instance_index)).sum().backward()
            return own.norm.running_mean

        one, other = on_instances(2, 2, run)
        assert not torch.equal(one, other)
