"""Layers, buffers and groups in another order on each instance, as a set of names gives them."""

import numpy as np
import pytest
import torch

import strategies
import strategies.torch
from strategies import DisagreementError
from strategies.torch.agreement import lines_of_module, order_of, put_in_order

NAMES = ("query", "key", "value", "gate")
ROWS = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


def layer(name):
    made = torch.nn.Linear(4, 4)
    torch.nn.init.eye_(made.weight)
    torch.nn.init.constant_(made.bias, NAMES.index(name) / 10)
    return made


class Layers(torch.nn.Module):
    """Layers of equal shapes, whose forward pass goes through them in their own order."""

    def __init__(self, names):
        super().__init__()
        self.layers = torch.nn.ModuleDict({name: layer(name) for name in names})
        self.factors = torch.nn.ParameterDict({name: torch.ones(4) for name in names})
        for name in names:
            self.register_buffer(name, torch.full((4,), 1.0 + NAMES.index(name) / 10))

    def forward(self, x):
        for name, layer in self.layers.items():
            x = torch.tanh(layer(x) * getattr(self, name) + 0.1)
        for factor in self.factors.values():
            x = (x * factor).cos()
        return x.sum(1)


def loss_of(module, rows):
    return module(rows).square().mean()


def loop(strategy, module, optimizer, rows):
    model = strategies.torch.DistributedModel(module, strategy)
    for _ in range(3):
        optimizer.zero_grad()
        model.backward(lambda own: loss_of(model, own), rows)
        optimizer.step()


def trainer(strategy, module, optimizer, rows, **options):
    trained = strategies.torch.Trainer(strategy, module, loss_of, optimizer, **options)
    try:
        for _ in range(3):
            trained.step(rows)
    finally:
        trained.close()


def sharded(strategy, *arguments):
    trainer(strategy, *arguments, replicated_optimizer_state_sharding=True, min_elements_for_sharding=1)


def trained(strategy, train, orders, by_name=True):
    module = Layers(orders[strategy.instance_index])
    named = sorted(module.named_parameters()) if by_name else module.named_parameters()
    count = len(ROWS) // strategy.num_instances
    rows = ROWS[strategy.instance_index * count :][:count]
    train(strategy, module, torch.optim.Adam([one for _, one in named], 0.05), rows)
    return list(module.layers), {name: one.numpy().tobytes() for name, one in sorted(module.state_dict().items())}


@pytest.mark.parametrize("train", [loop, trainer, sharded])
def test_the_order_of_the_first_instance_holds_on_all_if_names_are_equal(on_instances, train):
    orders = [NAMES, NAMES[::-1]]
    alone = on_instances(1, 2, lambda strategy: trained(strategy, train, orders))
    assert on_instances(2, 2, lambda strategy: trained(strategy, train, orders)) == alone * 2


@pytest.mark.parametrize("train", [trainer, sharded])
def test_optimizers_that_number_their_state_in_another_order_are_refused_by_name(on_instances, train):
    message = (
        "instance 1 has the parameters of optimizer group 0 in another order than instance 0: number 1 is "
        "'layers.gate.weight', and there it is 'layers.query.weight'; make them in one order"
    )
    with pytest.raises(DisagreementError, match=message):
        on_instances(2, 2, lambda strategy: trained(strategy, train, [NAMES, NAMES[::-1]], by_name=False))


def test_layers_added_later_in_another_order_train_alike(on_instances):
    def run(strategy):
        module = torch.nn.ModuleDict({"first": layer("key")})
        model = strategies.torch.DistributedModel(module, strategy)
        order = NAMES[:: 1 - 2 * strategy.instance_index]
        for name in order:
            module[name] = layer(name)

        def loss_fn(rows):
            for layer in module.values():
                rows = torch.tanh(layer(rows))
            return rows.sum()

        module.forward = loss_fn
        for _ in range(2):
            model.backward(model, ROWS[:2])
            with torch.no_grad():
                for one in module.parameters():
                    one -= 0.1 * one.grad
                    one.grad = None
        return {name: one.detach().numpy().copy() for name, one in sorted(module.named_parameters())}

    zero, one = on_instances(2, 2, run)
    assert all(np.array_equal(zero[name], one[name]) for name in zero)


def test_a_module_with_other_names_keeps_its_order():
    module, other = Layers(NAMES), Layers(NAMES[1:])
    before = lines_of_module(module)
    put_in_order(module, order_of(other))
    assert lines_of_module(module) == before
