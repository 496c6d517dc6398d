"""Memory plans, made before anything runs, compared with the memory of trainings."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kept_of_stages import kept_bytes
from tiers import first_of

import strategies
from strategies import Outcome, Trainer
from strategies.jax.memory.plan import DEVICE, HOST, SHARED, MemoryPlan, bytes_text
from strategies.pipelines.timetable import ActionKind

WIDTH = 700
"""Width at which a gradient takes more than 1 MiB, and so has its own buffer."""
REPLICAS = 4


def variables():
    return {"kernel": np.ones((WIDTH, WIDTH), np.float32), "bias": np.ones(WIDTH, np.float16)}


def loss_fn(variables, batch, key):
    return jnp.mean((batch["x"] @ variables["kernel"] + variables["bias"]) ** 2), {}


def with_state(variables, batch, key, model_state):
    loss, _ = loss_fn(variables, batch, key)
    return Outcome(loss, {}, model_state)


def in_stages(variables, batch, key):
    hidden = batch["x"]
    with strategies.pipeline_stage(0):
        hidden = jnp.tanh(hidden @ variables["kernel"])
    with strategies.pipeline_stage(1):
        return jnp.mean((hidden + variables["bias"]) ** 2), {}


def batch_for(strategy, rows=4):
    return {"x": np.ones((rows * len(strategy.local_replicas), WIDTH), np.float32)}


def shapes_of(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def nbytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def planned(plan, what):
    return sum(each.nbytes for each in plan.held if each.what == what)


def held_by(trainer, state, batch):
    """Return the memory that a training holds after a step, by the names of the plan."""
    state, _ = trainer.step(state, batch)
    (step,) = trainer._programs._steps.values()
    results = [array for bucket in step.gradients.buckets for array in bucket.results]
    return {
        "variables": nbytes(state.variables),
        "optimizer state": nbytes(state.optimizer_state),
        "model state": nbytes(state.model_state),
        "gradients": sum(nbytes(run.buffers) for run in step.gradients._runs),
        "means": nbytes(results),
        "batch": nbytes(batch),
    }


def check_plan(strategy, loss=loss_fn, optimizer=None, model_state=None, **options):
    """Return the plan of a training after checking it."""
    trainer = Trainer(strategy, loss, optimizer or optax.adam(1e-3), **options)
    batch = batch_for(strategy)
    before = trainer.plan(shapes_of(batch), shapes_of(variables()), model_state)
    state = trainer.init(variables(), model_state)
    plan = trainer.plan(batch)
    assert plan == before, "arrays and shapes are the same to it"
    held = held_by(trainer, state, batch)
    means = held.pop("means")
    assert planned(plan, "mean gradients") + planned(plan, "mean gradients in the window") == means
    assert {what: planned(plan, what) for what in held} == held
    return plan


OPTIONS = {
    "plain": {},
    "accumulated": {"gradient_accumulation_count": 2},
    "offloaded": {"offload_optimizer_state": True, "replicated_optimizer_state_sharding": False},
    "sharded": {"replicated_optimizer_state_sharding": True},
    "sharded and looked at across elements": {
        "replicated_optimizer_state_sharding": True,
        "optimizer": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
    },
    "scaled": {"loss_scaling": "dynamic", "compute_dtype": jnp.bfloat16},
    "of 16 bits": {"gradient_transfer_dtype": jnp.bfloat16},
    "of 8 bits": {"gradient_transfer_dtype": jnp.int8},
    "with a model state": {"loss": with_state, "model_state": {"seen": np.zeros(3, np.float32)}},
}


FEW = ("sharded",)
ALONE = ("accumulated", "sharded", "of 8 bits")
"""Options that one instance plans too, where gradients are not exchanged; other tests cover plain options there."""


@pytest.mark.parametrize(
    ("instances", "options"),
    [
        pytest.param(
            instances,
            options,
            id=f"{instances}-{name}",
            marks=() if name in FEW and instances == 2 else pytest.mark.complete,
        )
        for name, options in OPTIONS.items()
        for instances in ((2, 1) if name in ALONE else (2,))
    ],
)
def test_a_plan_matches_the_memory_of_a_training(options, instances, on_instances):
    plans = on_instances(instances, REPLICAS, lambda strategy: check_plan(strategy, **options))
    assert [plan.instance for plan in plans] == list(range(instances))
    if options.get("replicated_optimizer_state_sharding"):
        whole = check_plan(strategies.IPUStrategy(REPLICAS), optimizer=options.get("optimizer"))
        part = planned(plans[0], "optimizer state") / planned(whole, "optimizer state")
        assert part == pytest.approx(1 / instances, rel=1e-3)
    if options.get("offload_optimizer_state"):
        assert next(each.where for each in plans[0].held if each.what == "optimizer state") == HOST


@pytest.mark.complete
def test_shared_means_are_listed_separately(on_instances):
    for plan in on_instances(2, REPLICAS, check_plan, mechanism="window"):
        shared = {each.what: each.nbytes for each in plan.held if each.where == SHARED}
        assert shared["mean gradients in the window"] >= WIDTH * WIDTH * 4
        assert shared["window"] > 0
    plan = check_plan(strategies.IPUStrategy(REPLICAS))
    assert not [each for each in plan.held if each.where == SHARED]


def test_a_plan_of_a_pipeline_lists_the_stash_of_its_stages():
    strategy = strategies.IPUStrategy(2, ipus_per_replica=2)
    pipelining = strategies.Pipelining([0, 1], "grouped")
    plan = check_plan(strategy, in_stages, pipeline=pipelining, gradient_accumulation_count=4)
    hidden = 1 * WIDTH * 4  # for a micro-batch of one row
    assert [each.stage for each in plan.kept] == [0, 1]
    assert [each.micro_batches for each in plan.kept] == [3, 1]
    assert hidden <= plan.kept[0].nbytes <= 3 * hidden
    assert planned(plan, "sums of gradients") == 2 * nbytes(variables())
    names = [each.name for each in plan.programs]
    assert {"stage 0, forward", "stage 1, backward for weights", "end of the step", "update"} <= set(names)
    assert plan.held_bytes == sum(each.nbytes for each in plan.held) + 2 * (
        3 * plan.kept[0].nbytes + plan.kept[1].nbytes
    )


@pytest.mark.parametrize("recomputes", first_of([True, False]))
def test_a_stage_keeps_no_more_of_a_micro_batch_than_is_planned(recomputes):
    strategy = strategies.IPUStrategy(1, ipus_per_replica=2)
    pipelining = strategies.Pipelining([0, 1], "grouped", recompute=recomputes)
    trainer = Trainer(strategy, in_stages, optax.sgd(0.1), pipeline=pipelining, gradient_accumulation_count=4)
    state, batch = trainer.init(variables()), batch_for(strategy)
    plan = trainer.plan(batch)
    step = trainer._programs.prepare(state, batch)
    found = {}
    (run,) = step.gradients._runs
    perform = run._perform

    def look(device, action):
        perform(device, action)
        if action.kind is ActionKind.FORWARD:
            segments = run._replica.segments_of(device, action.stage)
            kept = sum(kept_bytes(run._replica, each, action.micro_batch) for each in segments)
            found.setdefault(action.stage, []).append(kept)

    run._perform = look
    trainer.step(state, batch)
    for kept in plan.kept:
        assert max(found[kept.stage]) <= kept.nbytes <= max(found[kept.stage]) + 2 * WIDTH * 4
    if recomputes:
        assert plan.kept[0].nbytes == 0, "its arguments are the step's"


@pytest.mark.complete
def test_a_checkpoint_holds_the_whole_state(on_instances):
    plans = on_instances(2, REPLICAS, lambda strategy: check_plan(strategy, replicated_optimizer_state_sharding=True))
    whole = check_plan(strategies.IPUStrategy(REPLICAS))
    expected = planned(whole, "variables") + planned(whole, "optimizer state")
    assert [planned(plan, "checkpoint") for plan in plans] == [expected, 0]


def test_batches_that_are_read_ahead_are_counted():
    strategy = strategies.IPUStrategy(2)
    trainer = Trainer(strategy, loss_fn, optax.sgd(0.1))
    trainer.init(variables())
    dataset = strategy.distribute_dataset({"x": np.ones((64, WIDTH), np.float32)}, batch_size=4, prefetch=3)
    batch = next(iter(dataset.epoch(0)))
    plan = trainer.plan(batch)
    assert planned(plan, "batches read ahead") == 3 * planned(plan, "batch") == 3 * 8 * WIDTH * 4


def test_programs_have_the_sizes_reported_by_xla():
    plan = check_plan(strategies.IPUStrategy(2))
    gradients, update = plan.programs
    assert (gradients.name, gradients.at_once) == ("gradients", 2)
    assert gradients.outputs >= nbytes(variables())
    assert gradients.reused >= nbytes(variables()), "gradients of a step lie in the memory of those before"
    assert (update.name, update.at_once) == ("update", 1)
    assert update.arguments >= planned(plan, "variables") + planned(plan, "optimizer state")
    assert plan.temporary_bytes == max(2 * gradients.temporaries, update.temporaries)


def test_a_plan_is_a_table_and_json():
    plan = check_plan(strategies.IPUStrategy(2))
    told = json.loads(json.dumps(plan.to_json()))
    assert told["held_bytes"] == plan.held_bytes
    assert told["held"][0] == {
        "what": "variables",
        "nbytes": nbytes(variables()),
        "where": DEVICE,
        "note": "once for all local replicas",
    }
    assert [each["name"] for each in told["programs"]] == ["gradients", "update"]
    text = str(plan)
    assert re.match(
        r"Instance 0, 2 replicas: holds [\d.]+ MiB, and up to [\d.]+ [KMG]?i?B more while it computes", text
    )
    assert re.search(r"^variables +1\.87 MiB  device  once for all local replicas$", text, re.MULTILINE)
    assert re.search(r"^update +[\d.]+ MiB ", text, re.MULTILINE)
    assert plan.nbytes("variables") == nbytes(variables())
    with pytest.raises(KeyError, match="use one of variables, optimizer state"):
        plan.nbytes("anything")


def test_a_plan_needs_variables():
    strategy = strategies.IPUStrategy(1)
    with pytest.raises(ValueError, match="plan was called before init"):
        Trainer(strategy, loss_fn, optax.sgd(0.1)).plan(batch_for(strategy))


@pytest.mark.parametrize(
    ("nbytes", "text"), [(17, "17 B"), (3 << 10, "3 KiB"), (1023 << 20, "1023 MiB"), (5 << 29, "2.5 GiB")]
)
def test_sizes_are_printed_in_a_suitable_unit(nbytes, text):
    assert bytes_text(nbytes) == text
    assert MemoryPlan(0, 1, []).held_bytes == 0
