"""Loops around a DistributedModel: each idiom does the same as in Trainer or is refused; none is silently local."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch_modules import data, distributed, new_module, sgd_trainer

import strategies
import strategies.torch
from collectives import LayoutMismatchError
from strategies import DisagreementError, StrategyError

REPLICAS = 2
STREAMS = [{}, {"stream_gradients": True}]


def bits(module):
    return strategies.fingerprint([one.detach().numpy() for one in [*module.parameters(), *module.buffers()]])


def rows(strategy, step=0):
    """Return the rows of this instance's one replica."""
    first = 2 * (REPLICAS * step + strategy.instance_index)
    return data()["x"][first : first + 2]


def looped(strategy, module, loss, change=lambda module, step: None, steps=4, **options):
    """Return all bits after some steps of a plain loop, in which `change` may do something before each step."""
    own, model = distributed(strategy, module, **options)
    optimizer = torch.optim.SGD(own.parameters(), 0.1, momentum=0.9)
    for step in range(steps):
        change(own, step)
        optimizer.zero_grad()
        loss(model, rows(strategy, step)).backward()
        optimizer.step()
    return bits(own)


def by_trainer(module, loss, change=lambda module, step: None, steps=4, **options):
    own = copy.deepcopy(module)
    trainer = sgd_trainer(REPLICAS, own, loss, momentum=0.9, **options)
    for step in range(steps):
        change(own, step)
        trainer.step(data()["x"][4 * step : 4 * step + 4])
    return bits(own)


def square(model, x):
    return model(x).square().mean()


def wide():
    """Make a module whose gradients fill several buckets, which leave during the backward pass."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 1100), nn.ReLU(), nn.Linear(1100, 1100), nn.Linear(1100, 5))


def in_turns(module, step):
    module[1].requires_grad_(step % 2 == 1)
    module[3].requires_grad_(step > 0)


def frozen_on_one(module, instance):
    module[1].requires_grad_(instance == 0)


def another_head(module, instance):
    module[4] = nn.Linear(33, 5)
    nn.init.constant_(module[4].weight, instance)


def another_frozen_layer(module, instance):
    module.append(nn.PReLU(init=instance).requires_grad_(False))


class Turning(nn.Module):
    """A module with complex parameters, whose gradients are conjugated only when they are read."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.large = nn.Parameter(torch.randn(64, 1100, dtype=torch.complex64))
        self.small = nn.Parameter(torch.randn(1, dtype=torch.complex64))

    def forward(self, x):
        x = x.flatten(1)
        hidden = (x.to(self.large.dtype) @ self.large).abs().mean(1)
        return hidden + x.mean() * ((self.large.conj() * 0.5j).real.mean() + (self.small.conj() * 0.5j).real.sum())


class TestComplexParameters:
    @pytest.mark.parametrize("options", STREAMS)
    def test_means_are_those_of_a_trainer(self, options, on_instances):
        module = Turning()
        expected = by_trainer(module, square)
        assert on_instances(REPLICAS, REPLICAS, lambda one: looped(one, module, square, **options)) == [expected] * 2

    def test_means_on_a_device_are_those_of_a_trainer(self, on_path):
        module = Turning()
        expected = by_trainer(module, square)
        found = on_path("compiled", REPLICAS, REPLICAS, lambda one: looped(one, module, square))
        assert found == [expected] * REPLICAS

    @pytest.mark.parametrize("instances", [1, 2])
    def test_weighted_means_are_the_same_for_every_number_of_instances(self, instances, on_instances):
        module = Turning()

        def run(strategy):
            own, model = distributed(strategy, module)
            local = strategy.local_replicas
            of_step = data()["x"][:4][2 * local.start : 2 * local.stop]
            model.backward(lambda x: strategies.Outcome(square(model, x), weight=float(x[0, 0, 0].abs())), of_step)
            return strategies.fingerprint([one.grad.numpy() for one in own.parameters()])

        [expected] = on_instances(1, REPLICAS, run)
        assert on_instances(instances, REPLICAS, run) == [expected] * instances


class TestTrainedLayers:
    @pytest.mark.parametrize("options", STREAMS)
    def test_layers_thaw_and_freeze_between_steps(self, options, on_instances):
        module = wide()
        in_turns(module, 0)
        expected = by_trainer(module, square, in_turns)
        found = on_instances(REPLICAS, REPLICAS, lambda one: looped(one, module, square, in_turns, **options))
        assert found == [expected] * REPLICAS

    def test_gradients_are_averaged_if_the_loop_calls_the_module_itself(self, on_instances):
        module = new_module("mlp")
        module[1].requires_grad_(False)

        def train(strategy):
            own, _ = model = distributed(strategy, module)
            own.requires_grad_(True)
            square(own, rows(strategy)).backward()
            return model and strategies.fingerprint([one.grad.numpy() for one in own.parameters()])

        zero, one = on_instances(REPLICAS, REPLICAS, train)
        assert zero == one

    def test_all_instances_train_the_same_parameters(self, on_instances):
        def thaw(strategy, at_start):
            own = copy.deepcopy(module)
            if at_start:
                own[1].requires_grad_(strategy.instance_index == 0)
            model = strategies.torch.DistributedModel(own, strategy)
            own[1].requires_grad_(strategy.instance_index == 0)
            square(model, rows(strategy)).backward()

        module = new_module("mlp")
        module[1].requires_grad_(False)
        for at_start in (True, False):
            with pytest.raises(DisagreementError, match=r"1 has 1\.weight .* frozen, instance 0 1\.weight .* trained"):
                on_instances(REPLICAS, REPLICAS, lambda strategy, at_start=at_start: thaw(strategy, at_start))

    @pytest.mark.parametrize("options", STREAMS)
    def test_new_layers_replace_others_between_steps(self, options, on_instances):
        """The new head has batch norm and comes between two steps."""
        module = wide()
        torch.manual_seed(1)
        head = nn.Sequential(nn.Linear(1100, 7), nn.BatchNorm1d(7))

        def run(strategy):
            own, model = distributed(strategy, module, **options)
            for step in range(4):
                if step == 2:
                    own[4] = copy.deepcopy(head)
                own.zero_grad()
                square(model, rows(strategy, step)).backward()
                with torch.no_grad():
                    for one in own.parameters():
                        one -= one.grad
            return bits(own)

        zero, one = on_instances(REPLICAS, REPLICAS, run)
        assert zero == one

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            (frozen_on_one, StrategyError, r"1\.weight has no gradient on the replicas \[1\].* freeze it on all"),
            (another_head, DisagreementError, r"4\.weight torch\.float32\[5, 33\] trained, digest"),
            (another_frozen_layer, DisagreementError, r"5\.weight torch\.float32\[1\] frozen, digest"),
        ],
    )
    def test_parameters_that_differ_between_instances_are_refused_by_name(self, change, error, message, on_instances):
        module = new_module("mlp")

        def run(strategy):
            own, model = distributed(strategy, module)
            change(own, strategy.instance_index)
            square(model, rows(strategy)).backward()

        with pytest.raises(error, match=message):
            on_instances(REPLICAS, REPLICAS, run)

    def test_a_new_layer_is_refused_if_its_gradient_bypasses_the_model(self):
        own, model = distributed(strategies.IPUStrategy(1), new_module("mlp"))
        own[4] = nn.Linear(33, 5)
        with pytest.raises(
            StrategyError, match=r"4\.weight is new in the module.*; call the DistributedModel, not the module"
        ):
            square(own, data()["x"]).backward()
        own.zero_grad()
        square(model, data()["x"]).backward()

    def test_the_dtype_changes_between_steps(self, on_instances):
        module = new_module("mlp")

        def run(strategy):
            own, model = distributed(strategy, module)
            square(model, rows(strategy)).backward()
            own.zero_grad()
            own.double()
            square(model, rows(strategy).double()).backward()
            return own[4].bias.grad

        found = on_instances(REPLICAS, REPLICAS, run)
        assert found[0].dtype == torch.float64
        assert torch.equal(*found)
        assert not torch.equal(found[0], found[0].float().double())


class TestAutogradGrad:
    def test_gradients_of_parameters_warn_once_by_name(self, on_instances):
        module = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))

        def run(strategy):
            own, model = distributed(strategy, module)
            for _ in range(2):
                torch.autograd.grad(square(model, rows(strategy)), [own[1].weight])
            return len(caught)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            on_instances(REPLICAS, REPLICAS, run)
        assert len(caught) == REPLICAS
        assert "has returned gradients of 1.weight of a DistributedModel" in str(caught[0].message)
        assert caught[0].filename == __file__

    def test_gradients_of_tensors_in_place_of_parameters_warn(self, on_instances):
        module = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))

        def run(strategy):
            own, model = distributed(strategy, module)
            others = {name: one.detach() for name, one in model.named_parameters()}

            def loss(others):
                return torch.func.functional_call(model, others, (rows(strategy),)).square().mean()

            for _ in range(2):
                torch.func.grad(loss)(others)
            square(model, rows(strategy)).backward()
            torch.autograd.grad(square(model, rows(strategy)), [own[1].weight])  # warns separately
            return own[1].weight.grad

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            zero, one = on_instances(REPLICAS, REPLICAS, run)
        assert torch.equal(zero, one)
        said = [str(each.message) for each in caught]
        assert sum("other tensors replace the parameters" in each for each in said) == REPLICAS
        assert sum("torch.autograd.grad has returned gradients" in each for each in said) == REPLICAS
        assert len(said) == 2 * REPLICAS

    @pytest.mark.parametrize("options", STREAMS)
    def test_gradients_of_inputs_make_a_penalty_as_in_trainer(self, options, on_instances):
        module = new_module("mlp")

        def loss(model, x):
            x = x.clone().requires_grad_(True)
            outputs = model(x)
            (slope,) = torch.autograd.grad(outputs.sum(), [x], create_graph=True)
            return outputs.square().mean() + (slope.flatten(1).norm(dim=1) - 1).square().mean()

        expected = by_trainer(module, loss)
        found = on_instances(REPLICAS, REPLICAS, lambda strategy: looped(strategy, module, loss, **options))
        assert found == [expected] * REPLICAS


class Reentrant(nn.Module):
    """A module that computes its first layers and others again in backward passes of their own."""

    def __init__(self, use_reentrant, rate=0.5):
        super().__init__()
        self.use_reentrant, self.rate = use_reentrant, rate
        self.first, self.second, self.last = nn.Linear(64, 1100), nn.Linear(1100, 1100), nn.Linear(1100, 5)

    def forward(self, x):
        x = x.flatten(1).requires_grad_(True)
        x = checkpoint(lambda x: F.dropout(self.first(x).tanh(), self.rate), x, use_reentrant=self.use_reentrant)
        return self.last(checkpoint(self.second, x, use_reentrant=self.use_reentrant))


class TestCheckpointing:
    @pytest.mark.parametrize("options", STREAMS)
    def test_checkpointing_inside_the_module_is_one_backward_pass(self, options, on_instances):
        torch.manual_seed(0)
        module = Reentrant(use_reentrant=True, rate=0)  # threads share the generator that checkpoints set back

        def run(strategy, use_reentrant):
            own, model = distributed(strategy, module, **options)
            own.use_reentrant = use_reentrant
            for step in range(2):
                square(model, rows(strategy, step)).backward()
            return [one.grad.clone() for one in own.parameters()]

        expected = on_instances(REPLICAS, REPLICAS, lambda strategy: run(strategy, False))[0]
        for found in on_instances(REPLICAS, REPLICAS, lambda strategy: run(strategy, True)):
            assert all(map(torch.equal, found, expected))

    @pytest.mark.parametrize("instances", [1, 2])
    def test_checkpoints_in_turns_draw_the_same_numbers_again(self, instances, on_instances):
        torch.manual_seed(0)
        module = Reentrant(use_reentrant=True)

        def run(strategy, use_reentrant):
            own, model = distributed(strategy, module)
            own.use_reentrant = use_reentrant
            for step in range(2):
                own.zero_grad()
                local = strategy.local_replicas
                of_step = data()["x"][4 * step : 4 * step + 4]
                model.backward(lambda x: square(model, x), of_step[2 * local.start : 2 * local.stop])
            return [one.grad.clone() for one in own.parameters()]

        expected = on_instances(1, REPLICAS, lambda strategy: run(strategy, False))[0]
        for found in on_instances(instances, REPLICAS, lambda strategy: run(strategy, True)):
            assert all(map(torch.equal, found, expected))

    def test_one_replica_counts_one_step(self):
        torch.manual_seed(0)
        module = Reentrant(use_reentrant=True)
        own, model = distributed(strategies.IPUStrategy(1), module)
        for step in range(2):
            own.zero_grad()
            square(model, data()["x"]).backward()
            plain = copy.deepcopy(module)
            torch.manual_seed(strategies.torch.seed_of(0, 0, step))
            square(plain, data()["x"]).backward()
            assert torch.equal(own.first.weight.grad, plain.first.weight.grad)

    def test_reentrant_checkpointing_around_the_model_is_refused(self):
        _, model = distributed(strategies.IPUStrategy(1), new_module("mlp"))
        x = data()["x"].requires_grad_(True)
        with pytest.raises(StrategyError, match=r"inside another one: .* use_reentrant=False\)"):
            checkpoint(model, x, use_reentrant=True).mean().backward()

    def test_recomputing_the_model_draws_the_same_numbers(self):
        own, model = distributed(strategies.IPUStrategy(1), new_module("mlp"))
        for step in range(2):
            own.zero_grad()
            checkpoint(model, data()["x"], use_reentrant=False).square().mean().backward()
            plain = new_module("mlp")
            torch.manual_seed(strategies.torch.seed_of(0, 0, step))
            square(plain, data()["x"]).backward()
            assert torch.equal(own[1].weight.grad, plain[1].weight.grad)

    def test_checkpointing_around_several_calls_that_draw_is_refused(self):
        own, model = distributed(strategies.IPUStrategy(1), new_module("mlp"))
        losses = [checkpoint(model, data()["x"], use_reentrant=False).mean() for _ in range(2)]
        with pytest.raises(StrategyError, match="recomputes one of 2 forward passes of a DistributedModel"):
            sum(losses).backward()
        own[3].p = 0.0
        own.zero_grad()
        sum(checkpoint(model, data()["x"], use_reentrant=False).mean() for _ in range(2)).backward()


class TestRandomNumbers:
    def test_two_forward_passes_before_one_backward_draw_as_in_trainer(self, on_instances):
        module = new_module("mlp")

        def loss(model, x):
            with torch.no_grad():
                target = model(x)
            return (model(x) - model(x.flip(0)) - target).square().mean()

        found = on_instances(REPLICAS, REPLICAS, lambda strategy: looped(strategy, module, loss))
        assert found == [by_trainer(module, loss)] * REPLICAS

    def test_an_evaluation_does_not_advance_random_numbers(self):
        class Noisy(nn.Module):
            def forward(self, x):
                return torch.rand(3)

        model = strategies.torch.DistributedModel(nn.Sequential(Noisy(), nn.Linear(3, 1)), strategies.IPUStrategy(1))
        own = model.module[0]
        model.module = own
        drawn = []
        for is_training in (True, False, False, True):
            drawn.append(model.train(is_training)(None))
        torch.manual_seed(strategies.torch.seed_of(0, 0, 0))
        expected = [torch.rand(3), torch.rand(3)]
        assert all(map(torch.equal, drawn, [expected[0], expected[0], expected[0], expected[1]]))

    def test_a_model_inside_a_module_leaves_random_numbers_of_the_module_alone(self):
        inner = strategies.torch.DistributedModel(new_module("mlp"), strategies.IPUStrategy(1))
        outer = nn.Sequential(inner, nn.Dropout(0.5))
        torch.manual_seed(3)
        outer(data()["x"])
        after = torch.rand(3)
        torch.manual_seed(3)
        F.dropout(torch.zeros(48, 5), 0.5)
        assert torch.equal(after, torch.rand(3))


class TestBackwardPasses:
    @pytest.mark.parametrize("options", STREAMS)
    def test_two_passes_through_one_graph_add_their_means(self, options, on_instances):
        module = wide()

        def run(strategy, twice):
            own, model = distributed(strategy, module, **options)
            outputs = model(rows(strategy))
            if twice:
                outputs.sum().backward(retain_graph=True)
                outputs.square().sum().backward()
            else:
                (outputs.sum() + outputs.square().sum()).backward()
            return [one.grad for one in own.parameters()]

        once = on_instances(REPLICAS, REPLICAS, lambda strategy: run(strategy, False))
        twice = on_instances(REPLICAS, REPLICAS, lambda strategy: run(strategy, True))
        for one, other, first in zip(*twice, once[0], strict=True):
            assert torch.equal(one, other)
            torch.testing.assert_close(one, first)

    def test_passes_in_no_sync_hand_on_all_their_gradients(self, on_instances):
        """Gradients of a layer that only the first micro-batch used are handed on as well."""

        class Sometimes(nn.Module):
            def __init__(self):
                super().__init__()
                self.always, self.sometimes = nn.Linear(64, 5), nn.Linear(64, 5)

            def forward(self, x):
                x = x.flatten(1)
                return self.always(x) + (self.sometimes(x) if self.is_first else 0)

        torch.manual_seed(0)
        module = Sometimes()

        def run(strategy, **options):
            own, model = distributed(strategy, module, **options)
            own.is_first = True
            with model.no_sync():
                square(model, rows(strategy)).backward()
            own.is_first = False
            square(model, rows(strategy, 1)).backward()
            return [one.grad for one in own.parameters()]

        for options in STREAMS:
            zero, one = on_instances(REPLICAS, REPLICAS, lambda strategy, options=options: run(strategy, **options))
            assert all(map(torch.equal, zero, one))

    @pytest.mark.parametrize("options", STREAMS)
    def test_gradients_changed_by_hooks_are_averaged(self, options, on_instances):
        module = wide()

        def run(strategy, is_after):
            def scale(parameter):
                parameter.grad.mul_(1 + strategy.instance_index)

            own, model = distributed(strategy, module, **options)
            for one in own.parameters():
                if is_after:
                    one.register_post_accumulate_grad_hook(scale)
                else:
                    one.register_hook(lambda gradient: gradient * (1 + strategy.instance_index))
            square(model, rows(strategy)).backward()
            return [one.grad for one in own.parameters()]

        expected = on_instances(REPLICAS, REPLICAS, lambda strategy: run(strategy, False))[0]
        for found in on_instances(REPLICAS, REPLICAS, lambda strategy: run(strategy, True)):
            assert all(map(torch.equal, found, expected))

    @pytest.mark.parametrize("options", STREAMS)
    def test_hooks_that_apply_gradients_are_refused(self, options, on_instances):
        module = new_module("mlp")

        def apply(parameter):
            parameter.data -= parameter.grad
            parameter.grad = None

        def run(strategy):
            own, model = distributed(strategy, module, **options)
            own[4].bias.register_post_accumulate_grad_hook(apply)
            square(model, rows(strategy)).backward()

        with pytest.raises(StrategyError, match=r"the gradient of 4\.bias is gone .*; leave it in grad, and apply it"):
            on_instances(REPLICAS, REPLICAS, run)

    def test_gradients_of_gradients_are_averaged(self, on_instances):
        """The loss is a penalty on the norms of mean gradients."""
        torch.manual_seed(0)
        module = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 1))

        def run(strategy):
            own, model = distributed(strategy, module)
            square(model, rows(strategy)).backward(create_graph=True)
            sum(one.grad.square().sum() for one in own.parameters()).backward()
            return [one.grad.detach() for one in own.parameters()]

        plain = copy.deepcopy(module)
        losses = [square(plain, data()["x"][first : first + 2]) for first in (0, 2)]
        gradients = torch.autograd.grad(sum(losses) / 2, list(plain.parameters()), create_graph=True)
        more = torch.autograd.grad(sum(one.square().sum() for one in gradients), list(plain.parameters()))
        expected = [one.detach() + other for one, other in zip(gradients, more, strict=True)]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True")
            zero, one = on_instances(REPLICAS, REPLICAS, run)
        assert all(map(torch.equal, zero, one))
        torch.testing.assert_close(zero, expected)

    def test_backward_passes_for_some_parameters_average_those_alone(self, on_instances):
        module = new_module("mlp")

        def run(strategy):
            own, model = distributed(strategy, module)
            square(model, rows(strategy)).backward(inputs=[own[4].weight])
            return own[4].weight.grad, own[1].weight.grad

        (zero, none), (one, _) = on_instances(REPLICAS, REPLICAS, run)
        assert torch.equal(zero, one)
        assert none is None

    @pytest.mark.parametrize("search", ["strong_wolfe", None])
    def test_optimizers_that_read_the_loss_make_equally_many_passes_everywhere(self, search, on_instances):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 1))

        def run(strategy):
            own, model = distributed(strategy, module)
            optimizer = torch.optim.LBFGS(own.parameters(), 0.5, max_iter=8, line_search_fn=search)
            losses = []

            def closure():
                optimizer.zero_grad()
                loss = (model(rows(strategy)) - 1 - strategy.instance_index).square().mean()
                loss.backward()
                return loss

            losses = [optimizer.step(closure).item() for _ in range(3)]
            return losses, model._averaging.loop.step, bits(own)

        zero, one = on_instances(REPLICAS, REPLICAS, run)
        assert zero == one
        assert zero[0][-1] < zero[0][0]

    def test_other_optimizers_with_closures_return_the_local_loss(self, on_instances):
        module = new_module("mlp")

        def run(strategy):
            own, model = distributed(strategy, module)
            optimizer = torch.optim.SGD(own.parameters(), 0.1)

            def closure():
                loss = model(rows(strategy)).square().mean() + strategy.instance_index
                loss.backward()
                return loss

            return optimizer.step(closure).item() > 1, bits(own)

        zero, one = on_instances(REPLICAS, REPLICAS, run)
        assert (zero[0], one[0]) == (False, True)
        assert zero[1] == one[1]


class TestSeveralModels:
    @pytest.mark.parametrize("count", [2, 3])
    def test_models_that_feed_each_other_stream_gradients(self, count, on_instances):
        """The optimizers take turns, as in a GAN."""
        torch.manual_seed(0)
        parts = [nn.Sequential(nn.Linear(8, 1100), nn.ReLU(), nn.Linear(1100, 1100), nn.Linear(1100, 8))] * count
        parts = list(map(copy.deepcopy, parts))

        def run(strategy, **options):
            models = [distributed(strategy, one, **options)[1] for one in parts]
            optimizers = [torch.optim.SGD(one.parameters(), 0.01) for one in models]
            for step in range(4):
                x = rows(strategy, step)[:, 0]
                for number in range(count):
                    for one in models:
                        one.zero_grad()
                    hidden = x
                    for depth, one in enumerate(models):
                        hidden = one(hidden.detach() if depth == number else hidden)
                    hidden.square().mean().backward()
                    optimizers[number].step()
            return [bits(one.module) for one in models]

        plain = on_instances(REPLICAS, REPLICAS, run)
        assert plain[0] == plain[1]
        assert on_instances(REPLICAS, REPLICAS, lambda strategy: run(strategy, stream_gradients=True)) == plain

    def test_models_used_in_different_orders_are_an_error(self, on_instances):
        """Gradients of two models with the same shapes are never confused."""
        module = nn.Linear(8, 8)

        def run(strategy):
            models = [distributed(strategy, module)[1] for _ in range(2)]
            models[strategy.instance_index](rows(strategy)[:, 0]).mean().backward()

        with pytest.raises(LayoutMismatchError, match="gradients of model 2"):
            on_instances(REPLICAS, REPLICAS, run)


class TestCopies:
    def test_a_copy_on_one_instance_follows_an_averaged_model(self, on_instances):
        module = new_module("convolutions")

        def run(strategy):
            own, model = distributed(strategy, module)
            if strategy.instance_index == 0:
                averaged = AveragedModel(model, use_buffers=True)
                teacher = copy.deepcopy(model)
            for step in range(2):
                own.zero_grad()
                square(model, rows(strategy, step)).backward()
                with torch.no_grad():
                    for one in own.parameters():
                        one -= one.grad
                if strategy.instance_index == 0:
                    averaged.update_parameters(model)
                    with torch.no_grad():
                        teacher(rows(strategy))
            return averaged.module.module.last.weight if strategy.instance_index == 0 else own.last.weight

        zero, one = on_instances(REPLICAS, REPLICAS, run)
        assert not torch.equal(zero, one)
        assert zero.shape == one.shape

    def test_copies_average_their_gradients(self, on_instances):
        module = new_module("convolutions")

        def run(strategy):
            own, model = distributed(strategy, module)
            square(model, rows(strategy)).backward()
            copied = copy.deepcopy(model)
            copied.zero_grad()
            square(copied, rows(strategy, 1)).backward()
            square(model, rows(strategy, 1)).backward()
            return (
                bits(own),
                bits(copied.module),
                strategies.fingerprint([one.grad.numpy() for one in copied.parameters()]),
            )

        zero, one = on_instances(REPLICAS, REPLICAS, run)
        assert zero == one
        assert zero[0] == zero[1]

    def test_saving_a_model_to_a_file_is_refused(self):
        _, model = distributed(strategies.IPUStrategy(1), new_module("mlp"))
        for write in (pickle.dumps, lambda one: torch.save(one, io.BytesIO())):
            with pytest.raises(StrategyError, match=r"cannot be written to a file; save model\.module, or "):
                write(model)
        torch.save(model.state_dict(), io.BytesIO())
        torch.save(model.module, io.BytesIO())

    @pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin:UserWarning")
    def test_a_compiled_function_around_the_model_is_refused(self):
        model = strategies.torch.DistributedModel(new_module("mlp"), strategies.IPUStrategy(1))
        with pytest.raises(strategies.StrategyError, match=r"DistributedModel\(torch.compile\(module\), strategy\)"):
            torch.compile(model, backend="eager")(data()["x"])

    def test_a_compiled_model_trains_as_plain_pytorch(self):
        own, model = distributed(strategies.IPUStrategy(1), new_module("mlp"))
        model.compile(backend="eager")
        square(model, data()["x"]).backward()
        plain = new_module("mlp")
        torch.manual_seed(strategies.torch.seed_of(0, 0, 0))
        square(plain, data()["x"]).backward()
        assert own._compiled_call_impl is not None
        assert torch.equal(own[1].weight.grad, plain[1].weight.grad)

    def test_state_dictionaries_have_the_names_of_ddp(self):
        own, model = distributed(strategies.IPUStrategy(1), new_module("convolutions"))
        assert list(model.state_dict()) == [f"module.{name}" for name in own.state_dict()]
        model.load_state_dict(model.state_dict())

    def test_a_module_that_contains_a_distributed_model_is_refused(self):
        strategy = strategies.IPUStrategy(1)
        wrapped = nn.Sequential(distributed(strategy, new_module("mlp"))[1])
        for make in (
            lambda: sgd_trainer(strategy, wrapped, square),
            lambda: strategies.torch.DistributedModel(wrapped, strategy),
        ):
            with pytest.raises(StrategyError, match=r"0 is a DistributedModel, .*; give its \.module"):
                make()


class TestMemory:
    def test_memory_of_a_model_is_freed_with_the_model(self, on_instances):
        """The collector is off; the module, or the graph of a loss, may be kept."""
        module = new_module("mlp")

        def run(strategy):
            own, model = distributed(strategy, module, stream_gradients=True)
            square(model, rows(strategy)).backward()
            averaging = model._averaging
            kept = [weakref.ref(one) for one in (model, averaging, averaging.exchange)]
            del model, averaging
            hooks = [len(one._post_accumulate_grad_hooks or ()) for one in own.parameters()]
            return [one() is None for one in kept], sum(hooks)

        gc.collect()
        gc.disable()
        try:
            found = on_instances(REPLICAS, REPLICAS, run)
        finally:
            gc.enable()
        assert found == [([True] * 3, 0)] * REPLICAS

    @pytest.mark.parametrize("options", [*STREAMS, {"replicated_optimizer_state_sharding": True}])
    def test_memory_of_a_trainer_is_freed_with_the_trainer(self, options):
        def run():
            module = new_module("mlp")
            optimizer = torch.optim.Adam(module.parameters())
            trainer = strategies.torch.Trainer(strategies.IPUStrategy(2), module, square, optimizer, **options)
            trainer.step(data()["x"][:4])
            local = trainer._engine._local
            held = [weakref.ref(one) for one in (trainer, trainer._training, local, local.exchange, module)]
            return held, list(local._threads._threads)

        def freed():
            held, threads = run()
            for thread in threads:  # each may still hold a result for a moment
                thread.join(60)
            return [one() for one in held]

        run()  # PyTorch loads parts of itself, and keeps the frames of some errors
        gc.collect()
        gc.disable()
        try:
            assert freed() == [None] * 5
        finally:
            gc.enable()

    def test_memory_of_a_model_stays_until_the_loss_is_gone(self, on_instances):
        module = new_module("mlp")

        def run(strategy):
            own = copy.deepcopy(module)
            square(strategies.torch.DistributedModel(own, strategy), rows(strategy)).backward()
            return strategies.fingerprint([one.grad.numpy() for one in own.parameters()])

        zero, one = on_instances(REPLICAS, REPLICAS, run)
        assert zero == one
