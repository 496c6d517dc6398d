"""Mapped gradients: each replica maps those of each micro-batch, like the original's `MapGradientOptimizer`."""

import copy
import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import strategies
import strategies.torch.poptorch as poptorch
from strategies import DisagreementError, NonFiniteGradientError, StrategyError
from strategies.torch import DistributedModel, Trainer

SLOPES = torch.tensor([[3.0], [-2.0], [5.0], [0.5], [4.0], [2.0], [-7.0], [1.0]])
CLIPPED = SLOPES.clamp(-1, 1)
METHODS = {"sum": 1, "mean": 4, "running_mean": 4}
SCHEDULES = ["grouped", "one_forward_one_backward"]


class Weighted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return (self.weight * x).sum()


class Blocks(torch.nn.Module):
    """Four layers in stages, one of them frozen."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(5, 5) for _ in range(4))
        self.layers[2].requires_grad_(False)

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            with poptorch.Block(f"B{number}"):
                x = torch.tanh(layer(x))
        return (x - 1).square().sum()


def clipped(gradient, parameter):
    return gradient.clamp(-1, 1)


def test_a_scale_that_is_set_between_steps_leaves_an_overflow_visible():
    module = torch.nn.Linear(4, 1)
    trainer = Trainer(
        strategies.IPUStrategy(2),
        module,
        lambda module, batch: module(batch).mean(),
        torch.optim.SGD(module.parameters(), 0.1),
        map_gradient=clipped,
    )
    trainer.step(torch.zeros(4, 4))
    trainer.scale_losses(2.0**24)
    before = module.weight.detach().clone()
    trainer.step(torch.full((4, 4), 1e33))
    assert torch.equal(module.weight, before)


def call(module, batch):
    return module(batch)


def trained(strategy, loss_fn=call, change=lambda module: None, **options):
    module = Weighted()
    change(module)
    optimizer = torch.optim.SGD(module.parameters(), 1.0)
    options = {"gradient_accumulation_count": 4, "reduction_method": "sum"} | options
    trainer = Trainer(strategy, module, loss_fn, optimizer, **options)
    trainer.step(SLOPES[4 * strategy.local_replicas.start : 4 * strategy.local_replicas.stop])
    trainer.close()
    return module.weight.item()


def two():
    return strategies.IPUStrategy(2)


class TestTheOption:
    @pytest.mark.parametrize("method", METHODS)
    def test_gradients_are_mapped_before_division_and_summation(self, method, everywhere):
        def train(strategy):
            return trained(strategy, map_gradient=clipped, reduction_method=method)

        expected = -CLIPPED.sum().item() / 2 / METHODS[method]
        assert everywhere(2, train) == [pytest.approx(expected)] * 3

    @pytest.mark.parametrize(
        "options",
        [
            {"loss_scaling": 1024.0},
            {"stream_gradients": True},
            {"replica_device": "cpu"},
            {"replicated_optimizer_state_sharding": True, "min_elements_for_sharding": 1},
        ],
        ids=str,
    )
    def test_other_options_leave_the_bits_unchanged(self, options):
        assert trained(two(), map_gradient=clipped, **options) == -CLIPPED.sum().item() / 2

    def test_gradients_inside_the_loss_function_are_not_mapped(self):
        def penalised(module, batch):
            loss = module(batch)
            (inner,) = torch.autograd.grad(loss, [module.weight], create_graph=True)
            assert inner.item() == batch.sum()
            return loss

        assert trained(two(), penalised, map_gradient=clipped) == -CLIPPED.sum().item() / 2

    def test_the_function_runs_after_the_hooks_of_the_parameter(self):
        def register(module):
            module.weight.register_hook(lambda gradient: gradient / 10)

        assert trained(two(), call, register, map_gradient=clipped) == pytest.approx(-SLOPES.sum().item() / 20)

    def test_the_function_gets_the_parameter_of_the_module(self):
        kept = []

        def decayed(gradient, parameter):
            return gradient + 2 if parameter is kept[0].weight else gradient

        expected = -(SLOPES.sum().item() / 2 + 8)
        assert trained(two(), call, kept.append, map_gradient=decayed) == expected

    def test_random_numbers_drawn_by_the_function_are_those_of_the_replica(self, everywhere):
        def train(strategy):
            return trained(strategy, map_gradient=lambda gradient, _: gradient + torch.randn_like(gradient))

        found = everywhere(2, train)
        assert len(set(found)) == 1
        assert found[0] != -SLOPES.sum().item() / 2

    def test_clipping_does_not_hide_gradients_that_are_not_finite(self):
        def overflows(module, batch):
            return module(batch) * 1e38

        with pytest.raises(NonFiniteGradientError):
            trained(two(), overflows, map_gradient=clipped, check_numerics=True)
        assert trained(two(), overflows, map_gradient=clipped, loss_scaling="dynamic") == 0

    @pytest.mark.parametrize(
        ("function", "error", "match"),
        [
            (3, TypeError, "map_gradient is 3, a int"),
            (lambda gradient, _: None, TypeError, "map_gradient returns a NoneType"),
            (lambda gradient, _: gradient.sum(), ValueError, r"shape \[\] for a gradient of \[1\]"),
            (lambda gradient, _: gradient.clamp_(-1, 1), StrategyError, "map_gradient writes to the gradient"),
        ],
    )
    def test_an_unsuitable_function_is_refused(self, function, error, match):
        with pytest.raises(error, match=match):
            trained(two(), map_gradient=function)

    def test_gradients_that_come_in_parts_are_refused(self):
        def reentrant(module, batch):
            own = batch.clone().requires_grad_()
            return sum(checkpoint(module, own, use_reentrant=True) for _ in range(2))

        with pytest.raises(StrategyError, match=r"comes in parts, .* use checkpoint\(\.\.\., use_reentrant=False\)"):
            trained(two(), reentrant, map_gradient=clipped)

    def test_instances_compare_their_functions(self, on_instances):
        def train(strategy):
            most = 1 + strategy.instance_index
            with pytest.raises(DisagreementError, match="map_gradient"):
                trained(strategy, map_gradient=lambda gradient, _: gradient.clamp(-most, most))

        on_instances(2, 2, train)

    def test_the_function_is_freed_with_the_trainer(self):
        kept = []

        def function(gradient, parameter):
            assert kept is not None
            return gradient

        trained(two(), map_gradient=function)
        found = weakref.ref(function)
        del function
        gc.collect()
        assert found() is None


def by_plain_pytorch(module, x, most):
    """Train for three steps on two replicas with four micro-batches each, whose memory is aligned as in `Trainer`."""
    optimizer = torch.optim.Adam(module.parameters(), 0.1)
    trained = [one for one in module.parameters() if one.requires_grad]
    for _ in range(3):
        of_replicas = []
        for rows in x.chunk(2):
            sums = [torch.zeros_like(one) for one in trained]
            for part in rows.chunk(4):
                for total, one in zip(sums, torch.autograd.grad(module(part.clone()), trained), strict=True):
                    total += one.clamp(-most, most) / 4
            of_replicas.append(sums)
        for parameter, one, other in zip(trained, *of_replicas, strict=True):
            parameter.grad = (one + other) / 2
        optimizer.step()
    return [one.detach() for one in trained]


@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
def test_stages_of_a_module_with_a_frozen_layer_are_mapped(schedule, everywhere):
    x = torch.randn(24, 5, generator=torch.Generator().manual_seed(1))

    torch.manual_seed(2)
    module_at_first = Blocks()

    def train(strategy):
        module, pipeline = copy.deepcopy(module_at_first), None
        if schedule is not None:
            pipeline = poptorch.PipelinedExecution("B0", "B1", "B2", "B3", schedule=schedule).pipeline
        optimizer = torch.optim.Adam(module.parameters(), 0.1)
        options = {"gradient_accumulation_count": 4, "map_gradient": lambda gradient, _: gradient.clamp(-0.1, 0.1)}
        trainer = Trainer(strategy, module, call, optimizer, pipeline=pipeline, **options)
        for _ in range(3):
            trainer.step(x[12 * strategy.local_replicas.start : 12 * strategy.local_replicas.stop])
        trainer.close()
        return [one.detach() for one in module.parameters() if one.requires_grad]

    found = everywhere(2, train)
    expected = by_plain_pytorch(module_at_first, x, 0.1)
    assert all(all(map(torch.equal, one, expected)) for one in found)


@pytest.mark.parametrize(("method", "divisor"), [("sum", 1), ("mean", 4)])
def test_a_hook_gets_each_micro_batch_on_each_replica_before_they_are_added(everywhere, method, divisor):
    def train(strategy):
        def register(module):
            module.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))

        return trained(strategy, call, register, reduction_method=method)

    wanted = -(SLOPES / divisor).clamp(-1, 1).sum().item() / 2
    assert everywhere(2, train) == [wanted] * 3


def test_a_hook_gets_each_micro_batch_of_a_distributed_model(on_instances):
    def train(strategy):
        module = Weighted()
        module.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
        model, optimizer = DistributedModel(module, strategy), torch.optim.SGD(module.parameters(), 1.0)
        *first, last = SLOPES.chunk(2)[strategy.local_replicas.start].chunk(4)
        with model.no_sync():
            for part in first:
                model(part).backward()
        model(last).backward()
        optimizer.step()
        return module.weight.item()

    assert on_instances(2, 2, train) == [-CLIPPED.sum().item() / 2] * 2


class TestPopTorch:
    """Mapped gradients of PopTorch models; rows of replicas lie side by side in each micro-batch."""

    class Model(Weighted):
        def forward(self, x):
            return poptorch.identity_loss(super().forward(x), "none")

    def train(self, kind, change=lambda module: None, strategy="Post", **options):
        model = self.Model()
        change(model)
        settings = poptorch.Options().replicationFactor(2)
        settings.Training.gradientAccumulation(4)
        settings.Training.accumulationAndReplicationReductionType(poptorch.ReductionType[kind])
        settings.Training.setMeanAccumulationAndReplicationReductionStrategy(poptorch.MeanReductionStrategy[strategy])
        optimizer = poptorch.optim.SGD(model.parameters(), 1.0, loss_scaling=16.0)
        training = poptorch.trainingModel(model, settings, optimizer, **options)
        training(SLOPES)
        return training, model.weight.item()

    @pytest.mark.parametrize(
        ("kind", "strategy", "divisor"), [("Sum", "Post", 1), ("Mean", "Post", 8), ("Mean", "Running", 8)]
    )
    def test_gradients_are_mapped_before_any_division(self, kind, strategy, divisor):
        _, found = self.train(kind, strategy=strategy, map_gradient=clipped)
        assert found == pytest.approx(-CLIPPED.sum().item() / divisor)

    @pytest.mark.parametrize(("kind", "factor", "divisor"), [("Sum", 2 * 16, 2), ("Mean", 16 / 4, 2)])
    def test_hooks_get_gradients_that_are_scaled_for_what_follows(self, kind, factor, divisor):
        def register(module):
            module.weight.register_hook(lambda gradient: (gradient / factor).clamp(-1, 1) * factor)

        expected = -CLIPPED.sum().item() * factor / 16 / divisor
        assert self.train(kind, register)[1] == pytest.approx(expected)
