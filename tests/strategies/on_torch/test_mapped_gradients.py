"""Hooks of parameters see the gradient of each micro-batch, as the original's `MapGradientOptimizer` does."""

import pytest
import torch

from strategies.torch import Trainer

SLOPES = torch.tensor([[3.0], [-2.0], [5.0], [0.5], [4.0], [2.0], [-7.0], [1.0]])


class Weighted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return (self.weight * x).sum()


@pytest.mark.parametrize(("method", "divisor"), [("sum", 1), ("mean", 4)])
def test_a_hook_gets_each_micro_batch_on_each_replica_before_they_are_added(on_instances, method, divisor):
    def train(strategy):
        module = Weighted()
        module.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
        optimizer = torch.optim.SGD(module.parameters(), 1.0)
        options = {"gradient_accumulation_count": 4, "reduction_method": method}
        trainer = Trainer(strategy, module, lambda module, batch: module(batch), optimizer, **options)
        rows = slice(4 * strategy.local_replicas.start, 4 * strategy.local_replicas.stop)
        trainer.step(SLOPES[rows])
        return module.weight.item()

    wanted = -(SLOPES / divisor).clamp(-1, 1).sum().item() / 2
    assert on_instances(1, 2, train) + on_instances(2, 2, train) == [wanted] * 3
