"""Instances are lost while they evaluate and predict; the others go on, and find the same bits.

Instances are threads here, which are lost instead of a message.
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


def rows():
    x = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
    return {"x": x, "y": x[:, 0] * 2}


def loss_fn(variables, batch, key):
    score = batch["x"] @ variables["w"]
    loss = ((score - batch["y"]) ** 2).mean()
    return strategies.Outcome(loss, {"score": score.mean()}, outputs=score)


def program(strategy, parts, begin=lambda: None, end=lambda: None):
    """What an instance finds that does the parts and then a step; the one that may be lost calls `begin` first."""
    trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1))
    training = strategy.distribute_dataset(rows(), 2)
    testing = strategy.distribute_dataset(rows(), 2, shuffle=False, remainder="pad")
    state = trainer.init({"w": np.float32([0.3, -1.7, 0.9])})
    batches = training.epoch(0)
    found = []
    if strategy.replicas.first_index == LOST:
        begin()
    for part in (*parts, "step"):
        if part == "step" and strategy.replicas.first_index == LOST and len(found) == len(parts):
            end()
        if part == "step":
            state, metrics = trainer.step(state, next(batches))
            found.append(metrics["loss"])
        elif part == "evaluate":
            found.append(dict(trainer.evaluate(state, testing)))
        elif part == "predict on 0":
            batches_of_0 = list(trainer.predict(state, testing, to_all=False))
            found.append(np.concatenate(batches_of_0).tobytes() if strategy.is_chief else batches_of_0)
        else:
            found.append(np.concatenate(list(trainer.predict(state, testing))).tobytes())
    return found, strategy.num_instances


@functools.cache
def alone(parts):
    [(found, _)] = run_instances(1, REPLICAS, functools.partial(program, parts=parts))
    return found


def expected(parts, instance):
    """What an instance finds."""
    nothing = [None] * -(-ROWS // (2 * REPLICAS))
    has_part = [instance == 0 or part != "predict on 0" for part in (*parts, "step")]
    return [value if has_it else nothing for value, has_it in zip(alone(parts), has_part, strict=True)]


def lose_at_message(number, parts, instances=3):
    """Instance 1 is lost instead of its message with this number: was there one? The others find the same."""
    fault = OnMessage(LOST, number)
    losing = functools.partial(program, parts=parts, begin=fault.begin, end=fault.end)
    found = run_instances(instances, REPLICAS, losing, mechanism="ring", hub=ThreadHub(instances, fault))
    assert [each is None for each in found] == [fault.has_struck and number == LOST for number in range(instances)]
    left = instances - fault.has_struck
    for instance, each in enumerate(found):
        assert each is None or each == (expected(parts, instance), left)
    return fault.has_struck


@pytest.mark.parametrize(
    ("parts", "numbers"), [(("evaluate",), (3, 4)), (("predict",), (5, 6)), (("predict on 0",), (5, 6))], ids=str
)
def test_the_others_find_the_same_though_some_are_a_batch_ahead(parts, numbers):
    """Of the messages of a batch the first is missing, of which some have got what others have not, or the second."""
    assert all(lose_at_message(number, parts) for number in numbers)


@pytest.mark.complete
@pytest.mark.parametrize(
    "parts",
    [
        ("predict on 0",),
        ("evaluate", "step", "predict"),
    ],
    ids=str,
)
def test_whichever_message_is_missing_the_others_find_the_same(parts):
    """Before, in and behind every batch, and where some are through already and make the next step."""
    number = 0
    while lose_at_message(number, parts):
        number += 1
    assert number >= 10


def predict(strategy, dataset):
    """The scores that an instance gets; instance 1 is lost behind the first batch."""
    trainer = strategies.Trainer(strategy, lambda w, batch, key: (w * batch).mean(), optax.sgd(0.1))
    state = trainer.init(np.float32(2))
    found = []
    for scores in trainer.predict(state, dataset(strategy), lambda w, batch, key: w * batch):
        found += scores.tolist()
        if strategy.replicas.first_index == LOST:
            raise Lost
    return found


X = np.arange(ROWS, dtype=np.float32)


def padded(strategy, source=X):
    return strategy.distribute_dataset(source, 2, shuffle=False, remainder="pad")


@pytest.mark.parametrize("instances", [2, 3])
def test_the_others_take_over_the_rows_of_the_one_that_is_lost(instances):
    found = run_instances(instances, REPLICAS, functools.partial(predict, dataset=padded))
    assert found == [None if instance == LOST else (2 * X).tolist() for instance in range(instances)]


@pytest.mark.parametrize(
    ("dataset", "survives", "error", "message"),
    [
        (padded, False, PeerLostError, "rank 1 is lost"),
        (functools.partial(padded, source=X.tolist()), True, StrategyError, "can only read data sets of arrays"),
        (lambda strategy: [X[:8], X[:8]], True, StrategyError, "its part of these batches cannot be read again"),
    ],
    ids=["the job is to end", "a data set that is read in order", "batches of no data set"],
)
def test_where_they_cannot_they_say_why(dataset, survives, error, message):
    with pytest.raises(error, match=message):
        run_instances(3, REPLICAS, functools.partial(predict, dataset=dataset), survives=survives)


def leave_early(strategy, begin=lambda: None, end=lambda: None):
    """Takes one batch of predictions, and makes a step."""
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
def test_those_who_have_not_what_others_have_left_with_say_so():
    """Some have got the only batch that was taken and make the next step, and others never will get it."""
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
