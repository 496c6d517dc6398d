"""Changes between the steps of a Trainer: all instances make the same change, or all of them raise."""

from __future__ import annotations

import copy

import pytest
import torch
from torch_modules import data, new_module

import strategies
import strategies.torch
from collectives import LayoutMismatchError
from strategies import DisagreementError
from strategies.torch.agreement import StepSettings, settings_differ

CHANGES = {
    "a learning rate": (
        lambda module, optimizer: optimizer.param_groups[0].update(lr=0.5),
        "instance 1 has lr of optimizer group 0 = 0.1, instance 0 lr of optimizer group 0 = 0.5",
    ),
    "a group": (
        lambda module, optimizer: optimizer.add_param_group({"params": module[4].parameters()}),
        "instance 1 has no lr of optimizer group 1",
    ),
}


def trained(strategy, module, change, where):
    own = copy.deepcopy(module)
    optimizer = torch.optim.SGD(own[1].parameters(), 0.1)
    loss = lambda module, x: module(x).square().mean()  # noqa: E731
    trainer = strategies.torch.Trainer(strategy, own, loss, optimizer)
    local = 2 * len(strategy.local_replicas)
    for step in range(4):
        if step == 1 and strategy.instance_index in where:
            change(own, optimizer)
        trainer.step(data()["x"][:local])
    trainer.close()
    return strategies.fingerprint([one.detach().numpy() for one in own.parameters()])


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_on_one_instance_alone_is_an_error_by_name(what, on_instances):
    module, (change, message) = new_module("mlp"), CHANGES[what]
    with pytest.raises(DisagreementError, match=message):
        on_instances(2, 2, lambda strategy: trained(strategy, module, change, [0]))
    zero, one = on_instances(2, 2, lambda strategy: trained(strategy, module, change, [0, 1]))
    assert zero == one


@pytest.mark.parametrize(("is_trained", "message"), [(False, "frozen: 4.weight, "), (True, "trained anew: 4.weight")])
def test_parameters_that_one_instance_freezes_or_thaws_alone_are_named(is_trained, message, on_instances):
    module = new_module("mlp")
    module[4].requires_grad_(not is_trained)
    with pytest.raises(LayoutMismatchError, match=message):
        on_instances(
            2, 2, lambda strategy: trained(strategy, module, lambda one, _: one[4].requires_grad_(is_trained), [0])
        )


def test_the_digest_depends_on_every_setting():
    module = new_module("mlp")

    def words(change):
        own = copy.deepcopy(module)
        optimizer = torch.optim.Adam(own.parameters(), 0.1)
        change(own, optimizer)
        settings, parameters = StepSettings(optimizer), list(own.parameters())
        return [settings.settings_hash(step, parameters) for step in range(8)]

    changes = [
        lambda own, optimizer: None,
        lambda own, optimizer: own[1].weight.requires_grad_(False),
        lambda own, optimizer: optimizer.param_groups[0].update(betas=(0.9, 0.9)),
        lambda own, optimizer: optimizer.param_groups[0].update(lr=torch.tensor(0.5)),
        lambda own, optimizer: optimizer.param_groups[0]["params"].reverse(),
        lambda own, optimizer: optimizer.add_param_group({"params": optimizer.param_groups[0]["params"].pop()}),
    ]
    found = [words(change) for change in changes]
    assert all(0 <= word < 64 for one in found for word in one)
    assert len({tuple(one) for one in found}) == len(changes)
    assert words(changes[0]) == found[0]


@pytest.mark.parametrize("replicas", [1, 3, 7, 255, 1024])
def test_digests_of_replicas_differ_if_one_replica_differs(replicas):
    settings = StepSettings(torch.optim.SGD([torch.zeros(1)], 0.1))
    words = [float(settings.settings_hash(step, [])) for step in range(9)]
    for word in words:
        mean = torch.tensor([[word, word * word]] * replicas).sum(0) / replicas
        assert not settings_differ(*mean.tolist())
        other = torch.tensor([[word, word * word]] * replicas + [[word + 1, (word + 1) ** 2]]).mean(0)
        assert settings_differ(*other.tolist())


@pytest.mark.parametrize("instances", [1, 2])
def test_a_rate_that_replicas_change_is_refused(instances, on_instances):
    """The rate would fall as often in a step as an instance has replicas."""
    module = new_module("mlp")

    def train(strategy):
        own = copy.deepcopy(module)
        optimizer = torch.optim.SGD(own.parameters(), 0.1)

        def loss(module, x):
            optimizer.param_groups[0]["lr"] *= 0.9
            return module(x).square().mean()

        trainer = strategies.torch.Trainer(strategy, own, loss, optimizer)
        for _ in range(4):
            trainer.step(data()["x"][: 2 * len(strategy.local_replicas)])

    with pytest.raises(strategies.StrategyError, match="a replica has changed the optimizer's settings"):
        on_instances(instances, 2, train)
