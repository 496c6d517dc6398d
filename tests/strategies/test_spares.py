"""Spares on threads, which take the places of lost instances and go on to the same bits.

Each program here is run by one process first; its results are compared to the last bit.
"""

from __future__ import annotations

import functools

import numpy as np
import optax
import pytest
from losing import OnMessage
from standby_instances import ASLEEP, run_with_spares
from surviving_instances import hook, run_instances

import strategies
from collectives import ThreadHub

REPLICAS = 6
STEPS = 4

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def loss_fn(variables, batch, key):
    error = batch @ variables["w"] - batch.sum(axis=1)
    return (error**2).mean(), {"error": abs(error).mean()}


def rows():
    return np.random.default_rng(0).normal(size=(STEPS * REPLICAS * 2, 3)).astype(np.float32)


def variables():
    return {"w": np.float32([0.3, -1.7, 0.9])}


def train(strategy):
    """Train for two epochs, and return the metrics of each step and the fingerprint of the state."""
    dataset = strategy.distribute_dataset(rows(), 2, seed=1)
    trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1, momentum=0.9))
    state, found = trainer.init(variables()), []
    for epoch in range(2):
        for batch in dataset.epoch(epoch):
            state, metrics = trainer.step(state, batch)
            found.append((metrics["loss"], metrics["error"]))
    return found, strategies.fingerprint(state), strategy.num_instances, len(strategy.local_replicas)


@functools.cache
def alone(program):
    [found] = run_instances(1, REPLICAS, program)
    return found[:2]


def check(found, program, lost=(), asleep=(), instances=2):
    """Check that all instances that are left have the results of one process."""
    assert [number for number, each in enumerate(found) if each is None] == sorted(lost)
    assert [number for number, each in enumerate(found) if each == ASLEEP] == sorted(asleep)
    left = [each for number, each in enumerate(found) if number not in (*lost, *asleep)]
    assert [each[:2] for each in left] == [alone(program)] * len(left)
    assert [each[2:] for each in left] == [(instances, REPLICAS // instances)] * len(left)


def test_a_spare_sleeps_through_a_training_without_losses():
    check(run_with_spares(2, 1, REPLICAS, train), train, asleep=[2])


@pytest.mark.parametrize(
    ("lost", "step", "phase"),
    [
        (0, 0, "forward"),
        (1, 0, "update"),
        (0, 3, "all_reduce"),
        (1, 4, "forward"),
        (0, 6, "update"),
        (1, 7, "all_reduce"),
    ],
)
def test_a_spare_takes_the_place_of_a_lost_instance(lost, step, phase):
    found = run_with_spares(2, 1, REPLICAS, train, [f"kill:instance={lost},step={step},phase={phase}"])
    check(found, train, lost=[lost])


def lose_at_message(rank, number, program, instances=2, spares=1, begin=("forward", 2)):
    """Lose an instance at a message from step 2 on, check the others, and return whether the message exists."""
    fault = OnMessage(rank, number)
    hub = ThreadHub(instances + spares, fault)
    return run_with_spares(
        instances, spares, REPLICAS, program, [hook(rank, *begin, fault.begin)], mechanism="ring", hub=hub
    ), fault.has_struck


class Joining:
    """The messages of a thread from the moment at which another one is lost."""


def test_two_spares_take_the_places_of_two_lost_instances():
    faults = ["kill:instance=0,step=1,phase=all_reduce", "kill:instance=2,step=1,phase=all_reduce"]
    check(run_with_spares(3, 2, REPLICAS, train, faults), train, lost=[0, 2], instances=3)


def test_spares_take_places_one_after_another():
    faults = ["kill:instance=0,step=1", "kill:instance=1,step=3,phase=update"]
    check(run_with_spares(2, 2, REPLICAS, train, faults), train, lost=[0, 1])


def test_after_the_last_spare_the_job_shrinks():
    faults = ["kill:instance=0,step=1", "kill:instance=1,step=3,phase=update"]
    check(run_with_spares(2, 1, REPLICAS, train, faults), train, lost=[0, 1], instances=1)
