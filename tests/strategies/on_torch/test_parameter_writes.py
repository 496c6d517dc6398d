"""Writes to parameters in forward passes: frozen parameters agree as buffers do, trained ones are refused."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_modules import data, sgd_trainer

import strategies
import strategies.torch
from strategies import StrategyError
from strategies.torch.parameter_writes import device_digests

REPLICAS = 4


class Momentum(nn.Module):
    """An encoder and one that follows it by a moving average in the forward pass, as in MoCo and BYOL."""

    def __init__(self, write):
        super().__init__()
        torch.manual_seed(5)
        self.query, self.last = nn.Linear(64, 6), nn.Linear(6, 5)
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.write = write

    def forward(self, x):
        rows = x.flatten(1)
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            self.write(key, query, rows)
        return self.last(torch.tanh(self.query(rows)) + torch.tanh(self.key(rows)))


@torch.no_grad()
def in_place(key, query, rows):
    key.mul_(0.9).add_(query, alpha=0.1)


def through_data(key, query, rows):
    key.data.mul_(0.9).add_(query.data, alpha=0.1)


def by_new_data(key, query, rows):
    key.data = key.data * 0.9 + query.data * 0.1


def of_the_rows(key, query, rows):
    """Write other numbers on each replica."""
    key.data = key.data * 0.9 + rows.mean()


class PowerIteration(nn.Module):
    """A spectral norm whose vector is a parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.weight, self.u = nn.Parameter(torch.randn(5, 64)), nn.Parameter(torch.randn(5), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            v = F.normalize(self.weight.t() @ self.u, dim=0)
            self.u.data = F.normalize(self.weight @ v, dim=0)
        return x.flatten(1) @ (self.weight / (self.u @ self.weight @ v)).t()


class Grows(nn.Module):
    """A module with a buffer that is empty until the first forward pass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.last, self.by_rows = nn.Linear(64, 5), False
        self.register_buffer("largest", torch.tensor([]))

    def forward(self, x):
        rows = x.flatten(1)
        largest = rows.detach().abs().amax(0)
        if self.by_rows and not largest.any():
            largest = largest[:1]
        if self.largest is None or not self.largest.numel():
            self.largest = torch.zeros_like(largest)
        self.largest.mul_(0.9).add_(largest, alpha=0.1)
        return self.last(rows / (self.largest + 1))


def quantisation_aware():
    from torch.ao import quantization

    torch.manual_seed(5)
    module = nn.Sequential(nn.Flatten(), quantization.QuantStub(), nn.Linear(64, 5)).train()
    with warnings.catch_warnings(action="ignore"):  # PyTorch's own deprecation warning
        module.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        return quantization.prepare_qat(module)


KINDS = {
    "in place": lambda: Momentum(in_place),
    "through data": lambda: Momentum(through_data),
    "by new data": lambda: Momentum(by_new_data),
    "otherwise on each replica": lambda: Momentum(of_the_rows),
    "power iteration": PowerIteration,
}


class MaxNorm(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.table, self.last = nn.Embedding(40, 8, max_norm=1.0), nn.Linear(8, 5)

    def forward(self, x):
        words = (x.abs() * 9).long().clamp(max=39)
        return self.last(self.table(words).mean((1, 2)))


class Clipped(nn.Module):
    """A module that clips its weights in its forward pass, like the critic of a WGAN."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.last = nn.Linear(64, 5)

    def forward(self, x):
        self.last.weight.data.clamp_(-0.1, 0.1)
        return self.last(x.flatten(1))


def loss_fn(module, batch):
    return F.cross_entropy(module(batch["x"]), batch["y"])


def bits(module):
    return strategies.fingerprint([one.detach().numpy() for one in (*module.parameters(), *module.buffers())])


def trained(strategy, module, steps=4, **options):
    trainer = sgd_trainer(strategy, module, loss_fn, **options)
    dataset = strategies.torch.distribute_dataset(strategy, data(), batch_size=2)
    for batch in [batch for epoch in range(2) for batch in dataset.epoch(epoch)][:steps]:
        trainer.step(batch)
    return bits(module)


def looped(strategy, module, steps=4, **options):
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    model = strategies.torch.DistributedModel(module, strategy, **options)
    dataset = strategies.torch.distribute_dataset(strategy, data(), batch_size=2)
    for batch in [batch for epoch in range(2) for batch in dataset.epoch(epoch)][:steps]:
        optimizer.zero_grad()
        loss_fn(model, {name: torch.as_tensor(each) for name, each in batch.items()}).backward()
        optimizer.step()
    return bits(module)


class TestFrozenParameters:
    @pytest.mark.parametrize("kind", KINDS)
    def test_bits_are_the_same_for_every_number_of_instances(self, kind, on_instances, everywhere):
        module = KINDS[kind]()
        found = everywhere(REPLICAS, lambda strategy: trained(strategy, copy.deepcopy(module)))
        found += on_instances(REPLICAS, REPLICAS, lambda strategy: looped(strategy, copy.deepcopy(module)))
        assert found == [found[0]] * 11

    @pytest.mark.parametrize("kind", KINDS)
    def test_one_replica_has_the_bits_of_plain_pytorch(self, kind):
        module = KINDS[kind]()
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        strategy = strategies.IPUStrategy(1)
        batches = strategies.torch.distribute_dataset(strategy, data(), batch_size=2).epoch(0)
        for _, batch in zip(range(3), batches, strict=False):
            optimizer.zero_grad()
            loss_fn(module, {name: torch.as_tensor(each) for name, each in batch.items()}).backward()
            optimizer.step()
        assert trained(strategy, KINDS[kind](), steps=3) == bits(module)

    def test_replicas_agree_on_the_mean_or_the_chosen_aggregation(self):
        batch = data(4)
        halves = [batch["x"][:2].mean(), batch["x"][2:].mean()]
        for word, expected in (("mean", sum(halves) / 2), ("first", halves[0])):
            module = Momentum(of_the_rows)
            before = module.key.bias.clone()
            options = {"model_state_aggregation": {"key.bias": word}}
            sgd_trainer(2, module, loss_fn, **options).step(batch)
            torch.testing.assert_close(module.key.bias.detach(), before * 0.9 + expected)

    def test_each_replica_keeps_its_own_value_with_per_replica(self, everywhere):
        options = {"model_state_aggregation": {"key.bias": "per_replica"}}

        first = Momentum(of_the_rows)

        def train(strategy):
            module = copy.deepcopy(first)
            trainer = sgd_trainer(strategy, module, loss_fn, **options)
            dataset = strategies.torch.distribute_dataset(strategy, data(), batch_size=2)
            for batch in dataset.epoch(0):
                trainer.step(batch)
            return np.array(trainer.state.model_state["key.bias of each replica"])

        found = everywhere(2, train)
        assert found[0].shape == (2, 6)
        assert (found[0][0] != found[0][1]).all()
        assert all(np.array_equal(found[0], each) for each in found)

    def test_per_replica_requires_the_name_of_the_parameter(self):
        with pytest.raises(StrategyError, match=r"key\.weight is a frozen parameter .* named: .*'key.weight': 'per_r"):
            trained(strategies.IPUStrategy(2), Momentum(of_the_rows), model_state_aggregation="per_replica")

    def test_unwritten_parameters_share_memory_after_the_first_step(self):
        module = Momentum(lambda key, query, rows: None)
        seen = []

        def loss(module, batch):
            seen.append(module.key.weight.data_ptr())
            return loss_fn(module, batch)

        trainer = sgd_trainer(2, module, loss)
        for _ in range(2):
            trainer.step(data(4))
        assert len(set(seen[:2])) == 2
        assert seen[2:] == [module.key.weight.data_ptr()] * 2

    @pytest.mark.parametrize("write", [in_place, through_data, by_new_data])
    def test_later_writes_are_refused_unless_an_aggregation_is_given(self, write):
        def later(key, query, rows):
            if steps:
                write(key, query, rows)

        steps = []
        for options in ({}, {"model_state_aggregation": {"key.weight": "mean", "key.bias": "mean"}}):
            steps.clear()
            module = Momentum(later)
            before = module.key.weight.clone()
            trainer = sgd_trainer(2, module, loss_fn, **options)
            batch = data(4)
            trainer.step(batch)
            steps.append(1)
            if options:
                trainer.step(batch)
                assert (module.key.weight != before).any()
                continue
            with pytest.raises(StrategyError, match=r"key\.weight.* is frozen, and was written .*'key.weight': 'mean'"):
                trainer.step(batch)

    def test_a_frozen_layer_thaws_between_steps(self, everywhere):
        first = Momentum(lambda key, query, rows: None)

        def train(strategy):
            module = copy.deepcopy(first)
            trainer = sgd_trainer(strategy, module, loss_fn)
            before = module.key.weight.clone()
            for batch in strategies.torch.distribute_dataset(strategy, data(), batch_size=2).epoch(0):
                trainer.step(batch)
                module.key.requires_grad_()
            return bits(module), bool((module.key.weight != before).all())

        found = everywhere(2, train)
        assert found == [(found[0][0], True)] * 3


class TestFrozenParametersInALoop:
    def test_parameters_keep_the_values_that_the_loop_writes(self, on_instances):
        """Three times a third of a number need not be that number."""
        first = Momentum(lambda key, query, rows: None)

        def loop(strategy):
            module = copy.deepcopy(first)
            model = strategies.torch.DistributedModel(module, strategy)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for batch in strategies.torch.distribute_dataset(strategy, data(), batch_size=2).epoch(0):
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()
                in_place(module.key.weight, module.query.weight, None)
                expected = module.key.weight.clone()
                loss_fn(model, batch).backward()
                assert torch.equal(module.key.weight, expected)
            return bits(module)

        found = on_instances(3, 3, loop)
        assert found == [found[0]] * 3

    def test_later_writes_agree_or_are_refused(self, on_instances):
        for write, options, is_refused in (
            (in_place, {}, False),
            (through_data, {}, True),
            (through_data, {"model_state_aggregation": {"key.weight": "mean", "key.bias": "mean"}}, False),
        ):
            first = Momentum(None)

            def loop(strategy, write=write, options=options, first=first, is_refused=is_refused):
                module, steps = copy.deepcopy(first), []
                module.write = lambda *given: write(*given) if steps else None
                model = strategies.torch.DistributedModel(module, strategy, verify_steps=0, **options)
                batch = data(2)
                loss_fn(model, batch).backward()
                steps.append(1)
                if is_refused:
                    with pytest.raises(StrategyError, match=r"key\.weight, key\.bias is frozen, and was written"):
                        loss_fn(model, batch).backward()
                    return None
                for index in range(2):
                    module.query.bias.data += strategy.instance_index + index
                    loss_fn(model, batch).backward()
                return bits(module.key)

            found = on_instances(2, 2, loop)
            assert found[0] == found[1]


class TestBuffersThatGrow:
    @pytest.mark.parametrize("kind", [Grows, quantisation_aware], ids=["own", "quantisation aware"])
    def test_bits_are_the_same_for_every_number_of_instances(self, kind, on_instances, everywhere):
        module = kind()
        found = everywhere(REPLICAS, lambda strategy: trained(strategy, copy.deepcopy(module)))
        found += on_instances(REPLICAS, REPLICAS, lambda strategy: looped(strategy, copy.deepcopy(module)))
        assert found == [found[0]] * 11

    def test_different_shapes_on_replicas_are_refused(self):
        module = Grows()
        module.by_rows = True
        trainer = sgd_trainer(2, module, loss_fn)
        batch = {name: each[:4].clone() for name, each in data().items()}
        batch["x"][2:] = 0
        with pytest.raises(StrategyError, match=r"^largest has the shapes \[1\], \[64\] on different repl"):
            trainer.step(batch)

    def test_a_buffer_registered_as_none_is_refused(self):
        module = Grows()
        module.largest = None
        with pytest.raises(StrategyError, match="has replaced, added or removed largest"):
            trained(strategies.IPUStrategy(2), module)


class TestTrainedParameters:
    @pytest.mark.parametrize(
        ("kind", "name"), [(MaxNorm, r"table\.weight"), (Clipped, r"last\.weight")], ids=["max_norm", "clipped"]
    )
    def test_writes_are_refused_by_name(self, kind, name):
        for replicas in (1, 2):
            with pytest.raises(StrategyError, match=rf"^{name} was written while a replica computed, .* is trained"):
                trained(strategies.IPUStrategy(replicas), kind())

    @pytest.mark.parametrize(
        ("kind", "name"), [(MaxNorm, r"table\.weight"), (Clipped, r"last\.weight")], ids=["max_norm", "clipped"]
    )
    def test_writes_are_refused_in_a_loop(self, kind, name, on_instances):
        module = kind()

        def loop(strategy):
            with pytest.raises(StrategyError, match=rf"^{name} was written while a replica computed, .* is trained"):
                looped(strategy, copy.deepcopy(module))

        on_instances(2, 2, loop)

    def test_writes_between_steps_are_allowed(self):
        module = MaxNorm()
        module.table.max_norm = None
        trainer = sgd_trainer(2, module, loss_fn)
        for _ in range(3):
            with torch.no_grad():
                torch.embedding_renorm_(module.table.weight, torch.arange(40), 1.0, 2.0)
            trainer.step(data(4))
        assert module.table.weight.norm(dim=1).max() < 1.1

    def test_writes_are_refused_in_evaluations(self):
        module = Clipped()
        trainer = sgd_trainer(2, module, loss_fn)
        module.last.weight.data.mul_(9)
        with pytest.raises(StrategyError, match=r"^last\.weight was written while a replica computed"):
            trainer.evaluate([data(4)])


def test_a_digest_on_a_device_sees_every_bit_and_every_place():
    one = torch.linspace(-1, 1, 7)
    other_place, other_bit = one.flip(0), one.clone()
    other_bit[6] = torch.nextafter(one[6], torch.tensor(2.0))
    known, again, *others = device_digests([one, one.clone(), other_place, other_bit])
    assert known == again
    assert known not in others
