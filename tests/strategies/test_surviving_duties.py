"""Loss of instances while some are in a duty of the chief and others in a step, before or after it.

Instances are threads here, and are lost in place of a message.
"""

from __future__ import annotations

import functools

import numpy as np
import optax
import pytest
from losing import OnMessage
from surviving_instances import run_instances

import strategies
from collectives import ThreadHub

REPLICAS = 6

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def loss_fn(variables, batch, key):
    return ((batch @ variables["w"]) ** 2).mean()


def program(strategy, parts, lost=-1, begin=lambda: None, end=lambda: None):
    """Return the result of an instance that does the parts and then a step; a lost one calls `begin` first."""
    rows = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    training = strategy.distribute_dataset(rows, 2)
    testing = strategy.distribute_dataset(rows[:31], 2, shuffle=False, remainder="pad")
    batches = training.epoch(0)
    duties, found = [], []
    if strategy.replicas.first_index == lost:
        begin()
    trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1, momentum=0.9))
    state = trainer.init({"w": np.float32([0.3, -1.7, 0.9])})
    for part in parts:
        if part == "step":
            state, metrics = trainer.step(state, next(batches))
            found.append(metrics["loss"])
        elif part == "evaluate":
            found.append(trainer.evaluate(state, testing)["loss"])
        elif part == "another":
            other = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1))
            found.append(strategies.fingerprint(other.init({"w": np.float32([1, 2, 3])}).variables))
        else:
            strategy.on_chief(functools.partial(duties.append, len(found)))
    if strategy.replicas.first_index == lost:
        end()
    state, _ = trainer.step(state, next(batches))
    found.append(strategies.fingerprint(state))
    return found, strategy.num_instances


@functools.cache
def alone(parts):
    [(found, _)] = run_instances(1, REPLICAS, functools.partial(program, parts=parts))
    return found


@pytest.mark.complete
@pytest.mark.parametrize(
    ("parts", "lost"),
    [
        (("step", "duty"), 1),
        (("duty", "evaluate", "duty"), 0),  # `test_surviving_evaluation.py` loses another one while it evaluates
        *[(("step", "another", "duty", "step"), lost) for lost in (0, 1)],
    ],
)
def test_survivors_agree_after_a_loss_at_every_message(parts, lost):
    number, has_struck = 0, True
    while has_struck:
        fault = OnMessage(lost, number)
        losing = functools.partial(program, parts=parts, lost=lost, begin=fault.begin, end=fault.end)
        found = run_instances(3, REPLICAS, losing, mechanism="ring", hub=ThreadHub(3, fault))
        has_struck = fault.has_struck
        assert [each is None for each in found] == [has_struck and instance == lost for instance in range(3)]
        left = 3 - has_struck
        assert [each for each in found if each is not None] == [(alone(parts), left)] * left, f"message {number}"
        number += 1
    assert number > 10
