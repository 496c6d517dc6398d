"""Readiness of one replica's gradients during the backward pass."""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import nn

from strategies.exchange.transfer import GradientTransfer
from strategies.torch.contribution import Contribution
from strategies.torch.gradient_exchange import BUCKET_BYTES, Parameter, TorchGradientPlan
from strategies.torch.options import TorchOptions
from strategies.torch.replica_memory import ReplicaMemory
from strategies.torch.replica_run import ReplicaTurn, TorchReplicaRun

ROWS = BUCKET_BYTES // 4  # of one float32 each


class Looks(nn.Module):
    """A layer that calls a function when the backward pass reaches it."""

    def __init__(self, look):
        super().__init__()
        self.look = look

    def forward(self, x):
        x.register_hook(lambda _: self.look())
        return x


class Sums(nn.Module):
    """A module whose last weight gets its gradient first."""

    def __init__(self, look):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(ROWS - 1))
        self.third = nn.Parameter(torch.ones(1))
        self.before_second, self.before_first = Looks(look), Looks(look)

    def forward(self, x):
        middle = self.before_first(self.first.sum() * x)
        late = self.before_second(self.second.sum() * middle)
        return self.third.sum() * late


def test_a_bucket_is_ready_after_its_last_gradient():
    ready = []
    module = Sums(lambda: ready.append(run.finished[0].is_set()))
    options = TorchOptions(stream_gradients=True)
    run = TorchReplicaRun(0, ReplicaMemory(module), lambda module, batch: module(batch.sum()), options, 1)
    parameters = tuple(
        Parameter(name, tuple(each.shape), np.dtype(np.float32)) for name, each in module.named_parameters()
    )
    plan = TorchGradientPlan(parameters, GradientTransfer(), streams=True, tail=5)
    assert plan.members == ((2, 1), (0,))

    def planned(names):
        run.finished = [threading.Event() for _ in plan.members]
        return plan

    run.compute(torch.ones(2), ReplicaTurn(0, 1.0, False, planned, frozenset(), 0, None, [], []))
    assert ready == [False, True]
    assert sum(array.size for array in run.contribution.arrays(0)) == ROWS


def test_a_parameter_without_a_gradient_adds_no_old_gradient():
    """Another replica may have a gradient, so the buffer travels; the parameter is alone in it or has a neighbour."""
    for shapes in ([(3,)], [(3,), (2,)]):
        parameters = tuple(Parameter(f"p{n}", shape, np.dtype(np.float32)) for n, shape in enumerate(shapes))
        contribution = Contribution(TorchGradientPlan(parameters, GradientTransfer(), streams=False, tail=0))
        for gradients in ([torch.ones(shape)[:] for shape in shapes], [None] * len(shapes)):
            contribution.take_all(gradients)
            found = sum(array.sum() for array in contribution.arrays(0))
        assert found == 0
