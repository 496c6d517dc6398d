"""Loss of instances during evaluation and prediction: the survivors find the same bits.

Instances are threads here, and are lost in place of a message.
"""

from __future__ import annotations

import functools

import numpy as np
import optax
import pytest
from losing import Lost, OnMessage
from surviving_instances import run_instances

import strategies
from collectives import PeerLostError, ThreadHub
from strategies import StrategyError

REPLICAS = 6
ROWS = 31
LOST = 1

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


X = np.arange(ROWS, dtype=np.float32)


def padded(strategy, source=X):
    return strategy.distribute_dataset(source, 2, shuffle=False, remainder="pad")


def predict_on_first(strategy, begin=lambda: None, end=lambda: None):
    """Return the predictions, which only instance 0 gets, and then the loss of a step."""
    trainer = strategies.Trainer(strategy, lambda w, batch, key: (w * batch).mean(), optax.sgd(0.1))
    state = trainer.init(np.float32(2))
    batches = strategy.distribute_dataset(X, 2).epoch(0)
    if strategy.replicas.first_index == LOST:
        begin()
    found = list(trainer.predict(state, padded(strategy), lambda w, batch, key: w * batch, to_all=False))
    if strategy.replicas.first_index == LOST:
        end()
    _, metrics = trainer.step(state, next(batches))
    return np.concatenate(found).tolist() if strategy.is_chief else set(found), metrics["loss"]


def lose_at_message(number):
    """Lose instance 1 at a message, check the results of the others, and return whether the message exists."""
    fault = OnMessage(LOST, number)
    losing = functools.partial(predict_on_first, begin=fault.begin, end=fault.end)
    found = run_instances(3, REPLICAS, losing, mechanism="ring", hub=ThreadHub(3, fault))
    [(predictions, loss)] = run_instances(1, REPLICAS, predict_on_first)
    lost = [None] if fault.has_struck else [({None}, loss)]
    assert found == [(predictions, loss), *lost, ({None}, loss)]
    return fault.has_struck


def test_survivors_find_the_same_if_some_are_a_batch_ahead():
    """Either the first message of a batch, which only some instances have received, or the second one is missing.

    `engines/test_losing_an_instance.py` tests predictions that all instances get.
    """
    assert all(lose_at_message(number) for number in (5, 6))


@pytest.mark.complete
def test_survivors_find_the_same_after_the_loss_of_any_message():
    """Messages are missing before, in and after every batch, while some instances already make the next step."""
    number = 0
    while lose_at_message(number):
        number += 1
    assert number >= 10


def predict(strategy, dataset):
    """Return the scores that an instance gets; instance 1 is lost after the first batch."""
    trainer = strategies.Trainer(strategy, lambda w, batch, key: (w * batch).mean(), optax.sgd(0.1))
    state = trainer.init(np.float32(2))
    found = []
    for scores in trainer.predict(state, dataset(strategy), lambda w, batch, key: w * batch):
        found += scores.tolist()
        if strategy.replicas.first_index == LOST:
            raise Lost
    return found


@pytest.mark.parametrize("instances", [2, 3])
def test_survivors_take_over_the_rows_of_a_lost_instance(instances):
    found = run_instances(instances, REPLICAS, functools.partial(predict, dataset=padded))
    assert found == [None if instance == LOST else (2 * X).tolist() for instance in range(instances)]


@pytest.mark.parametrize(
    ("dataset", "survives", "error", "message"),
    [
        (padded, False, PeerLostError, "rank 1 is lost"),
        (functools.partial(padded, source=X.tolist()), True, StrategyError, "only of data sets of arrays"),
        (lambda strategy: [X[:8], X[:8]], True, StrategyError, "its part of these batches cannot be read again"),
    ],
    ids=["the job is to end", "a data set that is read in order", "batches of no data set"],
)
def test_survivors_that_cannot_take_over_rows_raise_the_reason(dataset, survives, error, message):
    with pytest.raises(error, match=message):
        run_instances(3, REPLICAS, functools.partial(predict, dataset=dataset), survives=survives)


def leave_early(strategy, begin=lambda: None, end=lambda: None):
    """Take one batch of predictions, and make a step."""
    trainer = strategies.Trainer(strategy, lambda w, batch, key: (w * batch).mean(), optax.sgd(0.1))
    batches = strategy.distribute_dataset(X, 2).epoch(0)
    state, _ = trainer.step(trainer.init(np.float32(2)), next(batches))
    if strategy.replicas.first_index == LOST:
        begin()
    predictions = trainer.predict(state, padded(strategy), lambda w, batch, key: w * batch)
    found = next(predictions).tolist()
    predictions.close()
    if strategy.replicas.first_index == LOST:
        end()
    _, metrics = trainer.step(state, next(batches))
    return found, metrics["loss"]


@pytest.mark.complete
def test_instances_that_missed_a_batch_the_others_left_with_raise():
    """Some have got the only batch that was taken and make the next step; others will never get it."""
    [expected] = run_instances(1, REPLICAS, leave_early)
    ends = []
    has_struck = True
    while has_struck:
        fault = OnMessage(LOST, len(ends))
        leaving = functools.partial(leave_early, begin=fault.begin, end=fault.end)
        try:
            found = run_instances(3, REPLICAS, leaving, mechanism="ring", hub=ThreadHub(3, fault))
        except StrategyError as error:
            ends.append(str(error))
        else:
            assert [each for each in found if each is not None] == [expected] * (3 - fault.has_struck)
            ends.append("the same")
        has_struck = fault.has_struck
    [said] = set(ends) - {"the same"}
    assert said.startswith("an instance is lost, and others have left the prediction after 0 batches; take all batches")
