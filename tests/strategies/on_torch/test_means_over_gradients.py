"""Means of large gradients, which are written over the gradients of the first local replica."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn
from torch_modules import data, distributed, sgd_trainer

import strategies
import strategies.torch
from strategies import NonFiniteGradientError

REPLICAS = 2
LIMIT_S = 60
SMALL = 600 * 5 * 4  # the most bytes of a gradient that is packed with others


def new_module():
    """Make a module with a gradient of more than 1 MiB, and smaller ones."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 600), nn.ReLU(), nn.Linear(600, 600), nn.Linear(600, 5))


MODULE = new_module()  # instances on threads must not seed the generator of the process at the same time


def square(module, batch):
    return module(batch).square().mean()


def rows(strategy, step=0):
    """Return the rows of this instance's one replica."""
    first = 2 * (REPLICAS * step + strategy.instance_index)
    return data()["x"][first : first + 2]


def bits(tensors):
    return strategies.fingerprint([one.detach().numpy() for one in tensors])


def addresses_in(parameter):
    """Return a list of the addresses of the gradients that autograd completes."""
    found = []
    parameter.register_post_accumulate_grad_hook(lambda one: found.append(one.grad.data_ptr()))
    return found


def bytes_of_means(exchange):
    return max(array.nbytes for bucket in exchange.buckets for array in bucket.results)


def by_trainer(steps=3):
    module = copy.deepcopy(MODULE)
    trainer = sgd_trainer(REPLICAS, module, square)
    for step in range(steps):
        trainer.step(data()["x"][4 * step : 4 * step + 4])
    return bits(module.parameters())


@pytest.mark.parametrize("instances", [1, 2])
def test_a_trainer_shows_the_mean_in_the_memory_of_the_first_local_gradient(instances, on_instances):
    def train(strategy):
        module = copy.deepcopy(MODULE)
        completed = addresses_in(module[3].weight)
        trainer = sgd_trainer(strategy, module, square)
        trainer.step(data()["x"][: 2 * len(strategy.local_replicas)])
        assert module[3].weight.grad.data_ptr() in completed
        assert bytes_of_means(trainer._engine._local.exchange) <= SMALL + (64 + 2) * 600 * 4 + 1000
        return True

    assert all(on_instances(instances, REPLICAS, train, mechanism="window"))


def test_a_program_may_write_gradients_while_another_instance_updates(on_instances):
    """Instance 1 waits in its optimizer until instance 0 has cleared the gradients of its own step."""
    cleared = threading.Event()

    def await_other(*_):
        assert cleared.wait(LIMIT_S)

    def train(strategy):
        module = copy.deepcopy(MODULE)
        trainer = sgd_trainer(strategy, module, square)
        if strategy.instance_index == 1:
            trainer.optimizer.register_step_pre_hook(await_other)
        trainer.step(rows(strategy))
        if strategy.instance_index == 0:
            module.zero_grad(set_to_none=False)
            cleared.set()
        return bits(module.parameters())

    assert on_instances(REPLICAS, REPLICAS, train, mechanism="window") == [by_trainer(1)] * REPLICAS


@pytest.mark.parametrize("options", [{}, {"stream_gradients": True}])
def test_a_loop_keeps_the_gradients_of_autograd(options, on_instances):
    def train(strategy):
        own, model = distributed(strategy, MODULE, **options)
        completed = addresses_in(own[3].weight)
        optimizer = torch.optim.SGD(own.parameters(), 0.1)
        kept = []
        for step in range(3):
            optimizer.zero_grad()
            square(model, rows(strategy, step)).backward()
            assert own[3].weight.grad.data_ptr() == completed[-1]
            kept.append((own[3].weight.grad, own[3].weight.grad.clone()))
            optimizer.step()
        assert all(torch.equal(*pair) for pair in kept), "later steps have written to gradients that the program kept"
        return bits(own.parameters())

    assert on_instances(REPLICAS, REPLICAS, train) == [by_trainer()] * REPLICAS


def test_autograd_notices_that_a_mean_was_written(on_instances):
    def train(strategy):
        own, model = distributed(strategy, MODULE)
        written = []
        own[3].weight.register_post_accumulate_grad_hook(lambda one: written.append(one.grad._version))
        square(model, rows(strategy)).backward()
        return own[3].weight.grad._version > written[0]

    assert all(on_instances(REPLICAS, REPLICAS, train))


def test_gradients_are_exchanged_again_if_one_instance_makes_a_new_plan(on_instances):
    """Instance 0 replaces a layer by an equal one."""

    def train(strategy):
        own, model = distributed(strategy, MODULE)
        optimizer = torch.optim.SGD(own.parameters(), 0.1)
        for step in range(3):
            if step == 1 and strategy.instance_index == 0:
                own[2] = nn.ReLU()
            optimizer.zero_grad()
            square(model, rows(strategy, step)).backward()
            optimizer.step()
        return bits(own.parameters())

    assert on_instances(REPLICAS, REPLICAS, train) == [by_trainer()] * REPLICAS


def test_a_large_gradient_that_is_not_finite_is_blamed_on_its_replica():
    def loss(module, batch):
        factor = torch.nan if torch.equal(batch, data()["x"][2:4]) else 0
        return square(module, batch) + factor * module[3].weight.sum()

    trainer = sgd_trainer(4, copy.deepcopy(MODULE), loss, check_numerics=True)
    with pytest.raises(NonFiniteGradientError, match=r"3\.weight is not finite at step 0 on the replicas \[1\]"):
        trainer.step(data()["x"][:8])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stream_gradients": True},
        {"gradient_transfer_dtype": "bfloat16"},
    ],
)
def test_bits_do_not_depend_on_the_instances(options, everywhere):
    def train(strategy):
        own = copy.deepcopy(MODULE)
        trainer = sgd_trainer(strategy, own, square, momentum=0.9, **options)
        local = strategy.local_replicas
        for step in range(3):
            first = 8 * step
            trainer.step(data()["x"][first + 2 * local.start : first + 2 * local.stop])
        return bits([*own.parameters(), *(one.grad for one in own.parameters())])

    assert len(set(everywhere(4, train))) == 1


# ---- gradients in one memory


class OfTwo(nn.Module):
    """A module with two parameters to whose gradients autograd gives one memory."""

    def __init__(self, rows, is_apart=False):
        super().__init__()
        self.one, self.other = nn.Parameter(torch.zeros(rows, 4)), nn.Parameter(torch.ones(rows, 4))
        self.is_apart = is_apart

    def forward(self, x):
        weight = (self.one + self.other)[None] if self.is_apart else self.one[None] + self.other[None]
        return x @ weight[0].t()


@pytest.mark.parametrize(("rows", "streams"), [(70_000, False), (300_000, True)])
def test_gradients_in_one_memory_have_their_own_means(rows, streams):
    """Large ones lie alone in a bucket, and leave while the backward pass runs if they stream."""

    def trained(is_apart):
        module = OfTwo(rows, is_apart)
        trainer = sgd_trainer(2 * REPLICAS, module, square, stream_gradients=streams)
        for step in range(2):
            trainer.step(data()["x"][8 * step : 8 * step + 8].flatten(1)[:, :4])
        trainer.close()
        return bits(module.parameters())

    assert trained(is_apart=False) == trained(is_apart=True)
