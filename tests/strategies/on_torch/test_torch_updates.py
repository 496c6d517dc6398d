"""Optimizer steps, sharded or not: they follow changes of the program and skip parameters without a gradient."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.optim.optimizer as of_torch
from torch import nn
from torch_modules import data, sgd_trainer

import strategies
import strategies.torch
from strategies import StrategyError
from strategies.torch.updates import TorchUpdate

WAYS = [{}, {"replicated_optimizer_state_sharding": True}]
CHANGES = ["unused", "frozen", "thawed", "replaced"]


class Branches(nn.Module):
    """Three layers, small and of more than 1 MiB, of which the loss takes the named ones."""

    def __init__(self, width=7):
        super().__init__()
        self.used = "first second third"
        self.first, self.second, self.third = nn.Linear(64, width), nn.Linear(64, 4099), nn.Linear(64, width)
        self.third.requires_grad_(False)

    def forward(self, x):
        return sum(getattr(self, name)(x.flatten(1)).square().mean() for name in self.used.split())


def new_branches():
    torch.manual_seed(0)
    return Branches()


def loss_fn(module, batch):
    return module(batch["x"])


def change(module, what):
    if what == "unused":
        module.used = "first third"
    elif what == "frozen":
        module.second.requires_grad_(False)
    elif what == "thawed":
        module.third.requires_grad_(True)
    else:
        module.second.weight.data = module.second.weight.detach() * 2


def trained(strategy, module, what, **options):
    """Return the names of moving parameters, and all bits, after two steps, a change, and two more steps."""
    module = copy.deepcopy(module)
    trainer = sgd_trainer(strategy, module, loss_fn, lr=0.05, **options)
    local = 2 * len(strategy.local_replicas)
    first = strategy.instance_index * local
    batch = {"x": data()["x"][first : first + local]}
    for number in range(4):
        if number == 2:
            change(module, what)
            before = copy.deepcopy(module.state_dict())
        trainer.step(batch)
    moved = [name for name, value in module.state_dict().items() if not torch.equal(value, before[name])]
    return moved, strategies.fingerprint([one.detach().numpy() for one in module.parameters()])


@pytest.mark.parametrize("what", CHANGES)
def test_changes_between_steps_are_followed_in_every_mode(what, on_instances):
    module, original = new_branches(), new_branches()
    optimizer = torch.optim.SGD(module.parameters(), 0.05)
    for number in range(4):
        if number == 2:
            change(module, what)
            before = copy.deepcopy(module.state_dict())
        optimizer.zero_grad()
        (module(data()["x"][:2]) / 2 + module(data()["x"][2:4]) / 2).backward()
        optimizer.step()
    plain = [name for name, value in module.state_dict().items() if not torch.equal(value, before[name])]
    found = [
        one
        for options in WAYS
        for count in (1, 2)
        for one in on_instances(
            count, 2, lambda strategy, options=options: trained(strategy, original, what, **options)
        )
    ]
    assert {tuple(moved) for moved, _ in found} == {tuple(plain)}
    assert len({bits for _, bits in found}) == 1


def test_an_added_group_is_trained_or_refused_if_the_state_is_sharded():
    def add(**options):
        module = new_branches()
        optimizer = torch.optim.SGD(module.first.parameters(), 0.05)
        trainer = strategies.torch.Trainer(strategies.IPUStrategy(2), module, loss_fn, optimizer, **options)
        trainer.step({"x": data()["x"][:4]})
        before = module.second.weight.detach().clone()
        optimizer.add_param_group({"params": module.second.parameters()})
        try:
            trainer.step({"x": data()["x"][:4]})
        finally:
            trainer.close()
        return torch.equal(before, module.second.weight)

    assert not add()
    with pytest.raises(StrategyError, match=r"groups have other parameters .*; make another optimizer and Trainer"):
        add(replicated_optimizer_state_sharding=True)


def clipping(optimizer, arguments, named):
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize(
    "register",
    [
        lambda optimizer: optimizer.register_step_pre_hook(clipping),
        lambda optimizer: optimizer.register_step_post_hook(clipping),
        lambda optimizer: of_torch.register_optimizer_step_pre_hook(clipping),
        lambda optimizer: of_torch.register_optimizer_step_post_hook(clipping),
    ],
)
def test_step_hooks_are_refused_if_the_state_is_sharded(register, is_early):
    """They would clip by the norm of an instance's parts. Hooks of PyTorch's profiler and of this project stay."""
    assert torch.profiler  # its import registers a hook
    module = new_branches()
    optimizer, handles = torch.optim.SGD(module.parameters(), 0.05), []

    def train():
        if is_early:
            handles.append(register(optimizer))
        trainer = strategies.torch.Trainer(
            strategies.IPUStrategy(2), module, loss_fn, optimizer, replicated_optimizer_state_sharding=True
        )
        with contextlib.closing(trainer):
            trainer.step({"x": data()["x"][:4]})
            handles.append(register(optimizer))
            trainer.step({"x": data()["x"][:4]})

    try:
        with pytest.raises(StrategyError, match="the step hook clipping .* would see parts .*; remove the hook"):
            train()
    finally:
        [one.remove() for one in handles]
    assert len(handles) == 1  # at the Trainer, or at the first step with the hook


def test_a_whole_update_takes_no_gradient_of_the_step_before():
    module = nn.Linear(2, 1)
    update = TorchUpdate(strategies.IPUStrategy(1).replicas, torch.optim.SGD(module.parameters(), 1.0))
    update.apply([(one, torch.ones_like(one)) for one in module.parameters()])
    before = module.weight.detach().clone()
    update.apply([(module.weight, None), (module.bias, torch.ones(1))])
    assert torch.equal(module.weight, before)


def test_gradients_that_before_update_replaces_are_applied():
    """Replacements include None and a gradient for an unused layer; a layer frozen there keeps its values."""

    def replace(module):
        for parameter in module.first.parameters():
            parameter.grad = torch.ones_like(parameter)
        module.second.bias.grad = None
        module.third.weight.grad = torch.ones_like(module.third.weight)

    module = new_branches()
    module.used = "first second"
    module.third.requires_grad_(True)
    before = copy.deepcopy(module.state_dict())
    trainer = sgd_trainer(2, module, loss_fn, lr=1.0, before_update=replace)
    trainer.step({"x": data()["x"][:4]})
    assert torch.equal(module.first.weight, before["first.weight"] - 1)
    assert torch.equal(module.second.bias, before["second.bias"])
    assert not torch.equal(module.second.weight, before["second.weight"])
    assert torch.equal(module.third.weight, before["third.weight"] - 1)


def test_a_loss_scale_is_removed_in_32_bits_if_gradients_travel_in_16():
    """Float16 would round the gradients of 3e-7 by a tenth."""
    module = nn.Linear(1, 1, bias=False)
    strategy, optimizer = strategies.IPUStrategy(2), torch.optim.SGD(module.parameters(), 1.0)
    options = {"loss_scaling": 2.0**15, "gradient_transfer_dtype": "float16"}
    trainer = strategies.torch.Trainer(strategy, module, lambda one, x: one(x).sum(), optimizer, **options)
    trainer.step(torch.full((2, 1), 3e-7))
    trainer.close()
    assert module.weight.grad.item() == torch.tensor(3e-7 * 2**15).half().item() / 2**15


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_loss_can_have_axes_of_one_element(shape):
    module = nn.Linear(2, 1)
    strategy, optimizer = strategies.IPUStrategy(2), torch.optim.SGD(module.parameters(), 1.0)
    trainer = strategies.torch.Trainer(strategy, module, lambda one, x: one(x).sum().reshape(shape), optimizer)
    trainer.step(torch.ones(4, 2))
    trainer.close()
    assert torch.equal(module.weight.grad, torch.full((1, 2), 2.0))


@pytest.mark.parametrize("replicas", [1, 2])
def test_sharded_state_of_complex_parameters_is_refused(replicas):
    module = torch.nn.Module()
    module.spectrum = torch.nn.Parameter(torch.ones(4, dtype=torch.complex64))
    with pytest.raises(StrategyError, match=r"shape \[4\] is complex .* cannot be sharded"):
        strategies.torch.Trainer(
            strategies.IPUStrategy(replicas),
            module,
            loss_fn,
            torch.optim.SGD(module.parameters(), 0.1),
            replicated_optimizer_state_sharding=True,
            min_elements_for_sharding=8,
        )
