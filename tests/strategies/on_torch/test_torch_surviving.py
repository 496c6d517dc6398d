"""Loss of instances during the training of a module with buffers and random numbers, and in a loop of the program.

Tests for all engines are in `../engines/test_losing_an_instance.py`.
"""

from __future__ import annotations

import copy
import functools
import itertools
from contextlib import nullcontext, suppress

import jax
import numpy as np
import pytest
import torch
from losing_at_events import BEFORE, Events, run_losing
from surviving_instances import run_instances
from torch import nn
from torch_modules import data, distributed, loss_fn, new_module

import strategies
import strategies.torch
from collectives import PeerLostError
from strategies import NonFiniteGradientError, StrategyError

REPLICAS = 6
STEPS = 4


def train(strategy, module):
    module = copy.deepcopy(module)
    optimizer = torch.optim.Adam(module.parameters(), 0.01)
    trainer = strategies.torch.Trainer(strategy, module, loss_fn, optimizer)
    dataset = strategies.torch.distribute_dataset(strategy, data(), batch_size=2)
    losses = [float(trainer.step(batch)["loss"]) for epoch in range(9) for batch in take(dataset, epoch, trainer)]
    state = trainer.state
    trainer.close()
    found = strategies.fingerprint([state.variables, state.model_state, state.optimizer_state["state"]])
    shapes = jax.tree.map(np.shape, state.optimizer_state["state"])
    return losses, (found, shapes), len(strategy.local_replicas)


def take(dataset, epoch, trainer):
    for batch in dataset.epoch(epoch):
        if trainer.steps_made == STEPS:
            return
        yield batch


@pytest.fixture(scope="module")
def alone(module):
    """Return the result of one instance without a loss."""
    return train(strategies.IPUStrategy(REPLICAS), module)


def check(found, alone, lost):
    assert [number for number, each in enumerate(found) if each is None] == sorted(lost)
    left = [each for each in found if each is not None]
    assert sum(each[2] for each in left) == REPLICAS
    assert [each[:2] for each in left] == [alone[:2]] * len(left)


def test_training_survives_the_loss_of_several_instances(module, alone):
    faults = ["kill:instance=0,step=1,phase=all_reduce", "kill:instance=2,step=3,phase=forward"]
    check(run_instances(3, REPLICAS, functools.partial(train, module=module), faults), alone, [0, 2])


def looped(strategy, module):
    """Return the losses and the fingerprint of a loop of the program, which clips gradients and decays the rate."""
    module = copy.deepcopy(module)
    model = strategies.torch.DistributedModel(module, strategy)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    dataset = strategies.torch.distribute_dataset(strategy, data(), batch_size=2)
    losses = []
    for batch in itertools.islice(dataset.epoch(0), STEPS):
        optimizer.zero_grad()
        losses.append(float(model.backward(lambda rows: loss_fn(model, rows)[0], batch)))
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
    return losses, strategies.fingerprint([one.detach().numpy() for one in module.state_dict().values()])


def check_every_event(program, count, lost, step, mechanism):
    """Check that the others go on with the same results, whenever in a step the instance is lost."""
    expected = program(strategies.IPUStrategy(REPLICAS))
    counted = Events(lost, step)
    assert run_losing(count, REPLICAS, program, mechanism, counted) == [expected] * count
    assert counted.seen
    for number in range(len(counted.seen)):
        found = run_losing(count, REPLICAS, program, mechanism, Events(lost, step, number))
        assert found == [None if rank == lost else expected for rank in range(count)], counted.seen[number]


@pytest.mark.parametrize(
    ("count", "lost", "step", "mechanism"),
    [
        (3, 1, 1, "window"),
        *[
            pytest.param(*case, marks=pytest.mark.complete)
            for case in ((2, 0, BEFORE, "ring"), (2, 1, 0, "window"), (3, 0, 2, "ring"), (6, 5, 1, "ring"))
        ],
    ],
)
def test_a_loop_survives_a_loss_at_every_event_of_a_step(module, count, lost, step, mechanism):
    check_every_event(functools.partial(looped, module=module), count, lost, step, mechanism)


@pytest.mark.complete
@pytest.mark.parametrize(("lost", "mechanism"), [(1, "ring"), (0, "ring"), (2, "window")])
def test_a_loop_survives_a_loss_in_a_step_in_which_its_layers_change(lost, mechanism):
    module = new_module("convolutions")
    module.first.requires_grad_(False)
    head = nn.Sequential(nn.Linear(36, 5), nn.BatchNorm1d(5))

    def program(strategy):
        own, model = distributed(strategy, module)
        dataset = strategies.torch.distribute_dataset(strategy, data(), batch_size=2)
        for step, batch in enumerate(itertools.islice(dataset.epoch(0), STEPS)):
            if step == 1:
                own.first.requires_grad_(True)
                own.last = copy.deepcopy(head)
            own.zero_grad()
            model.backward(lambda rows: loss_fn(model, rows)[0], batch)
            with torch.no_grad():
                for one in own.parameters():
                    one -= one.grad * 0.1 if one.requires_grad else 0
        return strategies.fingerprint([one.detach().numpy() for one in own.state_dict().values()])

    check_every_event(program, 3, lost, 1, mechanism)


def late_and_newest(program):
    """Return the events in the recovery of instance 0, the message at which instance 2 was lost, and the result.

    Instance 1 is late by a step: instance 0 has completed it, and hands over the means.
    """
    first = Events(2, 1)
    run_losing(3, REPLICAS, program, "ring", first)
    number = max(number for number, name in enumerate(first.seen) if "message" in name)
    both = [Events(instance, 1, in_recovery=True) for instance in (0, 1)]
    found = run_losing(3, REPLICAS, program, "ring", Events(2, 1, number), *both)
    expected = program(strategies.IPUStrategy(REPLICAS))
    assert found == [expected, expected, None]
    assert any("which means there are" in name for name in both[0].seen), "nobody has been late"
    return both[0].seen, number, expected


def test_a_late_instance_gets_the_means_as_they_were(module):
    """The program has clipped them since, where they were completed."""
    late_and_newest(functools.partial(looped, module=module))


def test_a_late_instance_keeps_the_gradients_of_layers_that_no_replica_has_used():
    """With `set_to_none=False` they are zeros, with which Adam changes the layer."""

    class Heads(nn.ModuleList):
        def forward(self, x, number):
            return self[number](x.flatten(1))

    module = Heads([nn.Linear(64, 5), nn.Linear(64, 5)])

    def program(strategy):
        own, model = distributed(strategy, module)
        optimizer = torch.optim.Adam(own.parameters(), 0.01)
        dataset = strategies.torch.distribute_dataset(strategy, data(), batch_size=2)
        for step, batch in enumerate(itertools.islice(dataset.epoch(0), STEPS)):
            optimizer.zero_grad(set_to_none=False)
            model.backward(lambda rows, number=step % 2: model(rows["x"], number).square().mean(), batch)
            optimizer.step()
        return strategies.fingerprint([one.detach().numpy() for one in own.parameters()])

    late_and_newest(program)


@pytest.mark.complete
def test_a_loop_survives_a_second_loss_during_the_recovery(module):
    program = functools.partial(looped, module=module)
    seen, number, expected = late_and_newest(program)
    for later in range(len(seen)):
        second = Events(0, 1, later, in_recovery=True)
        found = run_losing(3, REPLICAS, program, "ring", Events(2, 1, number), second)
        assert found == [None, expected, None], seen[later]


def test_a_loop_with_sync_batch_norm_ends_with_a_lost_instance_at_once(module):
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(module))
    with pytest.raises(StrategyError, match=r"SyncBatchNorm 'norm' needs all replicas at the same time"):
        run_instances(2, 2, functools.partial(looped, module=synchronised), ["kill:instance=1,step=1,phase=all_reduce"])


def test_a_loop_reports_that_it_ends_with_a_lost_instance(module, caplog):
    steps = []

    def train(strategy):
        model = distributed(strategy, module)[1]
        for step in range(STEPS):
            for synchronises in (False, True):
                with nullcontext() if synchronises else model.no_sync():
                    model(data()["x"]).mean().backward()
            steps.append(step)

    with pytest.raises(PeerLostError):
        run_instances(2, 2, train, ["kill:instance=1,step=2,phase=all_reduce"])
    assert sorted(steps) == [0, 0, 1, 1], "a step has all micro-batches until instances wait for each other"
    assert "can make that of a lost one (model.backward(loss_fn, batch) can): if an instance is lost" in caplog.text


class Warming(nn.Module):
    """A module that counts its calls in an attribute, as for a warm-up."""

    def __init__(self):
        super().__init__()
        self.last, self.calls = nn.Linear(4, 3), 0

    def forward(self, x):
        self.calls += 1
        return self.last(x) * min(1.0, self.calls / 8)


@pytest.mark.parametrize("phase", ["forward", "all_reduce"])
def test_an_attribute_counts_an_interrupted_step_once(phase):
    first = Warming()

    def counted(strategy):
        module = copy.deepcopy(first)
        optimizer = torch.optim.SGD(module.parameters(), 0.5)
        trainer = strategies.torch.Trainer(
            strategy, module, lambda module, batch: module(batch).square().mean(), optimizer
        )
        rows = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
        for batch in strategies.torch.distribute_dataset(strategy, rows, batch_size=2).epoch(0):
            trainer.step(batch)
        calls = module.calls
        trainer.close()
        return calls, strategies.fingerprint([one.detach().numpy() for one in module.parameters()])

    alone = counted(strategies.IPUStrategy(4))
    assert run_instances(2, 4, counted, [f"kill:instance=1,step=2,phase={phase}"]) == [alone, None]


@pytest.mark.parametrize("survives", [True, False])
def test_an_attribute_does_not_count_a_step_that_was_refused(survives):
    first = Warming()

    def counted(strategy):
        module = copy.deepcopy(first)
        optimizer = torch.optim.SGD(module.parameters(), 0.5)
        trainer = strategies.torch.Trainer(
            strategy, module, lambda module, batch: module(batch).square().mean(), optimizer, check_numerics=True
        )
        rows = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
        rows[10] = np.nan
        for batch in strategies.torch.distribute_dataset(strategy, rows, batch_size=2, shuffle=False).epoch(0):
            with suppress(NonFiniteGradientError):
                trainer.step(batch)
        return module.calls, strategies.fingerprint([one.detach().numpy() for one in module.parameters()])

    found = run_instances(2, 4, counted, survives=survives)
    assert found == [counted(strategies.IPUStrategy(4))] * 2
    assert found[0][0] == 3


class Frozen(nn.Module):
    """A module that multiplies a frozen parameter by a number that the program sets."""

    def __init__(self):
        super().__init__()
        self.last, self.frozen = nn.Linear(4, 3), nn.Parameter(torch.ones(()), requires_grad=False)
        self.by = 1.0

    def forward(self, x):
        if self.by is not None or x[0, 0] == MARKED:
            self.frozen.mul_(self.by or 0.5)
        return self.last(x) * self.frozen


MARKED = 9.0


def trained_with_factors(strategy, first, factors):
    """Train a copy of a module with a factor for each step, and return the bits.

    With None only the last replica of the last step writes.
    """
    module = copy.deepcopy(first)
    optimizer = torch.optim.SGD(module.parameters(), 0.5)
    trainer = strategies.torch.Trainer(strategy, module, lambda module, batch: module(batch).square().mean(), optimizer)
    rows = np.random.default_rng(0).normal(size=(8 * len(factors), 4)).astype(np.float32)
    rows[-2:, 0] = MARKED
    dataset = strategies.torch.distribute_dataset(strategy, rows, batch_size=2, shuffle=False)
    for factor, batch in zip(factors, dataset.epoch(0), strict=True):
        module.by = factor
        trainer.step(batch)
    trainer.close()
    return strategies.fingerprint([one.detach().numpy() for one in module.parameters()])


def test_a_late_write_of_one_replica_to_a_frozen_parameter_ends_all_instances():
    """The others take the error of its instance for a loss, and then compute for the replica."""
    first, refused = Frozen(), []

    def train(strategy):
        try:
            return trained_with_factors(strategy, first, [None] * 3)
        except StrategyError:
            refused.append(strategy)
            raise

    with pytest.raises(StrategyError, match="frozen is frozen, and was written while a replica computed, but not in"):
        run_instances(2, 4, train)
    assert len(refused) == 2


def test_a_frozen_parameter_written_from_the_start_may_be_written_after_a_loss():
    """In the first steps the writes change no bit."""
    train = functools.partial(trained_with_factors, first=Frozen(), factors=[1.0, 1.0, 1.0, 0.5, 0.5])
    alone = train(strategies.IPUStrategy(4))
    assert run_instances(2, 4, train, ["kill:instance=1,step=2,phase=forward"]) == [alone, None]
