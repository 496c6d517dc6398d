"""Programs that no loss may let train anything else: they go on to the bits of one process, or end with an error."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from losing import OnMessage
from standby_instances import run_with_spares
from surviving_instances import Threads, run_instances
from tiers import first_of

import strategies
from collectives import ThreadHub
from popdist.errors import LifeCycleError
from strategies import SpareError, StrategyError, UnappliedStepError

REPLICAS = 6

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def rows(count=96):
    return np.random.default_rng(0).normal(size=(count, 3)).astype(np.float32)


def loss_fn(variables, batch, key):
    return ((batch["x"] @ variables["w"] - 1) ** 2).mean()


def begun(strategy, **options):
    trainer = strategies.Trainer(strategy, options.pop("loss_fn", loss_fn), optax.sgd(0.1, momentum=0.9), **options)
    return trainer, trainer.init({"w": np.float32([0.3, -1.7, 0.9])})


@functools.cache
def alone(program):
    [found] = run_instances(1, REPLICAS, program)
    return found


def of_all(program, faults, spares):
    """Return the results of the instances that are left."""
    if spares:
        found = run_with_spares(2, spares, REPLICAS, program, faults)
    else:
        found = run_instances(2, REPLICAS, program, faults)
    return [each for each in found if isinstance(each, tuple)]


# ---- batches


def scaling_in_place(strategy):
    trainer, state = begun(strategy)
    for batch in strategy.distribute_dataset({"x": rows()}, 2).epoch(0):
        batch["x"] = batch["x"] * 0.5
        state, _ = trainer.step(state, batch)


def test_a_batch_that_the_program_has_changed_is_not_read_again_without_the_change():
    with pytest.raises(StrategyError, match="cannot be read again"):
        run_instances(2, REPLICAS, scaling_in_place, ["kill:instance=1,step=2"])


def test_a_tensor_changed_in_place_makes_another_batch(strategy):
    torch = pytest.importorskip("torch")
    dataset = strategies.DistributedDataset(
        {"x": rows()},
        batch_size=2,
        total_replicas=REPLICAS,
        local_replicas=range(REPLICAS),
        place=lambda batch: {"x": torch.from_numpy(batch["x"].copy())},
        is_read_again=True,
    )
    first, second = dataset.epoch(0), dataset.epoch(1)
    batch, other = next(first), next(second)
    assert dataset.has_given(other)
    assert not dataset.has_given(batch)
    other["x"].mul_(0.5)
    assert not dataset.has_given(other)


def taking_turns(strategy):
    trainer, state = begun(strategy)
    dataset, found = strategy.distribute_dataset({"x": rows()}, 2, seed=3), []
    one, two = dataset.epoch(0), dataset.epoch(1)
    for batches in (one, one, one, two, one, two, one):
        state, metrics = trainer.step(state, next(batches))
        found.append(metrics["loss"])
    return found, strategies.fingerprint(state)


@pytest.mark.parametrize("spares", [0, 1])
def test_each_of_two_iterators_goes_on_at_its_own_place(spares):
    found = of_all(taking_turns, ["kill:instance=1,step=4,phase=update"], spares)
    assert found == [alone(taking_turns)] * (1 + spares)


def own_batches(strategy):
    trainer, state = begun(strategy)
    data, local = rows().reshape(-1, REPLICAS, 2, 3), strategy.local_replicas
    for number in range(4):
        state, _ = trainer.step(state, {"x": data[number, local.start : local.stop].reshape(-1, 3)})
        strategy.on_chief(lambda: None)


def own_evaluation(strategy):
    trainer, state = begun(strategy)
    local = strategy.local_replicas
    test = [{"x": each[local.start : local.stop].reshape(-1, 3)} for each in rows(36).reshape(-1, REPLICAS, 2, 3)]
    for batch in strategy.distribute_dataset({"x": rows()}, 2).epoch(0):
        state, _ = trainer.step(state, batch)
        trainer.evaluate(state, test)


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize(("program", "phase"), [(own_batches, "update"), (own_evaluation, "all_reduce")])
def test_batches_of_unknown_replicas_are_refused_after_a_loss(program, phase, spares):
    """The loss strikes in another operation, which survives."""
    with pytest.raises(StrategyError, match="may be for the replicas that this instance had before"):
        of_all(program, [f"kill:instance=0,step=2,phase={phase}"], spares)


# ---- places


def training(strategy):
    trainer, state = begun(strategy)
    for batch in strategy.distribute_dataset({"x": rows()}, 2).epoch(0):
        state, _ = trainer.step(state, batch)


def test_an_instance_that_would_drive_wrong_replicas_ends(monkeypatch):
    right = Threads.join_survivors
    monkeypatch.setattr(Threads, "join_survivors", lambda self: (self.instance, right(self)[1]))
    with pytest.raises(LifeCycleError, match="instance 1 of 2, but rank 0 of 1"):
        run_instances(2, REPLICAS, training, ["kill:instance=0,step=2"])


def forgetting_the_journal(strategy):
    with strategy.replicas.journal.inside():
        training(strategy)


def test_a_spare_makes_no_step_of_the_training():
    *_, spare = run_with_spares(2, 1, REPLICAS, forgetting_the_journal)
    assert isinstance(spare, SpareError)
    assert "only active instances make" in str(spare)


# ---- errors that the program catches


def sometimes_infinite(variables, batch, key):
    return jnp.where((batch["x"][:, 0] > 1.8).any(), jnp.nan, 1.0) * loss_fn(variables, batch, key)


def sometimes_negative(variables, batch, key):
    weight = jnp.where((batch["x"][:, 0] > 1.8).any(), -1.0, 1.0)
    return strategies.Outcome(loss_fn(variables, batch, key), weight=weight)


def catching_weights(strategy):
    return catching(strategy, sometimes_negative)


def catching(strategy, loss=sometimes_infinite):
    trainer, state = begun(strategy, loss_fn=loss, check_numerics=True)
    found = []
    for batch in strategy.distribute_dataset({"x": rows()}, 2, seed=3).epoch(0):
        try:
            state, metrics = trainer.step(state, batch)
            found.append(metrics["loss"])
        except UnappliedStepError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found, strategies.fingerprint(state)


def lose_at_message(number, spares, training=catching):
    """Lose instance 1 of 3 at a message of the whole program; return whether there is such a message."""
    fault = OnMessage(1, number)

    def program(strategy):
        if strategy.replicas.first_index == 1:
            fault.begin()
        found = training(strategy)
        if strategy.replicas.first_index == 1:
            fault.end()
        return found

    hub = ThreadHub(3 + spares, fault)
    if spares:
        found = run_with_spares(3, spares, REPLICAS, program, mechanism="ring", hub=hub)
    else:
        found = run_instances(3, REPLICAS, program, mechanism="ring", hub=hub)
    assert found.count(None) == fault.has_struck
    assert [each for each in found if isinstance(each, tuple)] == [alone(training)] * (3 - fault.has_struck + spares)
    return fault.has_struck


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("number", [5, 15])
def test_an_error_that_some_instances_have_caught_reaches_the_others(number, spares):
    """At message 5 an instance is late by the start of the training, at message 15 by an error."""
    assert sum(isinstance(each, str) for each in alone(catching)[0]) == 3
    assert lose_at_message(number, spares)


@pytest.mark.parametrize("spares", first_of([1, 0]))
def test_the_kind_of_an_error_reaches_the_others(spares):
    assert [str(each)[:12] for each in alone(catching_weights)[0]].count("WeightError:") == 3
    assert lose_at_message(15, spares, catching_weights)


@pytest.mark.complete
@pytest.mark.parametrize("spares", [0, 1])
def test_errors_reach_late_instances_after_a_loss_at_every_message(spares):
    assert all(lose_at_message(number, spares) for number in range(21))
