"""Evaluation and prediction: every row counts once and keeps its place on any number of instances."""

from __future__ import annotations

import copy
import threading

import numpy as np
import pytest
import torch
from idiom import Apply
from torch import nn
from torch_modules import data, loss_fn, sgd_trainer

import strategies
import strategies.torch
from strategies import DisagreementError, StrategyError
from strategies.jax.replicas.devices import THREADS
from strategies.torch.replicas.evaluation import InferenceTurns
from strategies.torch.tensors import ReplicaMemory

REPLICAS = 4
ROWS = 43  # divisible by neither replicas nor batches


def rows():
    return data(ROWS)


def outputs_of(module, batch):
    return {"logits": module(batch["x"]), "odd": batch["y"] % 2 == 1}


def evaluated(strategy, module):
    """Return an evaluation and predictions after a step."""
    module = copy.deepcopy(module)
    trainer = strategies.torch.Trainer(strategy, module, loss_fn, torch.optim.Adam(module.parameters(), 0.01))
    trainer.step(next(iter(strategies.torch.distribute_dataset(strategy, data(), batch_size=2).epoch(0))))
    dataset = strategies.torch.distribute_dataset(strategy, rows(), 3, shuffle=False, remainder="pad")
    found = trainer.evaluate(dataset)
    predicted = list(trainer.predict(dataset, outputs_of))
    trainer.close()
    return dict(found), found.rows, {name: np.concatenate([each[name] for each in predicted]) for name in predicted[0]}


@pytest.fixture(scope="module")
def alone(module):
    return evaluated(strategies.IPUStrategy(REPLICAS), module)


def test_evaluation_and_predictions_match_plain_pytorch_on_all_rows(module, alone):
    """Evaluation mode means no dropout, and moving means for batch norm."""
    own = copy.deepcopy(module)
    strategy = strategies.IPUStrategy(REPLICAS)
    trainer = strategies.torch.Trainer(strategy, own, loss_fn, torch.optim.Adam(own.parameters(), 0.01))
    trainer.step(next(iter(strategies.torch.distribute_dataset(strategy, data(), batch_size=2).epoch(0))))
    trainer.close()
    assert own.training
    own.eval()
    loss, metrics = loss_fn(own, rows())
    found, count, predicted = alone
    assert count == ROWS
    assert list(found) == ["loss", "accuracy"]
    assert found["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert found["accuracy"] == pytest.approx(metrics["accuracy"].item(), abs=1e-7)
    np.testing.assert_allclose(predicted["logits"], own(rows()["x"]).detach(), atol=1e-5)
    assert np.array_equal(predicted["odd"], rows()["y"] % 2 == 1)


def test_own_batches_of_the_program_can_end_with_a_shorter_one(module):
    own = copy.deepcopy(module)
    strategy = strategies.IPUStrategy(2)
    trainer = sgd_trainer(strategy, own)
    batches = [{name: each[start : start + 8] for name, each in rows().items()} for start in range(0, ROWS, 8)]
    found = trainer.evaluate(batches)
    own.eval()
    assert found.rows == ROWS
    assert found["loss"] == pytest.approx(loss_fn(own, rows())[0].item(), abs=1e-6)


def test_threads_of_steps_end_when_the_trainer_is_closed_and_restart(module):
    """Replicas whose layers wait for each other have threads. An evaluation needs none."""
    own = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(module))
    trainer = sgd_trainer(strategies.IPUStrategy(2), own, lr=0.0)

    def new_threads() -> set[threading.Thread]:
        """Return the new threads of replicas; the garbage collector may end those of an earlier test meanwhile."""
        return {thread for thread in threading.enumerate() if thread.name.startswith(THREADS)} - before

    before, found, before_steps = set(threading.enumerate()), [], copy.deepcopy(own.state_dict())
    for _ in range(2):
        found.append(trainer.evaluate([rows()])["loss"])
        assert not new_threads()
        trainer.step(data(4))
        assert new_threads()
        trainer.close()
        assert not new_threads()
        own.load_state_dict(before_steps)
    assert found[0] == found[1]


class TestRefusals:
    @pytest.fixture
    def trainer(self, module):
        strategy = strategies.IPUStrategy(2)
        own = copy.deepcopy(module)
        return sgd_trainer(strategy, own)

    def dataset(self, trainer, **options):
        return strategies.torch.distribute_dataset(trainer.strategy, rows(), 3, **options)

    def test_data_sets_that_leave_rows_out(self, trainer):
        with pytest.raises(ValueError, match="distribute it with remainder='pad'"):
            trainer.evaluate(self.dataset(trainer))

    def test_a_loss_that_is_no_scalar(self, trainer):
        padded = self.dataset(trainer, remainder="pad")
        with pytest.raises(TypeError, match=r"loss is of shape \[3, 5\]; return a scalar"):
            trainer.evaluate(padded, lambda module, batch: module(batch["x"]))

    def test_a_metric_that_is_called_loss(self, trainer):
        padded = self.dataset(trainer, remainder="pad")
        with pytest.raises(TypeError, match="a metric is called 'loss'"):
            trainer.evaluate(padded, lambda module, batch: (module(batch["x"]).mean(), {"loss": 1.0}))

    def test_predictions_of_shuffled_rows_and_without_outputs(self, trainer):
        with pytest.raises(ValueError, match="shuffle=False"):
            trainer.predict(self.dataset(trainer, remainder="pad"))
        in_order = self.dataset(trainer, remainder="pad", shuffle=False)
        with pytest.raises(ValueError, match="the loss function returns no outputs to predict"):
            next(trainer.predict(in_order))
        with pytest.raises(ValueError, match="is of shape .* for 3 rows; the first axis of each output"):
            next(trainer.predict(in_order, lambda module, batch: module(batch["x"]).mean(0)))

    def test_instances_that_evaluate_different_loss_functions(self, module, on_instances):
        def evaluate(strategy):
            own = copy.deepcopy(module)
            trainer = sgd_trainer(strategy, own)
            factor = 1.0 + strategy.instance_index
            trainer.evaluate(self.dataset(trainer, remainder="pad"), lambda m, b: m(b["x"]).mean() * factor)

        with pytest.raises(DisagreementError, match="closes over 1.0"):
            on_instances(2, 2, evaluate)


def test_a_write_that_pytorch_does_not_count_is_found_after_calls_1_2_4_and_8():
    """To compare the bits of all parameters after every call would take longer than the call."""
    module, calls = nn.Linear(1, 1), []

    def call(own, x):
        calls.append(x)
        if len(calls) > 4:
            own.weight.data.add_(1)
        return own(x)

    turns = InferenceTurns(strategies.IPUStrategy(2).replicas, module, ReplicaMemory(), call, 0)
    for number in range(3):
        turns([[torch.ones(1), torch.ones(1)]], number)
    with pytest.raises(StrategyError, match="weight was written"):
        turns([[torch.ones(1), torch.ones(1)]], 3)


def test_standing_replicas_follow_changes_of_the_program_between_calls():
    """PopTorch's models use replicas of this kind."""
    module = Apply(lambda self, x: x * self.weight * self.factor + self.shift, weight=nn.Parameter(torch.ones(1)),
                   shift=torch.zeros(1))  # fmt: skip
    module.factor = 1.0
    replicas = InferenceTurns(strategies.IPUStrategy(2).replicas, module, ReplicaMemory(), lambda own, x: own(x), 0)

    def called():
        [of_replicas] = replicas([[torch.ones(1), torch.ones(1)]], 0)
        return [one.item() for one in of_replicas]

    try:
        assert called() == [1, 1]
        module.factor = 3.0
        module.shift = torch.full((1,), 0.5)
        assert called() == [3.5, 3.5]
    finally:
        replicas.close()
