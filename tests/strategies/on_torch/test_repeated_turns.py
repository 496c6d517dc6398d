"""The first replica's turn is repeated in steps 1, 2, 4 and so on, and all instances raise a difference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch_modules import distributed, sgd_trainer

import strategies
from strategies import StrategyError
from strategies.exchange.flat import GradientTransfer, private_memory
from strategies.torch.exchange.gradients import GradientExchange
from strategies.torch.exchange.plan import BUCKET_BYTES, Parameter, TorchGradientPlan
from strategies.torch.replicas.steps import StreamedGradients
from strategies.torch.tensors import ReplicaMemory


def steps(strategy, loss, module=None, count=1, **options):
    """Make some steps, and return the parameters of the module."""
    module = nn.Linear(2, 1) if module is None else module
    trainer = sgd_trainer(strategy, module, loss, **options)
    local = len(trainer.strategy.local_replicas)
    for _ in range(count):
        trainer.step(torch.ones(2 * local, 2))
    return [one.detach().clone() for one in module.parameters()]


@pytest.mark.parametrize(("replicas", "expected"), [(1, [1] * 5), (2, [3, 3, 2, 3, 2])])
def test_the_loss_function_is_called_once_more_in_some_steps_of_several_replicas(replicas, expected):
    calls = []

    def loss(module, batch):
        calls.append(0)
        return module(batch).mean()

    trainer = sgd_trainer(replicas, nn.Linear(2, 1), loss)
    found = []
    for _ in range(5):
        calls.clear()
        trainer.step(torch.ones(2 * replicas, 2))
        found.append(len(calls))
    assert found == expected


def test_steps_after_a_restore_are_repeated_as_the_first_ones(tmp_path):
    calls = []

    def loss(module, batch):
        calls.append(0)
        return module(batch).mean()

    trainer = sgd_trainer(2, nn.Linear(2, 1), loss)
    with strategies.Checkpoints(tmp_path, trainer) as checkpoints:
        for _ in range(10):
            trainer.step(torch.ones(4, 2))
            if trainer.steps_made == 1:
                checkpoints.save(trainer.state)
                checkpoints.wait()
        trainer.restore(checkpoints)
    found = []
    for _ in range(5):
        calls.clear()
        trainer.step(torch.ones(4, 2))
        found.append(len(calls))
    assert (trainer.steps_made, found) == (6, [3, 3, 2, 3, 2])


def test_all_instances_raise_a_difference(on_instances):
    """Only on instance 1 the loss depends on a counter. No instance applies the step."""

    def train(strategy):
        module, calls = nn.Linear(2, 1), []
        nn.init.ones_(module.weight)

        def loss(module, batch):
            calls.append(0)
            return module(batch).sum() * (len(calls) if strategy.instance_index else 1)

        with pytest.raises(StrategyError, match="in step 0 replica 1 computed .* twice, and the loss was another"):
            steps(strategy, loss, module)
        return module.weight.tolist()

    assert on_instances(2, 2, train) == [[[1.0, 1.0]]] * 2


def test_gradients_that_depend_on_a_counter_are_found():
    module, calls = nn.Linear(2, 1), []

    def times(gradient):
        calls.append(0)
        return gradient * len(calls)

    module.weight.register_hook(times)
    with pytest.raises(StrategyError, match="the gradient of weight was another one the second time"):
        steps(2, lambda module, batch: module(batch).mean(), module)


class Notes(nn.Linear):
    """A layer that writes a number from outside into its buffer."""

    def __init__(self):
        super().__init__(2, 1)
        self.register_buffer("noted", torch.zeros(()))
        self.calls = iter(range(9))

    def forward(self, x):
        self.noted.fill_(next(self.calls))
        return super().forward(x)


def test_buffers_that_depend_on_a_counter_are_found():
    with pytest.raises(StrategyError, match="noted was another one the second time"):
        steps(2, lambda module, batch: module(batch).mean(), Notes())


def test_an_error_of_the_second_time_is_shown():
    known = {}

    def loss(module, batch):
        if len(known) > 1:
            raise KeyError("known already")
        known[len(known)] = batch
        return module(batch).mean()

    with pytest.raises(StrategyError, match="the second time it has raised KeyError: 'known already'"):
        steps(2, loss)


@pytest.mark.parametrize("instances", [1, 2])
def test_a_loop_finds_a_difference(instances, on_instances):
    def train(strategy):
        calls = []
        own, model = distributed(strategy, nn.Linear(2, 1))

        def loss(rows):
            calls.append(0)
            return model(rows).sum() * len(calls)

        with pytest.raises(StrategyError, match="in step 0 replica 0 computed its part of the step twice"):
            model.backward(loss, torch.ones(2 * len(strategy.local_replicas), 2))

    on_instances(instances, 2, train)


class TestNetworksOutsideOfTheModule:
    def test_writes_to_a_network_outside_of_the_module_are_refused(self):
        outside = nn.BatchNorm1d(2)
        with pytest.raises(StrategyError, match="replicas have written running_mean of a BatchNorm1d outside"):
            steps(2, lambda module, batch: module(outside(batch.reshape(-1, 2))).mean())

    def test_networks_in_evaluation_mode_may_be_used(self):
        outside = nn.BatchNorm1d(2).eval()
        steps(2, lambda module, batch: module(outside(batch)).mean(), count=2)


@pytest.mark.parametrize(("through_data", "count"), [(False, 1), (True, 1), (False, 3)])
def test_writes_to_trained_parameters_are_refused(through_data, count):
    """Writes through `data` are found in steps that are repeated."""

    class Writes(nn.Linear):
        def forward(self, x):
            if writes[0]:
                with torch.no_grad():
                    (self.weight.data if through_data else self.weight).add_(1)
            return super().forward(x)

    writes, module = [count == 1], Writes(2, 1)
    trainer = sgd_trainer(2, module, lambda module, batch: module(batch).mean())
    for _ in range(count - 1):
        trainer.step(torch.ones(2, 2))
    writes[0] = True
    with pytest.raises(StrategyError, match="weight was written while a replica computed"):
        trainer.step(torch.ones(2, 2))


# ---- gradients that leave


ROWS = BUCKET_BYTES // 4  # of one float32 each


def exchange_of_one(plan):
    """Return the exchange of one of two replicas."""
    replicas = strategies.IPUStrategy(2).replicas
    return GradientExchange(plan, (), replicas, ReplicaMemory(), [{}], allocate=private_memory)


def test_a_bucket_is_ready_after_its_last_gradient():
    """The backward pass computes the gradients from the last parameter to the first; the last bucket has a tail."""
    parameters = [nn.Parameter(torch.ones(size)) for size in (3, ROWS - 1, 1)]
    described = tuple(Parameter.of(f"p{number}", one) for number, one in enumerate(parameters))
    plan = TorchGradientPlan(described, GradientTransfer(), streams=True, tail=5)
    assert plan.members == ((2, 1), (0,))
    exchange, ready, looks = exchange_of_one(plan), [], []
    leaving = StreamedGradients(exchange, 0, ready.append, lambda bucket: None)
    first, second, third = parameters
    hidden = first.sum()
    hidden.register_hook(lambda _: looks.append([*ready]))
    later = second.sum() * hidden
    later.register_hook(lambda _: looks.append([*ready]))
    with leaving.of(parameters) as begin:
        begin()
        (third.sum() * later).backward()
    leaving.rest([one.grad for one in parameters])
    assert looks == [[], [0]]
    assert ready == [0]
    assert leaving.seen == [True] * 3
    assert sum(array.size for [array] in exchange.buffers(0)) == ROWS
    assert all(one.grad is None for one in parameters), "the memory of gradients that have left is free"


def test_a_parameter_without_a_gradient_adds_no_old_gradient():
    """Another replica may have a gradient, so the buffer travels; the parameter is alone in it or has a neighbour."""
    for shapes in ([(3,)], [(3,), (2,)]):
        parameters = tuple(Parameter(f"p{n}", shape, np.dtype(np.float32)) for n, shape in enumerate(shapes))
        exchange = exchange_of_one(TorchGradientPlan(parameters, GradientTransfer(), streams=False, tail=0))
        for gradients in ([torch.ones(shape)[:] for shape in shapes], [None] * len(shapes)):
            exchange.take(gradients)
            found = sum(array.sum() for [array] in exchange.buffers(0))
        assert found == 0


@pytest.mark.parametrize("instances", [1, 2])
def test_a_gradient_that_some_replicas_lack_counts_as_zeros_if_so_told(instances, on_instances):
    def train(strategy):
        module = nn.ModuleDict({"one": nn.Linear(2, 1), "other": nn.Linear(2, 1)})
        for one in module.parameters():
            nn.init.zeros_(one)
        trainer = sgd_trainer(
            strategy,
            module,
            lambda module, batch: module["other" if batch[0, 0] else "one"](batch + 1).sum(),
            lr=1.0,
            missing_gradients="zero",
        )
        local = strategy.local_replicas
        trainer.step(torch.tensor([[0.0, 0.0], [1.0, 1.0]])[local.start : local.stop])
        return module["one"].weight.tolist(), module["other"].weight.tolist()

    assert on_instances(instances, 2, train) == [([[-0.5, -0.5]], [[-1.0, -1.0]])] * instances


def test_an_unknown_word_for_missing_gradients_is_refused():
    with pytest.raises(ValueError, match="missing_gradients is 'skip'"):
        sgd_trainer(2, nn.Linear(2, 1), lambda module, batch: 0, missing_gradients="skip")


def test_zero_bubble_is_refused_with_the_way_out():
    import strategies.torch.poptorch as poptorch

    pipeline = poptorch.PipelinedExecution("B1", "B2", schedule="zero_bubble").pipeline
    with pytest.raises(ValueError, match="'zero_bubble' splits backward passes .* use 'one_forward_one_backward'"):
        strategies.torch.Trainer(
            strategies.IPUStrategy(1),
            module := nn.Linear(2, 1),
            lambda module, batch: 0,
            torch.optim.SGD(module.parameters(), 0.1),
            gradient_accumulation_count=2,
            pipeline=pipeline,
        )
