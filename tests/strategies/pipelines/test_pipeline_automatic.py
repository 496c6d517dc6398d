"""schedule="auto" in a Trainer: stages are measured, all instances choose one schedule, and no bit changes."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from losing import OnMessage
from surviving_instances import run_instances

import strategies
from collectives import ThreadHub
from strategies.pipelines import advice
from strategies.pipelines.advice import MIB

REPLICAS, COUNT, ROWS, WIDTH = 4, 4, 2, 8
START = {"first": np.full((3, WIDTH), 0.1, np.float32), "last": np.ones(WIDTH, np.float32)}


def loss_fn(variables, batch, key):
    with strategies.pipeline_stage(0):
        kept = jax.random.bernoulli(key, 0.9, (len(batch), 1))
        hidden = jnp.tanh(jnp.where(kept, batch, 0) @ variables["first"])
    with strategies.pipeline_stage(1):
        return jnp.mean((hidden @ variables["last"] - 1) ** 2)


def meeting(variables, batch, key):
    with strategies.pipeline_stage(0):
        hidden = strategies.get_replica_context().all_reduce("mean", batch @ variables["first"])
    with strategies.pipeline_stage(1):
        return jnp.mean(hidden @ variables["last"])


def trained(strategy, pipeline, loss_fn=loss_fn):
    trainer = strategies.Trainer(
        strategy, loss_fn, optax.sgd(0.1, momentum=0.9), gradient_accumulation_count=COUNT, pipeline=pipeline
    )
    state, rows = trainer.init(START), COUNT * ROWS
    for step in range(2):
        of_all = np.random.default_rng(step).standard_normal((REPLICAS * rows, 3)).astype(np.float32)
        mine = strategy.local_replicas
        state, _ = trainer.step(state, of_all[mine.start * rows : mine.stop * rows])
    return strategies.fingerprint(state.variables)


def one_instance(devices=2):
    return strategies.IPUStrategy(num_replicas=REPLICAS, ipus_per_replica=devices)


@pytest.fixture(scope="module")
def reference():
    return trained(one_instance(1), strategies.Pipelining([0, 0], "sequential"))


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, "strategies.pipelines")
    return lambda: [one.getMessage() for one in caplog.records if "was chosen" in one.getMessage()]


@pytest.mark.parametrize("instances", [2, pytest.param(4, marks=pytest.mark.complete)])
def test_all_instances_choose_the_same_and_no_bit_changes(instances, reference, on_instances, said):
    automatic = strategies.Pipelining([0, 1], "auto", memory_limit_bytes=MIB)
    found = on_instances(instances, REPLICAS, lambda strategy: trained(strategy, automatic), ipus_per_replica=2)
    assert found == [reference] * instances
    assert len(said()) == instances
    assert len(set(said())) == 1
    assert "ways to run it that keep at most 1 MiB on a device" in said()[0]


class InCall:
    """An instrument that makes a fault count from the first call of a collective on."""

    def __init__(self, name, fault):
        self._name = name
        self._fault = fault

    def operation_begins(self, number, call):
        if call.name == self._name:
            self._fault.begin()


def trained_with_losses(strategy):
    trainer = strategies.Trainer(
        strategy,
        loss_fn,
        optax.sgd(0.1),
        gradient_accumulation_count=COUNT,
        pipeline=strategies.Pipelining([0, 0], "auto"),
    )
    rows = np.random.default_rng(0).standard_normal((2 * 6 * COUNT * ROWS, 3)).astype(np.float32)
    dataset = strategy.distribute_dataset(rows, ROWS, gradient_accumulation_count=COUNT)
    state = trainer.init(START)
    for batch in dataset.epoch(0):
        state, _ = trainer.step(state, batch)
    return strategies.fingerprint(state.variables)


@pytest.mark.complete
@pytest.mark.parametrize(
    "name",
    ["times of the stages of a pipeline", "digests of options and programs"],
)
def test_survivors_agree_on_a_plan_that_only_some_had_at_the_loss(name):
    """The message of the lost instance reaches only one other instance, so the survivors are not equally far."""
    fault = OnMessage(0, 1)
    found = run_instances(
        3, 6, trained_with_losses, mechanism="ring", hub=ThreadHub(3, fault), instruments={0: InCall(name, fault)}
    )
    assert fault.has_struck
    [alone] = run_instances(1, 6, trained_with_losses)
    assert found == [None, alone, alone]


def test_a_tighter_memory_limit_changes_the_choice(reference, said):
    """Two micro-batches of stage 0, each 2 x 8 numbers of 4 bytes and some more, exceed the limit."""
    assert trained(one_instance(), strategies.Pipelining([0, 1], "auto", memory_limit_bytes=200)) == reference
    [one] = said()
    assert one.startswith("sequential was") or "with recomputation was chosen" in one
    with pytest.raises(ValueError, match="no pipeline schedule keeps at most 1 bytes on a device"):
        trained(one_instance(), strategies.Pipelining([0, 1], "auto", memory_limit_bytes=1))


def test_stages_that_call_collectives_run_one_after_another(said):
    assert len(trained(one_instance(), strategies.Pipelining([0, 1], "auto"), meeting)) == 64
    assert said() == ["sequential was chosen, because stages of the pipeline call collectives"]


def test_times_and_bytes_match_the_stages():
    pipeline = strategies.Pipelining([0, 1], "sequential")
    strategy = one_instance()
    trainer = strategies.Trainer(
        strategy, loss_fn, optax.sgd(0.1), gradient_accumulation_count=COUNT, pipeline=pipeline
    )
    trainer.step(trainer.init(START), np.ones((REPLICAS * COUNT * ROWS, 3), np.float32))
    [plan] = [plan.gradients.stages for plan in trainer._programs._plans.values()]
    times, stash = advice.measured(plan, [column.device_of(0) for column in strategy.replicas.grid.columns])
    assert times.num_stages == 2
    assert min(times.forward) > 0
    assert stash.inputs == (0, ROWS * WIDTH * 4)
    assert stash.stashed[1] >= stash.inputs[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "auto", "recompute": True}, "decides on both"),
        ({"schedule": "auto", "batch_serialization_iterations": 2}, "decides on both"),
        ({"schedule": "grouped", "memory_limit_bytes": 100}, "uses a limit"),
        ({"memory_limit_bytes": 100}, "uses a limit"),
        ({"schedule": "auto", "memory_limit_bytes": 0}, "memory_limit_bytes is 0"),
    ],
)
def test_options_that_contradict_auto_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        strategies.Pipelining([0, 1], **options)
