"""Pipelines of a Trainer: the same bits for every schedule, mapping and spread, and refusals of cuts."""

from __future__ import annotations

import gc
import itertools
import shutil
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from surviving_instances import run_instances
from tiers import also, only
from zoo.pipelines import MODELS, trained

import strategies
from strategies import pipelining_ops
from strategies.jax.preparation import control_of
from strategies.pipelines.timetable import SCHEDULES

REPLICAS = 4

pytestmark = pytest.mark.long


def one_instance(devices):
    return strategies.IPUStrategy(num_replicas=REPLICAS, ipus_per_replica=devices)


@pytest.fixture(scope="module")
def references():
    """Provide, for each model, the results of its stages one after another on one device."""
    found = {}

    def of(name):
        if name not in found:
            model = MODELS[name]
            found[name] = trained(one_instance(1), model, strategies.Pipelining([0] * model.stages, "sequential"))
        return found[name]

    return of


FEW = [("batch norm", "grouped", 0, True, 2), also("cnn", "zero_bubble", 1, False, 4)]


@pytest.mark.parametrize(("name", "schedule", "mapping", "recomputes", "instances"), FEW)
def test_schedules_mappings_and_spreads_have_the_same_bits(
    name, schedule, mapping, recomputes, instances, references, on_instances
):
    model = MODELS[name]
    pipeline = strategies.Pipelining(model.mappings[mapping], schedule, recomputes)
    found = on_instances(instances, REPLICAS, lambda strategy: trained(strategy, model, pipeline), ipus_per_replica=4)
    assert found == [references(name)] * instances


def every_case():
    """Yield each model with each schedule, and in turn with one of the mappings of this schedule."""
    for number, ((name, model), schedule) in enumerate(itertools.product(MODELS.items(), SCHEDULES)):
        possible = [each for each in model.mappings if schedule != "interleaved" or len(set(each)) == len(each)]
        if possible:
            yield name, schedule, possible[number % len(possible)]


IN_TURN = [*itertools.product((1, 2, 4), (False, True))]
"""Pairs of a number of instances and whether stages recompute; replicas do not affect each other's bits."""


@pytest.mark.complete
@pytest.mark.parametrize(
    ("name", "schedule", "mapping", "instances", "recomputes"),
    [(*case, *IN_TURN[number % len(IN_TURN)]) for number, case in enumerate(every_case())],
)
def test_every_model_schedule_and_mapping_has_the_same_bits(
    name, schedule, mapping, instances, recomputes, references, on_instances
):
    pipeline = strategies.Pipelining(mapping, schedule, recomputes)
    found = on_instances(
        instances, REPLICAS, lambda strategy: trained(strategy, MODELS[name], pipeline), ipus_per_replica=4
    )
    assert found == [references(name)] * instances


# ---- with other options


WIDTH = 7
START = {"first": np.linspace(-1, 1, 3 * WIDTH, dtype=np.float32).reshape(3, WIDTH), "last": np.ones(WIDTH, np.float32)}
COUNT = 4


def pair(variables, batch, key):
    """Compute two stages; code around them belongs to the stage that needs it."""
    doubled = {name: 2 * value for name, value in variables.items()}
    with strategies.pipeline_stage(0):
        hidden = jnp.tanh(batch @ doubled["first"])
    with strategies.pipeline_stage(1):
        loss = jnp.mean((hidden @ doubled["last"] - 1) ** 2)
    return loss, {"hidden": hidden.mean()}


def numbers(strategy, step=0, rows=2 * COUNT):
    of_all = np.random.default_rng(step).standard_normal((REPLICAS * rows, 3)).astype(np.float32)
    mine = strategy.local_replicas
    return of_all[mine.start * rows : mine.stop * rows]


def steps(strategy, pipeline=None, loss_fn=pair, count=COUNT, steps=2, **options):
    """Return the state after some steps, and the metrics of the last one."""
    trainer = strategies.Trainer(
        strategy, loss_fn, optax.sgd(0.1, momentum=0.9), gradient_accumulation_count=count, pipeline=pipeline, **options
    )
    state = trainer.init(START)
    for step in range(steps):
        state, metrics = trainer.step(state, numbers(strategy, step))
    return state, metrics


def test_stages_that_differ_in_their_constants_have_programs_of_their_own():
    """The masks of coupling layers have the same numbers in other places."""
    mask = np.float32([1] * 8 + [0] * 8)

    def couplings(variables, batch, key):
        with strategies.pipeline_stage(0):
            rows = jnp.repeat(batch[:, :1], 16, 1)
        for number, of_stage in enumerate([mask, 1 - mask]):
            with strategies.pipeline_stage(number + 1):
                kept = rows * of_stage
                rows = kept + jnp.tanh(kept @ variables["layers"][number])
        with strategies.pipeline_stage(3):
            return jnp.mean((rows - jnp.arange(16.0)) ** 2)

    start = {"layers": [np.full((16, 16), 0.1, np.float32)] * 2}
    found = []
    for pipeline in (None, strategies.Pipelining([0, 1, 2, 3], "grouped")):
        strategy = strategies.IPUStrategy(1, ipus_per_replica=1 if pipeline is None else 4)
        trainer = strategies.Trainer(
            strategy, couplings, optax.sgd(0.1), gradient_accumulation_count=8, pipeline=pipeline
        )
        state, metrics = trainer.step(trainer.init(start), numbers(strategy, rows=16)[:16])
        found.append(state.variables["layers"])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


GROUPED = strategies.Pipelining([0, 1], "grouped")
SEQUENTIAL = strategies.Pipelining([0, 0], "sequential", recompute=True)
OPTIONS = {
    "sum": {"reduction_method": "sum"},
    "running mean in bfloat16": {"reduction_method": "running_mean", "gradient_accumulation_dtype": jnp.bfloat16},
    "loss scaling in bfloat16": {"compute_dtype": jnp.bfloat16, "loss_scaling": "dynamic"},
    "on the way in bfloat16": {"gradient_transfer_dtype": jnp.bfloat16, "check_numerics": True},
    "sharded": {"replicated_optimizer_state_sharding": True, "min_elements_for_sharding": 1},
    "one variable": {"trainable": {"first": True, "last": False}, "digest_every": 1},
}


@pytest.mark.parametrize(
    "name",
    only(["sharded"], OPTIONS),
)
def test_other_options_of_the_step_work_in_a_pipeline(name, on_instances):
    options = OPTIONS[name]

    def made(strategy, pipeline):
        state, metrics = steps(strategy, pipeline, **options)
        return strategies.fingerprint(state.variables), dict(metrics)

    [one] = on_instances(1, REPLICAS, lambda strategy: made(strategy, SEQUENTIAL))
    assert on_instances(2, REPLICAS, lambda strategy: made(strategy, GROUPED), ipus_per_replica=2) == [one] * 2
    if name in ("sum", "loss scaling in bfloat16"):  # other options would only compile more
        _, metrics = steps(one_instance(1), **options)
        np.testing.assert_allclose(metrics["loss"], one[1]["loss"], rtol=1e-5 if name == "sum" else 0.05)
        assert set(metrics) == set(one[1])


def test_gradients_that_overflow_are_dropped_on_all_replicas(on_instances):
    def huge(variables, batch, key):
        loss, metrics = pair(variables, batch, key)
        return loss * 1e38 * 1e3, metrics

    def made(strategy):
        state, metrics = steps(strategy, GROUPED, huge, steps=1, loss_scaling="dynamic")
        return metrics["skipped_steps"], strategies.fingerprint(state.variables)

    assert on_instances(2, REPLICAS, made, ipus_per_replica=2) == [(1.0, strategies.fingerprint(START))] * 2
    with pytest.raises(strategies.NonFiniteGradientError, match=r"\['first'\] on replica 0"):
        steps(one_instance(2), GROUPED, huge, check_numerics=True)


def test_an_update_without_accumulation_is_one_micro_batch():
    alone = steps(one_instance(1), strategies.Pipelining([0, 0], "sequential"), count=1)
    apart = steps(one_instance(2), strategies.Pipelining([0, 1], "one_forward_one_backward"), count=1)
    assert strategies.fingerprint(alone[0].variables) == strategies.fingerprint(apart[0].variables)


# ---- order and failures


def test_gradients_of_a_stage_leave_while_other_stages_run():
    """The first stage cannot go back until the gradients of the last one have left."""
    has_left, waited = threading.Event(), []

    def late(value):
        waited.append(has_left.wait(30))
        return value

    @jax.custom_vjp
    def held(value):
        return value

    held.defvjp(lambda value: (value, None), lambda _, slope: (jax.pure_callback(late, slope, slope),))

    def loss_fn(variables, batch, key):
        with strategies.pipeline_stage(0):
            hidden = held(jnp.tanh(batch @ variables["first"]))
        with strategies.pipeline_stage(1):
            return jnp.mean(hidden @ variables["last"])

    strategy = strategies.IPUStrategy(num_replicas=1, ipus_per_replica=2)
    trainer = strategies.Trainer(
        strategy, loss_fn, optax.sgd(0.1), pipeline=strategies.Pipelining([0, 1], "one_forward_one_backward")
    )
    state = trainer.init(START)
    programs, batch = trainer._programs, np.ones((2, 3), np.float32)
    gradients = programs.prepare(state, batch).gradients
    gradients.dispatch(*programs.arguments(state, batch, control_of(state)))
    names = []
    for bucket, _ in gradients.collect():
        names.append(bucket.name)
        has_left.set()
    assert names == ["gradients/0", "gradients/1", "gradients/tail"]
    assert waited == [True]


def test_the_watch_gets_the_spans_of_all_devices_after_each_step():
    seen = []
    pipeline = strategies.Pipelining([0, 1], "grouped", watch=seen.append)
    steps(one_instance(2), pipeline)
    assert len(seen) == 2
    assert list(seen[0]) == list(range(REPLICAS))
    for spans in seen[0].values():
        expected = pipeline.timetable(2, COUNT)
        assert sorted(str(span.action) for span in spans) == sorted(
            str(action) for actions in expected.devices for action in actions
        )
        assert all(0 <= span.begin_s <= span.end_s for span in spans)


def test_a_batch_is_freed_after_its_step():
    strategy = one_instance(2)
    trainer = strategies.Trainer(strategy, pair, optax.sgd(0.1), gradient_accumulation_count=COUNT, pipeline=GROUPED)
    batch = numbers(strategy)
    is_there = weakref.ref(batch)
    trainer.step(trainer.init(START), batch)
    del batch
    gc.collect()
    assert is_there() is None


def test_at_most_as_many_devices_as_cores_recompute_concurrently(pretend_one_core):
    pretend_one_core()
    seen = []
    pipeline = strategies.Pipelining([0, 1], "grouped", recompute=True, watch=seen.append)
    steps(strategies.IPUStrategy(2, ipus_per_replica=2), pipeline, steps=1)
    spans = sorted((span.begin_s, span.end_s) for of_replica in seen[0].values() for span in of_replica)
    assert len(spans) == 2 * (2 * 2 * COUNT + 2)
    assert all(begin >= end for (_, end), (begin, _) in itertools.pairwise(spans))


def test_a_stage_that_fails_fails_the_step_and_not_the_next_one():
    is_bad = [False]

    def check(value):
        if is_bad[0]:
            raise ArithmeticError("stage 1 cannot")
        return value

    def loss_fn(variables, batch, key):
        with strategies.pipeline_stage(0):
            hidden = jnp.tanh(batch @ variables["first"])
        with strategies.pipeline_stage(1):
            scale = jax.pure_callback(check, jax.ShapeDtypeStruct((), np.float32), jax.lax.stop_gradient(hidden[0, 0]))
            return jnp.mean(hidden @ variables["last"]) * scale

    strategy = one_instance(2)
    trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1), gradient_accumulation_count=COUNT, pipeline=GROUPED)
    state = trainer.init(START)
    is_bad[0] = True
    with pytest.raises(jax.errors.JaxRuntimeError, match="stage 1 cannot"):
        trainer.step(state, numbers(strategy))
    is_bad[0] = False
    state, _ = trainer.step(state, numbers(strategy))
    assert state.step == 1


def test_the_final_stage_recomputes_nothing_after_its_last_checkpoint():
    """Python calls are counted, forward and backward, for each micro-batch."""
    calls = {"before": 0, "behind": 0}

    def counted(name, value):
        def count(given):
            calls[name] += 1
            return given

        factor = jax.pure_callback(count, jax.ShapeDtypeStruct((), np.float32), jax.lax.stop_gradient(value[0, 0]))
        return value * jax.lax.stop_gradient(jnp.sign(factor) ** 2)

    def loss_fn(variables, batch, key):
        with strategies.pipeline_stage(0):
            hidden = jnp.tanh(batch @ variables["first"])
        with strategies.pipeline_stage(1):
            marked = strategies.recomputation_checkpoint(jnp.sin(counted("before", hidden)))
            return jnp.mean(jnp.sin(counted("behind", marked)) @ variables["last"])

    mode = pipelining_ops.RecomputationMode.RecomputeAndBackpropagateInterleaved
    pipeline = strategies.Pipelining([0, 1], "grouped", True, recomputation_mode=mode)
    strategy = strategies.IPUStrategy(1, ipus_per_replica=2)
    trainer = strategies.Trainer(
        strategy, loss_fn, optax.sgd(0.1), gradient_accumulation_count=COUNT, pipeline=pipeline
    )
    state = trainer.init(START)
    trainer.step(state, numbers(strategy)[: 2 * COUNT])
    assert calls == {"before": 2 * COUNT, "behind": COUNT}


@pytest.fixture
def compilations():
    """Provide the events of tracing and compiling since the test began."""
    seen = []

    def note(event, _, **details):
        if event.startswith("/jax/core/compile/"):
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield seen
    jax.monitoring.unregister_event_duration_listener(note)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_pipeline_continues_when_an_instance_is_lost(lost, compilations):
    """Survivors trace and compile nothing for the replicas that they take over."""
    behind_steps = []

    def program(strategy):
        behind_steps.clear()
        trainer = strategies.Trainer(
            strategy, pair, optax.sgd(0.1, momentum=0.9), gradient_accumulation_count=COUNT, pipeline=SEQUENTIAL
        )
        of_all = np.random.default_rng(1).standard_normal((3 * 2 * 4 * 2 * COUNT, 3)).astype(np.float32)
        dataset = strategy.distribute_dataset(of_all, 2, gradient_accumulation_count=COUNT)
        state = trainer.init(START)
        for batch in dataset.epoch(0):
            state, _ = trainer.step(state, batch)
            behind_steps.append((strategy.num_instances, len(compilations)))
        return strategies.fingerprint(state.variables)

    [alone] = run_instances(1, 4, program)
    compilations.clear()
    found = run_instances(2, 4, program, [f"kill:instance={lost},step=2"])
    assert found == [None if instance == lost else alone for instance in range(2)]
    before = [number for instances, number in behind_steps if instances == 2]
    assert before[0] > 0
    assert behind_steps[-1] == (1, before[-1])


def test_a_pipeline_for_inference_takes_over_replicas():
    """A training beside the pipeline has lost an instance, so the pipeline runs on all replicas of the survivors."""

    def replica(variables, x):
        return x + strategies.get_replica_context().replica_id_in_sync_group

    def program(strategy):
        outfeed, seen = strategies.OutfeedQueue(), []
        with strategy.scope():
            net = pipelining_ops.pipeline(
                [lambda variables, x: variables * x, replica],
                2,
                inputs=[np.float32(5)],
                outfeed_queue=outfeed,
                device_mapping=[0, 0],
            )
        given = net.init(np.float32(2))
        trainer = strategies.Trainer(strategy, pair, optax.sgd(0.1))
        dataset = strategy.distribute_dataset(np.ones((3 * 2 * 4, 3), np.float32), 2)
        state = trainer.init(START)
        for batch in dataset.epoch(0):
            given = net(given)
            seen.append(outfeed.dequeue()[-1].tolist())
            state, _ = trainer.step(state, batch)
        return [*seen, net(given) and outfeed.dequeue()[-1].tolist()]

    here, of_all = [10.0, 11.0], [10.0, 11.0, 12.0, 13.0]
    assert run_instances(2, 4, program, ["kill:instance=1,step=2"]) == [[here, here, here, of_all], None]


@pytest.mark.complete
@pytest.mark.parametrize("optimizer", ["lamb", "adamw"])
def test_a_checkpoint_continues_with_another_schedule_mapping_and_spread(optimizer, tmp_path, on_instances):
    """Two instances shard the optimizer state; one optimizer needs whole states (lamb), the other does not."""
    pytest.importorskip("orbax.checkpoint")
    sharded = {"replicated_optimizer_state_sharding": True, "min_elements_for_sharding": 1}

    def trained_until(last, folder, pipeline, devices, instances=1, **options):
        def program(strategy):
            trainer = strategies.Trainer(
                strategy,
                pair,
                getattr(optax, optimizer)(0.1),
                gradient_accumulation_count=COUNT,
                pipeline=pipeline,
                **options,
            )
            with strategies.Checkpoints(tmp_path / folder, trainer) as checkpoints:
                state = checkpoints.restore(trainer.init(START))
                first = state.step
                for step in range(first, last):
                    state, _ = trainer.step(state, numbers(strategy, step))
                checkpoints.save(state)
            return first, strategies.fingerprint(state.variables)

        return on_instances(instances, REPLICAS, program, ipus_per_replica=devices)

    [(_, straight)] = trained_until(4, "straight", GROUPED, 2)
    halves = trained_until(2, "in halves", GROUPED, 2, instances=2, **sharded)
    assert halves == [(0, halves[0][1])] * 2
    assert halves[0][1] != straight
    shutil.copytree(tmp_path / "in halves", tmp_path / "by four")
    assert trained_until(4, "in halves", SEQUENTIAL, 1) == [(2, straight)]
    assert trained_until(4, "by four", SEQUENTIAL, 1, instances=4, **sharded) == [(2, straight)] * 4


# ---- refusals


def unmarked(variables, batch, key):
    return jnp.mean(batch @ variables["first"] @ variables["last"])


def shared(variables, batch, key):
    with strategies.pipeline_stage(0):
        hidden = batch @ variables["first"]
    with strategies.pipeline_stage(1):
        return jnp.mean(hidden @ variables["last"]) + variables["first"].sum()


def meeting(variables, batch, key):
    with strategies.pipeline_stage(0):
        hidden = strategies.get_replica_context().all_reduce("mean", batch @ variables["first"])
    with strategies.pipeline_stage(1):
        return jnp.mean(hidden @ variables["last"])


def feeding(variables, batch, key):
    with strategies.pipeline_stage(0):
        hidden = batch @ variables["first"]
    with strategies.pipeline_stage(1):
        OUTFEED.enqueue(hidden.mean())
        return jnp.mean(hidden @ variables["last"])


def elsewhere(variables, batch, key):
    with strategies.pipeline_stage(0), strategies.ipu_shard(1):
        hidden = batch @ variables["first"]
    with strategies.pipeline_stage(1):
        return jnp.mean(hidden @ variables["last"])


OUTFEED = strategies.OutfeedQueue()
REFUSED = {
    "no marks": (unmarked, GROUPED, {}, ValueError, "stage 0 is marked nowhere"),
    "a variable on two devices": (shared, GROUPED, {}, ValueError, r"stages \[0, 1\] use variable \['first'\]"),
    "a collective": (meeting, GROUPED, {}, ValueError, "use the schedule 'Sequential'"),
    "too few devices": (pair, strategies.Pipelining([0, 1, 2]), {}, ValueError, "a replica spans 2 devices"),
    "one stage": (pair, strategies.Pipelining([0]), {}, ValueError, "at least two"),
    "a wrong count": (pair, GROUPED, {"count": 2}, strategies.FailedPreconditionError, "must be a multiple of 4"),
    "recompute": (pair, GROUPED, {"recompute": "blocks"}, ValueError, r"Pipelining\(recompute=True\)"),
    "a feed": (feeding, GROUPED, {}, ValueError, "a stage of the pipeline uses an infeed or outfeed"),
    "another device": (elsewhere, GROUPED, {}, ValueError, r"stage 0 computes something in ipu_shard\(1\)"),
}


@pytest.mark.parametrize(("loss_fn", "pipeline", "options", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_losses_and_options_unfit_for_a_pipeline_are_refused(loss_fn, pipeline, options, error, words):
    with pytest.raises(error, match=words):
        steps(one_instance(2), pipeline, loss_fn, **options)


def test_collectives_work_if_stages_run_one_after_another():
    state, _ = steps(one_instance(2), strategies.Pipelining([0, 1], "sequential"), meeting)
    expected, _ = steps(one_instance(1), None, meeting)
    np.testing.assert_allclose(state.variables["last"], expected.variables["last"], rtol=1e-5)


def test_a_model_state_is_used_in_the_stage_that_makes_it():
    def loss_fn(variables, batch, key, model_state):
        with strategies.pipeline_stage(0):
            hidden = batch @ variables["first"] + model_state["mean"]
        with strategies.pipeline_stage(1):
            return strategies.Outcome(jnp.mean(hidden @ variables["last"]), {}, {"mean": hidden.mean()})

    strategy = one_instance(2)
    trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1), gradient_accumulation_count=COUNT, pipeline=GROUPED)
    state = trainer.init(START, {"mean": np.float32(0)})
    with pytest.raises(ValueError, match=r"leaf \['mean'\] of the model state is used by stage 0, but updated"):
        trainer.step(state, numbers(strategy))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"device_mapping": 1}, TypeError, "it must be a list of devices"),
        ({"device_mapping": [0, 2]}, ValueError, "leaves out device 1, which would be idle; number the devices"),
        ({"device_mapping": [3, [1, 4]]}, ValueError, "leaves out devices 0, 2,"),
        ({"device_mapping": [None, 1]}, TypeError, "stage 0 is mapped to None, a NoneType; a device is a whole number"),
        ({"device_mapping": [0, {1}]}, TypeError, r"stage 1 is mapped to \{1\}, a set"),
        ({"device_mapping": [0, [1, True]]}, TypeError, "stage 1 is mapped to True, a bool"),
        ({"device_mapping": [0, 1], "recompute": "blocks"}, TypeError, "it is True or False"),
        ({"device_mapping": [0, 1], "schedule": "wild"}, ValueError, "there is no pipeline schedule 'wild'"),
        ({"device_mapping": [0, 1], "schedule": 3}, TypeError, "a member of PipelineSchedule"),
    ],
)
def test_invalid_arguments_of_pipelining_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        strategies.Pipelining(**options)
