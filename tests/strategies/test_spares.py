"""Spares on threads, which take the places of lost instances and go on to the same bits.

Each program here is run by one process first; its results are compared to the last bit.
"""

from __future__ import annotations

import functools
from random import Random

import numpy as np
import optax
import pytest
from losing import Lost, OnMessage
from standby_instances import ASLEEP, StandbyJob, run_with_spares
from surviving_instances import hook, run_instances

import strategies
from collectives import PeerLostError, ThreadHub

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


def train_with_model_state(strategy):
    """Train for an epoch with a counter that is alike on all replicas, as `train`."""

    def counting_loss_fn(variables, batch, key, model_state):
        loss, metrics = loss_fn(variables, batch, key)
        return strategies.Outcome(loss, metrics, {"turn": model_state["turn"] + 1, "rows": model_state["rows"] + 2})

    words = {"turn": "alike", "rows": "sum"}
    dataset = strategy.distribute_dataset(rows(), 2, seed=1)
    trainer = strategies.Trainer(strategy, counting_loss_fn, optax.sgd(0.1), model_state_aggregation=words)
    state = trainer.init(variables(), {"turn": np.int32(0), "rows": np.int8(0)})
    for batch in dataset.epoch(0):
        state, metrics = trainer.step(state, batch)
    return dict(metrics), strategies.fingerprint(state), strategy.num_instances, len(strategy.local_replicas)


@functools.cache
def alone(program):
    [found] = run_instances(1, REPLICAS, program)
    return found[:2]


def check(found, program, lost=(), asleep=0, instances=2):
    """Check that all instances that are left have the results of one process."""
    assert [number for number, each in enumerate(found) if each is None] == sorted(lost)
    assert found.count(ASLEEP) == asleep
    left = [each for each in found if each not in (None, ASLEEP)]
    assert [each[:2] for each in left] == [alone(program)] * len(left)
    assert [each[2:] for each in left] == [(instances, REPLICAS // instances)] * len(left)


def test_a_spare_sleeps_through_a_training_without_losses():
    check(run_with_spares(2, 1, REPLICAS, train), train, asleep=1)


def test_a_spare_compares_alike_leaves_of_the_model_state_only_when_it_is_active():
    found = run_with_spares(2, 1, REPLICAS, train_with_model_state, ["kill:instance=1,step=2,phase=update"])
    check(found, train_with_model_state, lost=[1])


@pytest.mark.parametrize(
    ("lost", "step", "phase"),
    [
        (1, 0, "update"),
        (0, 3, "all_reduce"),
        (1, 7, "all_reduce"),
        pytest.param(0, 0, "forward", marks=pytest.mark.complete),
        pytest.param(1, 4, "forward", marks=pytest.mark.complete),
        pytest.param(0, 6, "update", marks=pytest.mark.complete),
    ],
)
def test_a_spare_takes_the_place_of_a_lost_instance(lost, step, phase):
    found = run_with_spares(2, 1, REPLICAS, train, [f"kill:instance={lost},step={step},phase={phase}"])
    check(found, train, lost=[lost])


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.complete), 1])
def test_a_spare_takes_a_place_where_gradients_stay_on_the_devices(monkeypatch, lost):
    monkeypatch.setenv("POPDIST_EXCHANGE", "window")
    found = run_with_spares(3, 1, REPLICAS, train, [f"kill:instance={lost},step=3,phase=update"])
    check(found, train, lost=[lost], instances=3)


def test_two_spares_take_the_places_of_two_lost_instances():
    faults = ["kill:instance=0,step=1,phase=all_reduce", "kill:instance=2,step=1,phase=all_reduce"]
    check(run_with_spares(3, 2, REPLICAS, train, faults), train, lost=[0, 2], instances=3)


def test_spares_take_places_one_after_another():
    faults = ["kill:instance=0,step=1", "kill:instance=1,step=3,phase=update"]
    check(run_with_spares(2, 2, REPLICAS, train, faults), train, lost=[0, 1])


def test_after_the_last_spare_the_job_shrinks():
    faults = ["kill:instance=0,step=1", "kill:instance=1,step=3,phase=update"]
    check(run_with_spares(2, 1, REPLICAS, train, faults), train, lost=[0, 1], instances=1)


# ---- losses during a join


def lose_while_joining(rank, number, spares, count=3):
    """Lose instance 0 in step 2, and `rank` at a message until step 3; return whether there is such a message."""
    fault = OnMessage(rank, number)

    def begin():
        fault.begin()
        raise Lost

    hooks = [hook(0, "all_reduce", 2, begin), hook(rank, "forward", 3, fault.end)]
    hub = ThreadHub(count + spares, fault)
    found = run_with_spares(count, spares, REPLICAS, train, hooks, mechanism="ring", hub=hub)
    lost = [0, rank] if fault.has_struck else [0]
    left = count + spares - len(lost)
    has_none = count == len(lost) and ASLEEP in found  # the spare has come too late to get the variables
    check(found, train, lost=lost, asleep=has_none or max(0, left - count), instances=min(left, count))
    return fault.has_struck


def test_an_instance_can_be_lost_at_a_random_message_of_a_join(seed):
    random = Random(seed)
    lose_while_joining(random.choice([1, 3]), random.randrange(20), random.choice([1, 2]))


@pytest.mark.parametrize("number", [0, 4, 8])
def test_a_spare_ends_in_order_if_the_last_instance_with_variables_is_lost_while_it_joins(number):
    assert lose_while_joining(1, number, 1, count=2)


@pytest.mark.complete
@pytest.mark.parametrize(("rank", "spares", "count"), [(1, 1, 3), (3, 1, 3), (3, 2, 3), (1, 1, 2)])
def test_an_instance_can_be_lost_at_every_message_of_a_join(rank, spares, count):
    number = 0
    while lose_while_joining(rank, number, spares, count):
        number += 1
    assert number > 10


# ---- resizing


def resizing(job, number):
    """Return a function that asks for another number of active instances, between two steps of an instance."""

    def ask():
        job.num_active = number
        raise PeerLostError("another number of instances is wanted")

    return ask


@pytest.mark.parametrize("phase", ["all_reduce", "update"])
def test_an_active_instance_becomes_a_spare_and_active_again(phase):
    job = StandbyJob(ThreadHub(3), num_active=3)
    hooks = [hook(0, phase, 2, resizing(job, 1)), hook(0, phase, 5, resizing(job, 3))]
    check(run_with_spares(3, 0, REPLICAS, train, hooks, job=job), train, instances=3)


def test_an_instance_becomes_a_spare_and_active_again_in_one_step_whose_batch_it_has_read_again():
    """In the same step an instance was lost before, so the batch that the program gave is for other replicas."""
    job = StandbyJob(ThreadHub(3), num_active=3)

    def lose():
        raise Lost

    hooks = [hook(2, "all_reduce", 2, lose), *(hook(0, "all_reduce", 2, resizing(job, number)) for number in (3, 1, 2))]
    check(run_with_spares(3, 0, REPLICAS, train, hooks, job=job), train, lost=[2])


def test_a_spare_that_was_active_sleeps_to_the_end():
    job = StandbyJob(ThreadHub(3), num_active=3)
    hooks = [hook(0, "all_reduce", 2, resizing(job, 2))]
    check(run_with_spares(3, 0, REPLICAS, train, hooks, job=job), train, asleep=1)


def test_a_job_grows_by_its_spares():
    job = StandbyJob(ThreadHub(3), num_active=1)
    hooks = [hook(0, "all_reduce", 2, resizing(job, 3)), hook(2, "all_reduce", 5, resizing(job, 2))]
    check(run_with_spares(1, 2, REPLICAS, train, hooks, job=job), train, asleep=1)
