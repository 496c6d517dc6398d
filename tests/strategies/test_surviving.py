"""Loss of instances on threads at exact points of a training; the survivors continue to the same bits.

Tests for all engines, with a loss at any point of a step, are in `engines/test_losing_an_instance.py`. Tests that need
processes, and a supervisor that reports a loss, are in `tests/jobs/test_survival_jobs.py`.
"""

from __future__ import annotations

import functools
import itertools
import logging
import random
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from losing import Lost, OnMessage
from surviving_instances import GUARD_S, hook, run_instances

import strategies
from collectives import PeerLostError, ThreadHub
from strategies import DivergenceError, StrategyError, Trainer, cross_replica_ops

sys.path.insert(0, str(Path(__file__).parents[1] / "jobs" / "programs"))
from surviving_training import Training, count, train  # noqa: E402

STEPS = 2  # in each of two epochs
TRAINING = Training(STEPS)
WIDE = Training(STEPS, width=2200)  # gradients travel apart from the comparison of calls
REPLICAS = {1: 8, 2: 8, 3: 6, 4: 8}  # by the number of instances
SHARES = {(2, 1): [8], (3, 2): [3, 3], (3, 1): [6], (4, 3): [3, 3, 2], (4, 2): [4, 4], (4, 1): [8]}

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def trained(instances, faults=(), training=TRAINING, replicas=0, **options):
    function = functools.partial(train, training=training)
    return run_instances(instances, replicas or REPLICAS[instances], function, faults, **options)


@functools.cache
def alone(replicas, training=TRAINING):
    """Return the result of one instance without a loss."""
    [found] = trained(1, training=training, replicas=replicas)
    return found


def check(found, instances, lost=(), training=TRAINING):
    """Check that survivors have the bits of one instance, the means of every step, and shares of all replicas."""
    replicas = REPLICAS[instances]
    expected = alone(replicas, Training(STEPS, width=training.width))
    assert [instance for instance, each in enumerate(found) if each is None] == sorted(lost)
    left = [each for each in found if each is not None]
    shares = SHARES[instances, len(left)] if lost else [replicas // instances] * instances
    assert [each["replicas"] for each in left] == shares
    for each in left:
        assert each["instances"] == len(left)
        assert {name: each[name] for name in ("fingerprint", "step", "losses")} == {
            name: expected[name] for name in ("fingerprint", "step", "losses")
        }


SEVERAL = {
    3: [["kill:instance=0,step=0", "raise:instance=2,step=2,phase=all_reduce"]],
    4: [
        ["raise:instance=3,step=1,phase=all_reduce", "kill:instance=2,step=1,phase=update"],
        ["kill:instance=1,step=1,phase=data", "kill:instance=2,step=1,phase=data"],
        ["cut:instance=3,step=0,phase=data", "stop:instance=0,step=1,phase=all_reduce", "kill:instance=1,step=3"],
        ["stop:instance=0,step=1,phase=update", "raise:instance=1,step=2", "stop:instance=3,step=3,phase=data"],
    ],
}


@pytest.mark.parametrize(
    ("instances", "faults"),
    [
        pytest.param(instances, faults, marks=pytest.mark.complete if number else ())
        for instances, cases in SEVERAL.items()
        for number, faults in enumerate(cases)
    ],
)
def test_training_survives_the_loss_of_several_instances(instances, faults):
    lost = [int(fault.partition("=")[2][0]) for fault in faults]
    found = trained(instances, faults, mechanism="ring" if "cut" in faults[0] else "window")
    check(found, instances, lost)


def test_a_second_loss_while_survivors_reconnect_is_survived():
    fault = OnMessage(2, 1)
    faults = ["kill:instance=1,step=1", hook(2, "forward", 1, fault.begin)]
    check(trained(4, faults, hub=ThreadHub(4, fault)), 4, [1, 2])
    assert fault.has_struck


def test_training_ends_if_all_instances_fail():
    assert trained(3, [f"raise:instance={instance},step=1" for instance in range(3)]) == [None] * 3


# ---- instances that are a step behind


def lose_at_message(number, training):
    """Lose instance 1 at a message in step 2, check the others, and return whether the message exists."""
    fault = OnMessage(1, number)
    hooks = [hook(1, "forward", 2, fault.begin), hook(1, "forward", 3, fault.end)]
    found = trained(3, hooks, training, mechanism="ring", hub=ThreadHub(3, fault))
    check(found, 3, [1] if fault.has_struck else [], training)
    return fault.has_struck


def test_an_instance_can_be_lost_at_a_random_message_of_a_gradient(seed):
    assert lose_at_message(random.Random(seed).randrange(4), WIDE)


@pytest.mark.complete
def test_an_instance_can_be_lost_at_every_message_of_a_gradient():
    number = 0
    while lose_at_message(number, WIDE):
        number += 1
    assert number >= 4


# ---- compiling


@pytest.fixture
def counting():
    """Count JAX's compilations by thread."""
    jax.monitoring.register_event_duration_secs_listener(count)
    yield
    jax.monitoring.unregister_event_duration_listener(count)


THREE_KILLS = ["kill:instance=3,step=1", "kill:instance=0,step=2", "kill:instance=1,step=3"]


def test_no_loss_compiles_anything(counting):
    """The last of four instances keeps its two replicas at first, then it gets two more, then all eight."""
    found = trained(4, THREE_KILLS)
    check(found, 4, [0, 1, 3])
    first, *others = found[2]["compiled"]
    assert first > 0
    assert others == [0, 0, 0]


# ---- checkpoints


@pytest.mark.parametrize("phase", ["all_reduce", "checkpoint"])
def test_the_next_instance_saves_when_the_first_is_lost(tmp_path, phase):
    """A training resumed from its checkpoint has the bits of an undisturbed one."""
    pytest.importorskip("orbax.checkpoint")
    saved = Training(STEPS, folder=str(tmp_path), until=3)
    found = trained(3, [f"kill:instance=0,step=1,phase={phase}"], saved)
    assert [each and each["step"] for each in found] == [None, 3, 3]
    assert [path.name for path in sorted(tmp_path.iterdir())][-1] == "step_00000003"
    [resumed] = trained(1, training=Training(STEPS, folder=str(tmp_path)), replicas=6)
    assert len(resumed["losses"]) == 1  # the last step is the only one made
    assert resumed["fingerprint"] == alone(6)["fingerprint"]


# ---- bits that flip


class TestAFlippedBit:
    COMPARED = Training(STEPS, digest_every=2)

    def test_a_flipped_bit_is_healed_after_a_loss_and_the_instance_keeps_its_name(self, caplog):
        with caplog.at_level(logging.WARNING):
            found = trained(4, ["kill:instance=0,step=1", "flip-bit:instance=3,step=2"], self.COMPARED)
        check(found, 4, [0])
        assert "before step 2 instance 3 had other bits than the others, and got theirs" in caplog.text

    def test_a_flipped_bit_among_two_instances_has_no_majority(self):
        with pytest.raises(DivergenceError, match="before step 2 the instances have different bits, and no majority"):
            trained(2, ["flip-bit:instance=1,step=2"], self.COMPARED)

    def test_a_flipped_bit_stays_without_a_comparison(self):
        found = trained(3, ["flip-bit:instance=1,step=2"])
        assert {each["fingerprint"] == alone(6)["fingerprint"] for each in found} == {False}


# ---- collectives of the program


def coupled(variables, batch, key):
    """Compute a loss that couples the results of replicas, forward and backward."""
    context = strategies.get_replica_context()
    hidden = jnp.tanh(batch @ variables["w"])
    centred = hidden - context.all_reduce("mean", hidden.mean(axis=0)) + 0.01 * jax.random.normal(key, hidden.shape)
    gathered = cross_replica_ops.all_gather(centred.mean(axis=0))
    return jnp.mean(centred**2) + jnp.mean(gathered), {"largest": context.all_reduce("max", jnp.abs(hidden).max())}


def coupled_training(strategy):
    rows = np.random.default_rng(0).standard_normal((60, 5)).astype(np.float32)
    trainer = Trainer(strategy, coupled, optax.sgd(0.1, momentum=0.9))
    state, seen = trainer.init({"w": np.linspace(-1, 1, 20, dtype=np.float32).reshape(5, 4)}), []
    for _, batch in zip(range(4), strategy.distribute_dataset(rows, batch_size=2).epoch(0), strict=False):
        state, metrics = trainer.step(state, batch)
        seen.append(dict(metrics))
    return strategies.fingerprint(state.variables), seen


LOSSES = [
    ["kill:instance=1,step=1"],
    ["kill:instance=0,step=2,phase=update"],
    ["cut:instance=2,step=1,phase=all_reduce"],
    ["raise:instance=2,step=0,phase=all_reduce", "kill:instance=0,step=2"],
]


@pytest.mark.parametrize(
    "faults", [LOSSES[0], *(pytest.param(each, marks=pytest.mark.complete) for each in LOSSES[1:])]
)
def test_collectives_in_a_loss_function_continue_among_survivors(faults):
    """More replicas wait for each other in an instance than at the beginning."""
    found = run_instances(3, 6, coupled_training, faults, mechanism="ring")
    [alone] = run_instances(1, 6, coupled_training)
    left = [each for each in found if each is not None]
    assert len(left) == 3 - len(faults)
    assert left == [alone] * len(left)


# ---- trainings that cannot be carried on


def ends(function, *words, error):
    """Check that a job that loses instance 1 in its second step ends on the others with this error."""
    with pytest.raises(error) as caught:
        run_instances(3, 6, function, ["kill:instance=1,step=1,phase=all_reduce"])
    assert all(word in str(caught.value) for word in words), caught.value


def squared(variables, batch, key):
    return jnp.mean((batch @ variables) ** 2)


def three_steps(strategy, batches, **options):
    trainer = Trainer(strategy, squared, optax.sgd(0.1, momentum=0.9), **options)
    state = trainer.init(np.ones(3, np.float32))
    for batch in itertools.islice(batches, 3):
        state, _ = trainer.step(state, batch)


def test_batches_without_a_data_set_cannot_be_read_again_and_the_job_warns_at_its_beginning(caplog):
    def function(strategy):
        three_steps(strategy, itertools.repeat(np.ones((len(strategy.local_replicas), 3), np.float32)))

    with caplog.at_level(logging.WARNING):
        ends(function, "its part of this batch cannot be read again", "strategy.distribute", error=StrategyError)
    assert {record.message for record in caplog.records} == {
        "the batches do not come from strategy.distribute_dataset, so no instance can read the part of a lost one: "
        "if an instance is lost, the job ends; to go on from a checkpoint, use poprun --on-failure restart"
    }


def test_streams_cannot_be_read_again_and_the_job_warns(caplog):
    def function(strategy):
        rows = [np.full(3, number, np.float32) for number in range(60)]
        three_steps(strategy, strategy.distribute_dataset(rows, batch_size=1).epoch(0))

    with caplog.at_level(logging.WARNING):
        ends(function, "only of data sets of arrays", error=StrategyError)
    assert "only be read in order, so no instance can read the part of a lost one: if an instance is" in caplog.text


def test_trainings_that_can_carry_on_give_no_warning(caplog):
    with caplog.at_level(logging.WARNING):
        check(trained(3, ["kill:instance=1,step=1"]), 3, [1])
    assert not caplog.records


def test_a_job_without_survival_gets_no_warning(caplog):
    def function(strategy):
        three_steps(strategy, itertools.repeat(np.ones((len(strategy.local_replicas), 3), np.float32)))

    with caplog.at_level(logging.WARNING):
        run_instances(3, 6, function, survives=False)
    assert not caplog.records


def test_a_strategy_that_cannot_carry_on_warns_once_in_a_surviving_job(caplog, monkeypatch):
    monkeypatch.setenv("POPDIST_SHRINKS", "1")
    with caplog.at_level(logging.WARNING):
        run_instances(3, 6, lambda strategy: strategy.num_replicas_in_sync, survives=False)
    [warning] = caplog.records
    assert "cannot go on without a lost instance, as --on-failure shrink asks" in warning.message


def test_feeds_cannot_be_carried_on_and_the_job_warns(caplog):
    def function(strategy):
        queue = strategies.OutfeedQueue()

        def loss_fn(variables, batch, key):
            queue.enqueue(batch.sum())
            return squared(variables, batch, key)

        rows = np.ones((60, 3), np.float32)
        trainer = Trainer(strategy, loss_fn, optax.sgd(0.1, momentum=0.9))
        trainer.run(trainer.init(np.ones(3, np.float32)), strategy.distribute_dataset(rows, batch_size=5))

    with caplog.at_level(logging.WARNING):
        run_instances(3, 6, function)
    assert "the queues of feeds stay with the replicas that an instance drives at the start: if" in caplog.text


# ---- duties of the chief


def duties(strategy, done, faults=()):
    """Run three duties, at the first of which instances may be lost, and record which chief did which duty."""
    for number in range(3):

        def duty(number=number):
            for fault in faults:
                fault(strategy, number)
            done.append((number, strategy.replicas.first_index))

        strategy.on_chief(duty)
    return strategy.is_chief


def losing(instance, number):
    def fault(strategy, at):
        if (strategy.replicas.first_index, at) == (instance, number):
            raise Lost

    return fault


@pytest.mark.parametrize("mechanism", ["window", "ring"])
def test_the_next_chief_completes_duties_of_the_first(mechanism):
    done: list[tuple[int, int]] = []
    faults = [losing(0, 1), losing(1, 2)]
    found = run_instances(3, 6, lambda strategy: duties(strategy, done, faults), mechanism=mechanism)
    assert found == [None, None, True]
    assert done == [(0, 0), (1, 1), (2, 2)]


@pytest.mark.parametrize("lost", [0, 2])
def test_steps_after_a_duty_run_on_the_replicas_of_the_survivors(lost):
    def function(strategy, is_losing=True):
        dataset = strategy.distribute_dataset(np.arange(24, dtype=np.float32), 2)
        trainer = Trainer(strategy, lambda w, batch, key: (w * batch).mean() ** 2, optax.sgd(0.01))
        state, means = trainer.init(jnp.float32(1)), []
        for batch in dataset.epoch(0):
            state, metrics = trainer.step(state, batch)
            means.append(metrics["loss"])
            if is_losing:
                if strategy.replicas.first_index == lost:
                    losing(lost, 0)(strategy, 0)
                strategy.on_chief(lambda: None)
        return means

    [expected] = run_instances(1, 6, functools.partial(function, is_losing=False))
    found = run_instances(3, 6, function)
    assert found == [None if instance == lost else expected for instance in range(3)]


def test_a_loss_during_a_duty_is_an_error_without_survival():
    with pytest.raises(PeerLostError):
        run_instances(2, 2, lambda strategy: duties(strategy, [], [losing(0, 0)]), survives=False)


def test_a_completed_duty_is_not_repeated_by_instances_that_missed_its_end():
    done: list[tuple[int, int]] = []
    first_lost = threading.Event()

    def function(strategy):
        if strategy.replicas.first_index == 2:  # as if only its own barrier had failed
            strategy.on_chief(lambda: None)
            first_lost.wait(GUARD_S)
            strategy.replicas.done_so_far.done = 0
        elif strategy.replicas.first_index == 1:
            strategy.on_chief(lambda: done.append((0, 1)))
            first_lost.set()
            raise Lost
        else:
            strategy.on_chief(lambda: done.append((0, 0)))
        strategy.on_chief(lambda: done.append((1, strategy.replicas.first_index)))
        if strategy.replicas.first_index == 2:
            strategy.on_chief(lambda: None)
        return strategy.num_instances

    assert run_instances(3, 6, function) == [2, None, 2]
    assert done == [(0, 0), (1, 0)]
