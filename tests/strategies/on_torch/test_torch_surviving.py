"""Loss of instances during the training of a module with buffers and random numbers, and in a loop of the program.

Tests for all engines are in `../engines/test_losing_an_instance.py`.
"""

from __future__ import annotations

import copy
import functools
import itertools
from contextlib import nullcontext

import jax
import numpy as np
import pytest
import torch
from losing_at_events import BEFORE, Events
from surviving_instances import run_instances
from torch_modules import data, distributed, loss_fn, new_module

import strategies
import strategies.torch
from collectives import PeerLostError, ThreadHub

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
def module():
    return new_module("convolutions")


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


def looped_with_events(count, mechanism, module, *of_instances):
    by_rank = {events.instance: events for events in of_instances}

    def function(strategy):
        if strategy.replicas.first_index in by_rank:
            by_rank[strategy.replicas.first_index].begin()
        return looped(strategy, module)

    def before_send(source, to):
        if source in by_rank:
            by_rank[source].before_send(source, to)

    hub = ThreadHub(count, before_send)
    return run_instances(count, REPLICAS, function, mechanism=mechanism, hub=hub, instruments=by_rank)


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
    expected = looped(strategies.IPUStrategy(REPLICAS), module)
    counted = Events(lost, step)
    assert looped_with_events(count, mechanism, module, counted) == [expected] * count
    assert counted.seen
    for number in range(len(counted.seen)):
        found = looped_with_events(count, mechanism, module, Events(lost, step, number))
        assert found == [None if rank == lost else expected for rank in range(count)], counted.seen[number]


def test_a_loop_survives_a_second_loss_during_the_recovery(module):
    """One instance is late by a step, which another one has completed and shares; then that one is lost too."""
    expected = looped(strategies.IPUStrategy(REPLICAS), module)
    first = Events(2, 1)
    looped_with_events(3, "ring", module, first)
    number = max(number for number, name in enumerate(first.seen) if "message" in name)
    both = [Events(instance, 1, in_recovery=True) for instance in (0, 1)]
    found = looped_with_events(3, "ring", module, Events(2, 1, number), *both)
    assert found == [expected, expected, None]
    assert any("which means there are" in name for name in both[0].seen), "nobody has been late"
    for later in range(len(both[0].seen)):
        second = Events(0, 1, later, in_recovery=True)
        found = looped_with_events(3, "ring", module, Events(2, 1, number), second)
        assert found == [None, expected, None], both[0].seen[later]


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
