"""Operations of programs that spares replay: whatever a program does, a joining spare is at the same place.

Each program here is run by one process first; its results are compared to the last bit.
"""

from __future__ import annotations

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from losing import OnMessage
from standby_instances import ASLEEP, run_with_spares
from surviving_instances import run_instances

import strategies
from collectives import ThreadHub
from strategies import Outcome, SpareError

REPLICAS = 6

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def rows(count=96):
    return np.random.default_rng(0).normal(size=(count, 3)).astype(np.float32)


def loss_fn(variables, batch, key):
    return ((batch @ variables["w"] - 1) ** 2).mean()


def start():
    return {"w": np.float32([0.3, -1.7, 0.9])}


def run(program, faults, *, count=2, spares=1, lost=1, **options):
    """Run a program with losses, check that all that are left have the results of one process, and return them."""
    found = run_with_spares(count, spares, REPLICAS, program, faults, **options)
    expected = alone(program)
    left = [each for each in found if each not in (None, ASLEEP)]
    assert found.count(None) == lost
    assert left == [expected] * (count + min(0, spares - lost))
    return expected


@functools.cache
def alone(program):
    [found] = run_instances(1, REPLICAS, program)
    return found


# ---- programs


def adversarial(strategy, has_collectives=True):
    """Train two networks in turns, with decisions by metrics, evaluations, duties and low-level collectives."""
    training = strategy.distribute_dataset(rows(), 2, seed=3)
    testing = strategy.distribute_dataset(rows(31), 2, shuffle=False, remainder="pad")
    one = strategies.Trainer(strategy, loss_fn, optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    other = strategies.Trainer(strategy, lambda v, b, k: -loss_fn(v, b, k), optax.adam(0.01), seed=7)
    first, second = one.init(start()), other.init({"w": np.float32([1, 2, 3])})
    found, duties, worse = [1.0], [], 0
    if has_collectives:
        found = [float(strategy.broadcast({"scale": np.float32(1 + strategy.instance_index)})["scale"])]
        counter = strategy.variable({"steps": np.float32(0)})
    for epoch in range(2):
        for number, batch in enumerate(training.epoch(epoch)):
            first, metrics = one.step(first, batch)
            found.append(metrics["loss"])
            if metrics["loss"] > found[-2]:
                worse += 1
                second, metrics = other.step(second, batch)
                found.append(metrics["loss"])
            if number % 3 == 1:
                found.append(one.evaluate(first, testing)["loss"])
            if number % 4 == 2:
                strategy.on_chief(functools.partial(duties.append, number))
        found.append(worse)
        if not has_collectives:
            continue
        total = strategy.reduce("sum", strategy.per_replica(lambda replica, epoch=epoch: np.float32(replica + epoch)))
        rows_of = strategy.gather(strategy.per_replica(lambda replica, epoch=epoch: np.float32([replica, epoch])), 0)
        counter.assign({"steps": np.float32(total)})
        found += [float(total), rows_of.tolist(), float(counter.value["steps"])]
    return found, strategies.fingerprint((first, second))


@pytest.mark.parametrize(
    ("lost", "step", "phase"),
    [
        (0, 4, "update"),
        (1, 9, "forward"),
        *[
            pytest.param(lost, step, phase, marks=pytest.mark.complete)
            for lost, step, phase in itertools.product((0, 1), (0, 1, 5, 8, 9), ("forward", "all_reduce", "update"))
            if (step, phase) != (8, "all_reduce")  # in `strategy.reduce`, which no job survives
        ],
    ],
)
def test_a_spare_replays_whatever_the_program_does(lost, step, phase):
    run(adversarial, [f"kill:instance={lost},step={step},phase={phase}"])


SURVIVABLE = functools.partial(adversarial, has_collectives=False)


def lose_at_message(number, lost):
    """Lose an instance at a message of the whole program; return whether there is such a message."""
    fault = OnMessage(lost, number)

    def program(strategy):
        if strategy.replicas.first_index == lost and not strategy.replicas.is_spare:
            fault.begin()
        try:
            return SURVIVABLE(strategy)
        finally:
            if strategy.replicas.first_index == lost:
                fault.end()

    found = run_with_spares(2, 1, REPLICAS, program, mechanism="ring", hub=ThreadHub(3, fault))
    assert [each for each in found if each not in (None, ASLEEP)] == [alone(SURVIVABLE)] * 2, f"message {number}"
    return fault.has_struck


@pytest.mark.complete
@pytest.mark.parametrize("lost", [0, 1])
def test_a_spare_comes_along_after_a_loss_at_every_message(lost):
    number = 0
    while lose_at_message(number, lost):
        number += 1
    assert number > 20


def accumulating(strategy):
    """Train with accumulation, loss scaling in float16, and a model state."""

    def with_state(variables, batch, key, state):
        noise = jnp.sum(jnp.zeros(1, jnp.float16))
        mean = 0.9 * state["mean"] + 0.1 * batch.mean()
        return Outcome(loss_fn(variables, batch, key) + noise, {"mean": mean}, {**state, "mean": mean})

    dataset = strategy.distribute_dataset(rows(), 2, gradient_accumulation_count=2, remainder="drop")
    trainer = strategies.Trainer(
        strategy,
        with_state,
        optax.adam(0.05),
        gradient_accumulation_count=2,
        compute_dtype="float16",
        loss_scaling=strategies.LossScaling(2.0**15, interval=2),
    )
    state, found = trainer.init(start(), {"mean": np.float32(0), "seen": np.int32(0)}), []
    for epoch in range(2):
        for batch in dataset.epoch(epoch):
            state, metrics = trainer.step(state, batch)
            found.append(dict(metrics))
    return found, strategies.fingerprint(state)


@pytest.mark.parametrize("step", [5, *[pytest.param(step, marks=pytest.mark.complete) for step in (0, 1)]])
def test_accumulation_loss_scaling_and_model_state_come_along(step):
    run(accumulating, [f"kill:instance=1,step={step},phase=all_reduce"])


def stopping_early(strategy):
    """Evaluate in each epoch, and stop when the loss no longer falls."""
    dataset = strategy.distribute_dataset(rows(24), 2)
    testing = strategy.distribute_dataset(rows(31), 2, shuffle=False, remainder="pad")
    trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.3))
    state, best, epoch = trainer.init(start()), float("inf"), 0
    while epoch < 20:
        for batch in dataset.epoch(epoch):
            state, _ = trainer.step(state, batch)
        loss = trainer.evaluate(state, testing)["loss"]
        epoch += 1
        if loss > best * 0.999:
            break
        best = loss
    return epoch, best, strategies.fingerprint(state)


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.complete)])
def test_a_program_that_stops_early_stops_at_the_same_epoch(step):
    epoch, _, _ = run(stopping_early, [f"kill:instance=0,step={step},phase=update"])
    assert 3 < epoch < 20


def running(strategy):
    """Train with `run`, in executions of three steps."""
    dataset = strategy.distribute_dataset(rows(), 2)
    trainer = strategies.Trainer(strategy, loss_fn, optax.adam(0.1))
    state, found = trainer.init(start()), []
    for _ in range(2):
        state, _ = trainer.run(state, dataset, 3, lambda state, metrics: found.append((state.step, metrics["loss"])))
    return found, strategies.fingerprint(state)


def test_run_replays_each_step():
    run(running, ["kill:instance=0,step=4,phase=update"])


# ---- checkpoints


def saving(strategy, folder, until=0):
    """Save after every second step, and continue from the newest checkpoint."""
    dataset = strategy.distribute_dataset(rows(48), 2)
    trainer = strategies.Trainer(strategy, loss_fn, optax.adam(0.1))
    with strategies.Checkpoints(folder, trainer, dataset, every=2) as checkpoints:
        state, found = checkpoints.restore(trainer.init(start())), [dict(checkpoints.extra)]
        for epoch in range(dataset.position().epoch, 2):
            for batch in dataset.epoch(epoch):
                state, metrics = trainer.step(state, batch)
                found.append((state.step, metrics["loss"]))
                checkpoints.after_step(state, extra={"loss": metrics["loss"]})
                checkpoints.wait()  # so that the next checkpoint is not late
                if state.step == until:
                    return found, strategies.fingerprint(state)
    return found, strategies.fingerprint(state)


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.complete)])
def test_a_training_goes_on_from_a_checkpoint_and_a_spare_comes_along(tmp_path, lost):
    pytest.importorskip("orbax.checkpoint")
    whole = functools.partial(saving, folder=tmp_path / "whole")
    [(steps, bits)] = run_instances(1, REPLICAS, whole)
    rest = functools.partial(saving, folder=tmp_path / "in parts")
    first = functools.partial(rest, until=4)
    found = run_with_spares(2, 1, REPLICAS, first, [f"kill:instance={lost},step=2,phase=all_reduce"])
    assert [each[0][1:] for each in found if each is not None] == [steps[1:5]] * 2
    found = run_with_spares(2, 1, REPLICAS, rest, [f"kill:instance={lost},step=6,phase=update"])
    left = [each for each in found if each is not None]
    assert left == [([{"loss": steps[4][1]}, *steps[5:]], bits)] * 2


# ---- spares that do not fit


def train(strategy, of_spare=lambda strategy: 0.1, after_step=lambda trainer, state, batch: None):
    """Train with a learning rate that `of_spare` chooses on the spare, and call `after_step` after each step."""
    dataset = strategy.distribute_dataset(rows(), 2)
    rate = of_spare(strategy) if strategy.replicas.is_spare else 0.1
    trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(rate))
    state = trainer.init(start())
    for batch in dataset.epoch(0):
        state, _ = trainer.step(state, batch)
        after_step(trainer, state, batch)
    return strategies.fingerprint(state)


def gives_up(program, faults, match):
    """Check that the spare ends with an error, and the other instance has the results of one process."""
    found = run_with_spares(2, 1, REPLICAS, program, faults)
    expected = alone(train)
    assert isinstance(found[2], SpareError)
    assert match in str(found[2])
    assert [each for each in found[:2] if each is not None] == [expected] * (2 - len(faults))


KILL = "kill:instance=1,step=3,phase=all_reduce"


def test_a_spare_with_another_program_is_refused_before_anybody_computes_with_it():
    gives_up(functools.partial(train, of_spare=lambda strategy: 0.2), [KILL], "its digest of the programs for batch")


def test_a_spare_that_does_another_operation_ends_at_once():
    def other(strategy):
        strategy.on_chief(lambda: None)
        return 0.1

    gives_up(functools.partial(train, of_spare=other), [], "does 'duty of the chief' where the active instances have")


def test_a_spare_that_reads_other_data_is_refused():
    def program(strategy):
        dataset = strategy.distribute_dataset(rows(), 2)
        if strategy.replicas.is_spare:
            dataset.restore(strategies.Position(**{**dataset.position().to_dict(), "step": 1}))
        trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1))
        state = trainer.init(start())
        for batch in dataset.epoch(0):
            state, _ = trainer.step(state, batch)
        return strategies.fingerprint(state)

    gives_up(program, [KILL], "its position in the data set is [0, 5], but on the active instances it is [0, 4]")


def test_a_spare_that_reads_variables_ends_and_says_what_to_do():
    def read_variables(trainer, state, batch):
        np.asarray(state.variables["w"])

    gives_up(functools.partial(train, after_step=read_variables), [], "read them in strategy.on_chief, or use metrics")


def test_a_spare_reads_no_batches():
    def read_batch(trainer, state, batch):
        np.asarray(batch)

    gives_up(functools.partial(train, after_step=read_batch), [], "a spare reads no data before it becomes active")


@pytest.mark.parametrize("name", ["predict", "run", "communicator"])
def test_an_operation_that_a_spare_cannot_replay_raises_one_clear_error(name):
    says = {
        "predict": "a spare cannot replay",
        "run": "a spare takes part in no collective",
        "communicator": "a spare has no communicator",
    }

    def operate(trainer, state, batch):
        strategy = trainer.strategy
        if name == "predict":
            testing = strategy.distribute_dataset(rows(31), 2, shuffle=False, remainder="pad")
            list(trainer.predict(state, testing, lambda variables, batch, key: batch @ variables["w"]))
        elif name == "run":
            strategy.run(lambda: strategies.get_replica_context().all_reduce("sum", jnp.float32(1)))
        else:
            strategy.communicator.barrier()

    gives_up(functools.partial(train, after_step=operate), [], says[name])


def test_a_spare_whose_copy_has_other_bits_is_refused(monkeypatch):
    from strategies.jax.engine import JaxEngine, flipped

    fill = JaxEngine.fill
    monkeypatch.setattr(JaxEngine, "fill", lambda self, state, values: fill(self, state, flipped(values)))
    gives_up(train, [KILL], "the variables have other bits here than on rank 0")


# ---- variables that are read where the spare joins


def test_a_spare_may_join_where_the_program_reads_variables():
    """The others are in the next step meanwhile."""

    def program(strategy):
        trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1))
        state, sums = trainer.init(start()), []
        for batch in strategy.distribute_dataset(rows(), 2).epoch(0):
            state, _ = trainer.step(state, batch)
            if state.step in (3, 5):
                sums.append(float(np.asarray(state.variables["w"]).sum()))
        return sums, strategies.fingerprint(state)

    run(program, ["kill:instance=1,step=3,phase=forward"])
