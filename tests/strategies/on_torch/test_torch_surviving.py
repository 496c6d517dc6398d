"""Instances on threads are lost at exact points of the training of a module; the others end with the same bits."""

from __future__ import annotations

import copy
import functools
from contextlib import nullcontext

import jax
import numpy as np
import pytest
import torch
from losing import OnMessage
from surviving_instances import hook, run_instances
from torch_modules import data, distributed, loss_fn, new_module

import strategies
import strategies.torch
from collectives import PeerLostError, ThreadHub

REPLICAS = 6
STEPS = 4
KINDS = ("kill", "raise", "stop", "cut")
PHASES = ("data", "forward", "all_reduce", "update")
CASES = [
    (kind, phase, 2 + (number + number // 4) % 2, number % 2)
    for number, (kind, phase) in enumerate((kind, phase) for kind in KINDS for phase in PHASES)
]


def train(strategy, module, digest_every=0):
    module = copy.deepcopy(module)
    optimizer = torch.optim.Adam(module.parameters(), 0.01)
    trainer = strategies.torch.Trainer(strategy, module, loss_fn, optimizer, digest_every=digest_every)
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
    """What one instance finds that nobody disturbs."""
    return train(strategies.IPUStrategy(REPLICAS), module)


def check(found, alone, lost):
    assert [number for number, each in enumerate(found) if each is None] == sorted(lost)
    left = [each for each in found if each is not None]
    assert sum(each[2] for each in left) == REPLICAS
    assert [each[:2] for each in left] == [alone[:2]] * len(left)


@pytest.mark.parametrize(("kind", "phase", "instances", "lost"), CASES)
def test_the_others_go_on_to_the_same_bits(kind, phase, instances, lost, module, alone):
    faults = [f"{kind}:instance={lost},step=1,phase={phase}"]
    mechanism = "ring" if kind == "cut" else "window"
    found = run_instances(instances, REPLICAS, functools.partial(train, module=module), faults, mechanism=mechanism)
    check(found, alone, [lost])


def test_before_the_first_step(module, alone):
    faults = ["kill:instance=0,phase=broadcast"]
    check(run_instances(3, REPLICAS, functools.partial(train, module=module), faults), alone, [0])


def test_several_may_be_lost(module, alone):
    faults = ["kill:instance=0,step=1,phase=all_reduce", "kill:instance=2,step=3,phase=forward"]
    check(run_instances(3, REPLICAS, functools.partial(train, module=module), faults), alone, [0, 2])


@pytest.mark.complete
@pytest.mark.parametrize("step", [0, 2])
def test_one_that_has_completed_a_step_brings_the_others_up_to_it(step, module, alone):
    """Whichever message is missing; in the first step the others have no optimizer state yet."""
    caught_up = []
    for number in range(8):
        fault = OnMessage(1, number)
        hooks = [hook(1, "forward", step, fault.begin), hook(1, "forward", step + 1, fault.end)]
        hooks += [hook(each, "broadcast", step, functools.partial(caught_up.append, number)) for each in (0, 2)]
        hub = ThreadHub(3, fault)
        found = run_instances(3, REPLICAS, functools.partial(train, module=module), hooks, mechanism="ring", hub=hub)
        check(found, alone, [1] if fault.has_struck else [])
    assert caught_up


def test_a_flipped_bit_is_found_and_put_back(module, alone):
    function = functools.partial(train, module=module, digest_every=1)
    assert [each[:2] for each in run_instances(3, REPLICAS, function, ["flip-bit:instance=1,step=2"])] == [
        alone[:2]
    ] * 3


def test_sharded_state_is_lost_with_an_instance(module, caplog):
    def train(strategy):
        own = copy.deepcopy(module)
        optimizer = torch.optim.Adam(own.parameters())
        options = {"replicated_optimizer_state_sharding": True}
        trainer = strategies.torch.Trainer(strategy, own, loss_fn, optimizer, **options)
        for batch in strategies.torch.distribute_dataset(strategy, data(), batch_size=2).epoch(0):
            trainer.step(batch)

    with pytest.raises(PeerLostError):
        run_instances(2, REPLICAS, train, ["kill:instance=1,step=1"])
    assert "no other has (sharded optimizer state): if one is lost the job ends" in caplog.text


def test_a_loop_of_ones_own_says_that_it_ends_with_an_instance(module, caplog):
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
    assert "cannot carry the one of an instance besides: if one is lost the job ends" in caplog.text
