"""Loss of instances during the training of a module with buffers and random numbers, and in a loop of the program.

Tests for all engines are in `../engines/test_losing_an_instance.py`.
"""

from __future__ import annotations

import copy
import functools
from contextlib import nullcontext

import jax
import numpy as np
import pytest
import torch
from surviving_instances import run_instances
from torch_modules import data, distributed, loss_fn, new_module

import strategies
import strategies.torch
from collectives import PeerLostError

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
    assert "can take over the replica of a lost one: if an instance is lost, the job ends" in caplog.text
