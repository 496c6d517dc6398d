"""Loops of the program, with one replica per instance, have the bits of a Trainer."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
from torch import nn
from torch_modules import MODULES, data, distributed, loss_fn, new_module

import strategies
import strategies.torch
from collectives import LayoutMismatchError
from strategies import StrategyError
from strategies.errors import DisagreementError, DivergenceError

REPLICAS = 3
STEPS = 3


def loader_of(strategy, dataset, count=1):
    sampler = strategies.torch.DistributedSampler(dataset, strategy, 2, seed=0, gradient_accumulation_count=count)
    own = torch.Generator()  # instances are threads, and a loader draws from the generator of the process
    return sampler, torch.utils.data.DataLoader(dataset, sampler.instance_batch_size, sampler=sampler, generator=own)


def looped(strategy, module, count=1, **options):
    """Return fingerprints of parameters and buffers after some steps of a plain loop."""
    module = copy.deepcopy(module)
    model = strategies.torch.DistributedModel(module, strategy, **options)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    rows = data()
    sampler, loader = loader_of(strategy, torch.utils.data.TensorDataset(rows["x"], rows["y"]), count)
    made = 0
    for epoch in range(9):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            parts = list(zip(x.chunk(count), y.chunk(count), strict=True))
            for number, (rows_x, rows_y) in enumerate(parts):
                loss, _ = loss_fn(model, {"x": rows_x, "y": rows_y})
                if number < count - 1:
                    with model.no_sync():
                        (loss / count).backward()
                else:
                    (loss / count).backward()
            optimizer.step()
            made += 1
            if made == STEPS:
                return found(module)
    raise AssertionError


def found(module):
    return [
        strategies.fingerprint([each.detach().numpy() for each in named])
        for named in (module.parameters(), module.buffers())
    ]


def by_trainer(module, count=1, replicas=REPLICAS, **options):
    module = copy.deepcopy(module)
    strategy = strategies.IPUStrategy(replicas)
    optimizer = torch.optim.Adam(module.parameters(), 1e-2)
    trainer = strategies.torch.Trainer(
        strategy, module, loss_fn, optimizer, gradient_accumulation_count=count, **options
    )
    dataset = strategies.torch.distribute_dataset(strategy, data(), batch_size=2, gradient_accumulation_count=count)
    for epoch in range(9):
        for batch in dataset.epoch(epoch):
            trainer.step(batch)
            if trainer.steps_made == STEPS:
                trainer.close()
                return found(module)
    raise AssertionError


@pytest.fixture(params=["host", "compiled"])
def on_every_path(request, on_path):
    """Provide a function that runs another one on instances with each path of gradients."""
    return functools.partial(on_path, request.param)


@pytest.mark.complete
def test_recomputation_draws_the_same_random_numbers():
    """Recomputation outside the forward pass draws from the process's generator, so threads cannot run this test."""
    module = new_module("checkpointed")
    assert looped(strategies.IPUStrategy(1), module) == by_trainer(module, replicas=1)


@pytest.mark.parametrize("name", sorted(MODULES.keys() - {"checkpointed"}))
def test_a_loop_has_the_bits_of_a_trainer(name, on_every_path):
    module = new_module(name)
    assert (
        on_every_path(REPLICAS, REPLICAS, lambda strategy: looped(strategy, module)) == [by_trainer(module)] * REPLICAS
    )


def in_turns(strategy, module, count=1):
    """Return the fingerprints after a loop whose replicas take turns on each instance."""
    module = copy.deepcopy(module)
    model = strategies.torch.DistributedModel(module, strategy)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    dataset = strategies.torch.distribute_dataset(strategy, data(), batch_size=2, gradient_accumulation_count=count)
    batches = (batch for epoch in range(9) for batch in dataset.epoch(epoch))
    for batch in itertools.islice(batches, STEPS):
        optimizer.zero_grad()
        model.backward(lambda rows: loss_fn(model, rows)[0] / count, batch, count)
        optimizer.step()
    return found(module)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_replicas_that_take_turns_have_the_bits_of_a_trainer(name):
    module = new_module(name)
    assert in_turns(strategies.IPUStrategy(REPLICAS), module, 2) == by_trainer(module, 2)


def test_replicas_may_be_spread_in_any_way(on_every_path):
    module = new_module("convolutions")
    for instances in (2, 4):
        found = on_every_path(instances, 4, lambda strategy: in_turns(strategy, module))
        assert found == [by_trainer(module, replicas=4)] * instances


def test_gradients_that_were_there_before_are_added_up_in_turns():
    module = nn.Linear(2, 1, bias=False)
    model = strategies.torch.DistributedModel(module, strategies.IPUStrategy(2))
    nn.init.ones_(module.weight)
    module.weight.grad = torch.full((1, 2), 8.0)
    loss = model.backward(lambda rows: model(rows).sum(), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert module.weight.grad.tolist() == [[10, 11]]
    assert float(loss) == 5


def test_layers_may_change_between_steps_of_replicas_that_take_turns(on_instances):
    """A layer is thawed in the second step, one with batch norm is new in the third; a frozen one moves in each."""

    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.shift = new_module("convolutions"), nn.Parameter(torch.zeros(1), requires_grad=False)

        def forward(self, x):
            with torch.no_grad():
                self.shift += x.mean()
            return self.inner(x) * (1 + self.shift)

    module = Shifted()
    module.inner.first.requires_grad_(False)
    head = nn.Sequential(nn.Linear(36, 5), nn.BatchNorm1d(5))

    def run(strategy, takes_turns):
        own, model = distributed(strategy, module, model_state_aggregation={"shift": "mean"})
        dataset = strategies.torch.distribute_dataset(strategy, data(), batch_size=2)
        for step, batch in enumerate(itertools.islice(dataset.epoch(0), 4)):
            if step == 1:
                own.inner.first.requires_grad_(True)
            if step == 2:
                own.inner.last = copy.deepcopy(head)
            own.zero_grad()
            if takes_turns:
                model.backward(lambda rows: loss_fn(model, rows)[0], batch)
            else:
                loss_fn(model, batch)[0].backward()
            with torch.no_grad():
                for one in own.parameters():
                    one -= one.grad * 0.1 if one.requires_grad else 0
        return found(own)

    expected = on_instances(4, 4, lambda strategy: run(strategy, takes_turns=False))
    for instances in (1, 2, 4):
        assert on_instances(instances, 4, lambda strategy: run(strategy, takes_turns=True)) == expected[:instances]


@pytest.mark.parametrize("instances", [1, 3])
def test_a_layer_that_is_frozen_while_another_thaws_keeps_its_bits(instances, on_instances):
    """The mean of three equal numbers may be rounded, so a frozen layer that no replica has written needs none."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 50), nn.Linear(50, 50), nn.Linear(50, 1))
    module[1].requires_grad_(False)
    rows = torch.randn(6, 4)

    def train(strategy):
        own, model = distributed(strategy, module)
        local = strategy.local_replicas
        for _ in range(2):
            model.backward(lambda part: model(part).mean(), rows[2 * local.start : 2 * local.stop])
            own[0].requires_grad_(False)
            own[1].requires_grad_(True)
        assert torch.equal(own[0].weight, module[0].weight)
        return own[1].weight.grad

    zero, *others = on_instances(instances, 3, train)
    assert all(torch.equal(zero, one) for one in others)
    assert zero.any()


def test_micro_batches_that_are_not_synchronised_add_up(on_every_path):
    module = new_module("convolutions")
    expected = [by_trainer(module, count=2)] * REPLICAS
    assert on_every_path(REPLICAS, REPLICAS, lambda strategy: looped(strategy, module, count=2)) == expected


def test_gradients_can_travel_in_16_bits(on_every_path):
    module, options = new_module("mlp"), {"gradient_transfer_dtype": "bfloat16"}
    expected = [by_trainer(module, **options)] * REPLICAS
    assert on_every_path(REPLICAS, REPLICAS, lambda strategy: looped(strategy, module, **options)) == expected


def test_large_gradients_leave_in_several_buckets(on_every_path):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 1500), nn.ReLU(), nn.Linear(1500, 900), nn.Linear(900, 5))
    assert (
        on_every_path(REPLICAS, REPLICAS, lambda strategy: looped(strategy, module)) == [by_trainer(module)] * REPLICAS
    )


def test_gradients_belong_to_the_program(on_every_path):
    """Writes of one instance to its gradients reach no other instance, and gradients stay in the memory of autograd."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 5000), nn.Linear(5000, 1))  # more than 1 MiB, and less

    def train(strategy):
        own, model = distributed(strategy, module)
        seen = []
        for _ in range(2):
            model(data()["x"][:4]).mean().backward()
            seen.append([parameter.grad.clone() for parameter in own.parameters()])
            kept = [parameter.grad for parameter in own.parameters()]
            for parameter in own.parameters():
                parameter.grad.mul_(strategy.instance_index)
            strategy.communicator.barrier(name="both have written")
            for parameter, before, grad in zip(own.parameters(), seen[-1], kept, strict=True):
                assert parameter.grad is grad
                assert torch.equal(grad, before * strategy.instance_index)
            own.zero_grad(set_to_none=False)
        return seen

    plain = copy.deepcopy(module)
    plain(data()["x"][:4]).mean().backward()
    for seen in on_every_path(2, 2, train):
        for of_step in seen:
            assert all(map(torch.equal, of_step, (parameter.grad for parameter in plain.parameters())))


def test_a_backward_pass_that_fails_half_way_does_not_spoil_the_next(on_every_path):
    module = new_module("mlp")

    def refuse(gradient):
        raise ArithmeticError("too large")

    def train(strategy):
        own, model = distributed(strategy, module)
        hidden = model.module[:4](data()["x"])
        hidden.register_hook(refuse)
        with pytest.raises(ArithmeticError):
            model.module[4](hidden).mean().backward()
        own.zero_grad()
        model(data()["x"] * (1 + strategy.instance_index)).mean().backward()
        return [strategies.fingerprint(parameter.grad.numpy()) for parameter in own.parameters()]

    zero, one = on_every_path(2, 2, train)
    assert zero == one


def test_instances_begin_with_the_state_of_instance_0(on_every_path):
    module = new_module("convolutions")

    def make(strategy):
        own = copy.deepcopy(module)
        with torch.no_grad():
            own.last.bias.fill_(strategy.instance_index)
            own.norm.running_mean.fill_(strategy.instance_index)
        strategies.torch.DistributedModel(own, strategy)
        return own.last.bias.sum().item() + own.norm.running_mean.sum().item()

    assert on_every_path(2, 2, make) == [0.0, 0.0]


def test_an_instance_that_ends_early_helps_the_others_in_join(on_every_path):
    """Means are over all replicas, and all instances end with the same parameters."""
    module = new_module("mlp")[:3]
    x = data()["x"]

    def train(strategy):
        own, model = distributed(strategy, module)
        gradients = []
        with model.join():
            for _ in range(1 + strategy.instance_index):
                own.zero_grad()
                model(x[:4]).mean().backward()
                gradients.append(own[1].bias.grad.clone())
                with torch.no_grad():
                    own[1].bias -= 1.0
        return gradients, own[1].bias.sum().item()

    plain = copy.deepcopy(module)
    plain(x[:4]).mean().backward()
    zero, one = on_every_path(2, 2, train)
    assert zero[1] == one[1]
    assert torch.equal(zero[0][0], plain[1].bias.grad)
    assert torch.equal(one[0][0], plain[1].bias.grad)
    plain.zero_grad()
    with torch.no_grad():
        plain[1].bias -= 1.0
    plain(x[:4]).mean().backward()
    assert torch.equal(one[0][1], plain[1].bias.grad / 2)


def test_an_instance_that_ends_early_without_join_is_an_error(on_every_path):
    module = new_module("mlp")

    def train(strategy):
        model = distributed(strategy, module)[1]
        for _ in range(1 + strategy.instance_index):
            model(data()["x"]).mean().backward()
        strategy.communicator.close()

    with pytest.raises(LayoutMismatchError, match="close"):
        on_every_path(2, 2, train)


class Counting(nn.Linear):
    """A layer whose forward pass adds a number to its frozen bias."""

    by = 1

    def __init__(self, *sizes):
        super().__init__(*sizes)
        nn.init.zeros_(self.bias)
        self.bias.requires_grad_(False)

    def forward(self, x):
        if self.by:
            with torch.no_grad():
                self.bias += self.by * x.mean()
        return super().forward(x)


@pytest.mark.parametrize("instances", [1, 2, 4])
def test_replicas_agree_on_frozen_parameters_that_they_write(instances, on_instances):
    """Each replica begins with the value of the step's beginning, and the module gets the mean."""

    def train(strategy):
        own, model = distributed(strategy, Counting(2, 2))
        for _ in range(3):
            local = strategy.local_replicas
            batch = torch.arange(8.0).repeat_interleave(2).view(8, 2)[2 * local.start : 2 * local.stop]
            model.backward(lambda rows: model(rows).mean(), batch)
        return own.bias.tolist()

    assert on_instances(instances, 4, train) == [[10.5, 10.5]] * instances


def test_an_error_in_a_backward_pass_of_all_replicas_gives_gradients_back():
    """The second replica fails after its first micro-batch."""
    module = nn.Linear(2, 2)
    model, calls = strategies.torch.DistributedModel(module, strategies.IPUStrategy(2)), []

    def loss(rows):
        calls.append(len(rows))
        if len(calls) == 4:
            raise ArithmeticError
        return model(rows).mean()

    module.weight.grad = before = torch.ones(2, 2)
    with pytest.raises(ArithmeticError):
        model.backward(loss, torch.ones(8, 2), micro_batches=2)
    assert module.weight.grad is before
    assert torch.equal(before, torch.ones(2, 2))
    assert module.bias.grad is None


class TestRefusals:
    def test_a_plain_backward_pass_with_several_replicas_per_instance(self):
        model = strategies.torch.DistributedModel(new_module("mlp"), strategies.IPUStrategy(2))
        with pytest.raises(StrategyError, match=r"drives 2 replicas, .* call model\.backward\(loss_fn, batch\)"):
            model(data()["x"]).mean().backward()

    def test_sync_batch_norm_with_several_replicas_per_instance(self):
        model = strategies.torch.DistributedModel(
            nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)), strategies.IPUStrategy(2)
        )
        with pytest.raises(StrategyError, match=r"SyncBatchNorm '1' needs all replicas at the same time"):
            model.backward(lambda rows: model(rows).mean(), torch.ones(4, 2))

    def test_passes_of_no_sync_before_a_backward_pass_of_all_replicas(self):
        model = strategies.torch.DistributedModel(nn.Linear(2, 2), strategies.IPUStrategy(2))
        with model.no_sync():
            model(torch.ones(4, 2)).mean().backward()
        with pytest.raises(StrategyError, match="inside no_sync cannot be a part of it"):
            model.backward(lambda rows: model(rows).mean(), torch.ones(4, 2))

    def test_losses_that_are_no_scalars(self):
        model = strategies.torch.DistributedModel(nn.Linear(2, 2), strategies.IPUStrategy(2))
        with pytest.raises(TypeError, match=r"returned a Tensor of shape \[2, 2\]; return the loss"):
            model.backward(model, torch.ones(4, 2))

    def test_frozen_parameters_that_replicas_begin_to_write_after_the_first_step(self):
        module = Counting(2, 2)
        model = strategies.torch.DistributedModel(module, strategies.IPUStrategy(2))
        module.by = 0
        model.backward(lambda rows: model(rows).mean(), torch.ones(4, 2))
        module.by = 1
        with pytest.raises(StrategyError, match=r"bias is frozen, and was written .* model_state_aggregation"):
            model.backward(lambda rows: model(rows).mean(), torch.ones(4, 2))

    def test_forward_passes_of_several_replicas_that_change_the_module(self):
        class Lazy(nn.Linear):
            def forward(self, x):
                self.register_buffer("largest", x.detach().max())
                return super().forward(x)

        model = strategies.torch.DistributedModel(Lazy(2, 2), strategies.IPUStrategy(2))
        with pytest.raises(StrategyError, match="a forward pass has added, removed or replaced a part of the module"):
            model.backward(lambda rows: model(rows).mean(), torch.ones(4, 2))

    def test_gradients_that_a_hook_applies_before_they_are_averaged(self):
        def apply(parameter):
            parameter.grad = None

        module = nn.Linear(2, 2)
        model = strategies.torch.DistributedModel(module, strategies.IPUStrategy(2))
        module.weight.register_post_accumulate_grad_hook(apply)
        with pytest.raises(StrategyError, match="the gradient of weight is gone at the end of the backward pass"):
            model.backward(lambda rows: model(rows).mean(), torch.ones(4, 2))

    def test_sparse_gradients(self, on_every_path):
        module = nn.Sequential(nn.Embedding(5, 3, sparse=True))

        def train(strategy):
            model = distributed(strategy, module)[1]
            with pytest.raises(StrategyError, match=r"0\.weight is sparse, .* sparse=False"):
                model(torch.tensor([1, 2])).sum().backward()

        on_every_path(2, 2, train)

    def test_streaming_of_gradients_that_stay_on_a_device(self, on_instances, monkeypatch):
        monkeypatch.setenv("POPDIST_EXCHANGE", "compiled")
        module = new_module("mlp")

        def make(strategy):
            with pytest.raises(StrategyError, match="'compiled' was requested, .* leave stream_gradients out"):
                distributed(strategy, module, stream_gradients=True)

        on_instances(2, 2, make)

    def test_gradients_that_only_some_replicas_have(self, on_every_path):
        module = new_module("mlp")

        def train(strategy):
            model = distributed(strategy, module)[1]
            hidden = model.module[:4](data()["x"])
            loss = hidden if strategy.instance_index else model.module[4](hidden)
            with pytest.raises(StrategyError, match=r"4\.weight has no gradient on the replicas \[1\]"):
                loss.mean().backward()

        on_every_path(2, 2, train)


def test_a_gradient_that_no_replica_has_stays_as_it_was(on_every_path):
    module = new_module("mlp")

    def train(strategy):
        own, model = distributed(strategy, module)
        own[:4](data()["x"]).mean().backward()
        before = own[4].weight.grad
        model(data()["x"]).mean().backward()
        kept = own[4].weight.grad.clone()
        own[:4](data()["x"]).mean().backward()
        return before, torch.equal(own[4].weight.grad, kept)

    assert on_every_path(2, 2, train) == [(None, True)] * 2


@pytest.mark.parametrize("instances", [1, 2, 4])
def test_the_sampler_deals_rows_as_datasets_do(instances, on_instances):
    rows = torch.arange(43)

    def read(strategy):
        sampler, loader = loader_of(strategy, rows, count=2)
        dataset = strategies.torch.distribute_dataset(strategy, rows, batch_size=2, gradient_accumulation_count=2)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            assert len(loader) == len(dataset) == 2
            for one, other in zip(loader, dataset.epoch(epoch), strict=True):
                assert torch.equal(one, other)

    on_instances(instances, 4, read)


def test_the_sampler_can_pad():
    sampler = strategies.torch.DistributedSampler(
        range(5), strategies.IPUStrategy(2), 2, shuffle=False, remainder="pad"
    )
    assert list(sampler) == [0, 1, 2, 3, 4, 0, 1, 2]
    assert len(sampler) == 8
    with pytest.raises(ValueError, match="use a batch_size of at most 1"):
        strategies.torch.DistributedSampler(range(3), strategies.IPUStrategy(2), 2)


@pytest.mark.parametrize("instances", [1, 2])
def test_a_loss_may_go_through_another_model_of_several_replicas_if_that_is_frozen(instances, on_instances):
    """A loss of a generator goes through its discriminator."""
    first, second = nn.Linear(4, 8), nn.Linear(8, 1)
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))

    def train(strategy):
        generator, discriminator = copy.deepcopy(first), copy.deepcopy(second)
        one, other = (strategies.torch.DistributedModel(each, strategy) for each in (generator, discriminator))
        optimizer = torch.optim.SGD(generator.parameters(), 0.1)
        local = strategy.local_replicas
        batch = rows[2 * local.start : 2 * local.stop]
        with pytest.raises(StrategyError, match=r"freeze it meanwhile: call requires_grad_\(False\) on its module"):
            one.backward(lambda part: other(one(part)).mean(), batch)
        discriminator.requires_grad_(False)
        for _ in range(2):
            optimizer.zero_grad()
            one.backward(lambda part: other(one(part)).mean(), batch)
            optimizer.step()
        return strategies.fingerprint(generator.state_dict())

    assert on_instances(instances, 4, train) == on_instances(1, 4, train) * instances


def test_instances_that_set_other_numbers_of_steps_are_refused(on_instances):
    """Replicas draw by the number of the step, so their random numbers would be those of other steps."""

    def program(strategy):
        model = strategies.torch.DistributedModel(nn.Linear(2, 1), strategy)
        model.steps_made = 3 + strategy.instance_index
        for _ in range(2):
            model.backward(lambda batch: model(batch).mean(), torch.ones(2, 2))

    with pytest.raises(DivergenceError, match="the first array that differs is .*steps_made"):
        on_instances(2, 2, program)


@pytest.mark.parametrize("option", [{"model_state_aggregation": "first"}, {"stream_gradients": True}])
def test_instances_with_other_options_are_refused_by_name(option, on_instances):
    def program(strategy):
        strategies.torch.DistributedModel(nn.Linear(2, 1), strategy, **option if strategy.instance_index else {})

    with pytest.raises(DisagreementError, match=next(iter(option))):
        on_instances(2, 2, program)
