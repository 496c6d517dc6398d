"""Programs of stages: their gradients and stash; no order of actions changes a bit."""

import hashlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kept_of_stages import kept_bytes

import strategies
from strategies.jax.programs.jaxpr import Graph
from strategies.pipelines.running.driver import AbandonedError, ScheduleGraph, ScheduleRunner
from strategies.pipelines.running.stage_programs import (
    Accumulators,
    Executables,
    ReplicaStages,
    Staged,
    StagePrograms,
    StashPolicy,
    StepArguments,
)
from strategies.pipelines.stages import cut_in_stages, pipeline_stage
from strategies.pipelines.timetable import SCHEDULES, ActionKind, StageAction, placed

WIDTH, ROWS, COUNT = 33, 5, 8
DEVICE = jax.devices()[0]
DEVICES = strategies.IPUStrategy(1).replicas.devices


def variables(seed=0):
    draw = np.random.default_rng(seed).standard_normal
    return {
        "tied": draw((WIDTH, WIDTH)).astype(np.float32) / 6,
        "scale": np.ones(WIDTH, np.float32),
        "late": draw((WIDTH, WIDTH)).astype(np.float32) / 6,
    }


def loss_of(values, x, total):
    """Compute three stages: the first and last share a variable, and a value skips the second."""
    with pipeline_stage(0):
        first = jnp.tanh(x @ values["tied"]) * values["scale"]
    with pipeline_stage(1):
        second = jax.nn.gelu(first @ (values["late"] * 2))
    with pipeline_stage(2):
        loss = jnp.mean(((second + first) @ values["tied"].T - x) ** 2)
    return loss, total + loss, second.max()


NAMES = ("late", "scale", "tied")  # in the order of the tree


@pytest.fixture(scope="module")
def pipeline():
    """Return the stages, and their programs."""
    given = (variables(), np.zeros((ROWS, WIDTH), np.float32), np.float32(0))
    graph = Graph.of(jax.make_jaxpr(loss_of)(*given))
    shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(given))
    stages = cut_in_stages(graph, [1, 1, 1])
    staged = Staged(stages, shapes, (0, 1, 2), frozenset([3, 4]), {4: 1}, 0)
    accumulators = Accumulators({place: shapes[place] for place in range(3)}, count=COUNT)
    executables = Executables(DEVICES.compile)
    return staged, [StagePrograms(staged, number, accumulators, executables) for number in range(3)]


def rows():
    return np.random.default_rng(1).standard_normal((COUNT, ROWS, WIDTH)).astype(np.float32)


def begun(pipeline, timetable, recomputes=False, offloads_sums=False):
    """Return a replica that has computed nothing yet."""
    staged, programs = pipeline
    devices = [DEVICE] * len(timetable.devices)
    keeping = StashPolicy(recomputes, offloads_sums=offloads_sums)
    one = ReplicaStages(staged, programs, timetable.mapping, devices, keeping)
    one.prepare(StepArguments(dict(enumerate(jax.tree.leaves(variables()))), {3: list(rows())}, {4: np.float32(0)}))
    return one


def run(pipeline, timetable, recomputes=False, perform=lambda action: None, offloads_sums=False):
    """Return a replica that has computed everything, each device in a thread of its own."""
    count = len(timetable.devices)
    one = begun(pipeline, timetable, recomputes, offloads_sums)

    def act(device, action):
        perform(action)
        if action.kind is not ActionKind.UPDATE:
            one.perform(device, action)

    runner = ScheduleRunner(ScheduleGraph.of(timetable))
    errors = []

    def follow(device):
        try:
            runner.follow(device, act)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=follow, args=(device,)) for device in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for error in sorted(errors, key=lambda error: isinstance(error, AbandonedError)):
        raise error
    return one


def gradients_of(pipeline, one):
    found = dict.fromkeys(NAMES, 0)
    for programs, sums in zip(pipeline[1], one.sums, strict=True):
        for place, value in zip(programs.weights, sums or (), strict=True):
            found[NAMES[place]] = found[NAMES[place]] + np.asarray(value)
    return found


def digest(one):
    arrays = [*(value for sums in one.sums for value in sums), one.carried[4], *one.outputs[2]]
    return hashlib.sha256(b"".join(np.asarray(value).tobytes() for value in arrays)).hexdigest()


def sequential(mapping=(0, 0, 0)):
    return SCHEDULES["sequential"].timetable(placed(mapping), COUNT, True)


def test_gradients_are_those_of_the_whole_function(pipeline):
    one = run(pipeline, sequential())

    def total(values):
        return sum(loss_of(values, x, 0.0)[0] for x in rows())

    expected = jax.grad(total)(variables())
    found = gradients_of(pipeline, one)
    for name in NAMES:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(one.carried[4], total(variables()), rtol=1e-5)
    np.testing.assert_allclose(one.outputs[2], [loss_of(variables(), x, 0.0)[2] for x in rows()], rtol=1e-5)


MAPPINGS = ((0, 1, 2), (0, 1, 0), (0, 0, 0))


def test_no_schedule_mapping_or_recomputation_changes_a_bit(pipeline):
    expected = digest(run(pipeline, sequential()))
    seen = []
    for name, schedule in sorted(SCHEDULES.items()):
        for mapping in MAPPINGS if name != "interleaved" else MAPPINGS[:1]:
            timetable = schedule.timetable(placed(mapping), COUNT, True)
            for recomputes in (False, True):
                seen.append((name, mapping, recomputes))
                assert digest(run(pipeline, timetable, recomputes)) == expected, seen[-1]
    assert len(seen) == 26


def test_weights_and_values_computed_from_weights_alone_are_not_kept(pipeline):
    """The second stage doubles its weights."""
    _, programs = pipeline
    given = [jax.device_put(variables()["late"]), np.zeros((ROWS, WIDTH), np.float32)]
    _, residuals = programs[1].forward(DEVICE, given)
    assert {value.shape for value in residuals.values()} == {(ROWS, WIDTH)}


def test_weights_stay_in_place_when_activations_are_offloaded(pipeline):
    """A copy for each micro-batch would take more memory than offloading saves."""
    staged, programs = pipeline
    weights = [jax.device_put(value, DEVICE) for value in jax.tree.leaves(variables())]
    one = ReplicaStages(staged, programs, placed((0, 0, 0)), [DEVICE], StashPolicy(offloads=True))
    one.prepare(
        StepArguments(dict(enumerate(weights)), {3: [jax.device_put(each) for each in rows()]}, {4: np.float32(0)})
    )
    for stage in range(3):
        one.perform(0, StageAction(ActionKind.FORWARD, stage, 0))
    values = jax.tree.leaves([(kept.values, kept.residuals) for kept in one._kept.values()])
    stayed = [value for value in values if any(value is weight for weight in weights)]
    assert stayed
    others = [value for value in values if not any(value is weight for weight in stayed)]
    assert {value.shape[0] for value in others} == {ROWS}
    assert {value.sharding.memory_kind for value in others} == {"pinned_host"}


def test_offloaded_accumulators_lie_in_host_memory_between_additions(pipeline):
    expected = run(pipeline, sequential())
    one = run(pipeline, sequential(), offloads_sums=True)
    places = {value.sharding.memory_kind for sums in one.sums for value in sums}
    assert places == {"pinned_host"}
    assert digest(one) == digest(expected)


@pytest.mark.parametrize("recomputes", [False, True])
def test_nothing_is_kept_at_the_end(pipeline, recomputes):
    one = run(pipeline, sequential(), recomputes)
    assert not any((one._kept, one._handed, one._cotangents))


def test_a_recomputing_stage_keeps_only_its_inputs(pipeline):
    """The first stage takes rows of the batch; the others take outputs of earlier stages, besides weights."""
    taken = ROWS * WIDTH * np.dtype(np.float32).itemsize
    assert kept_by_all(pipeline, True) == [0, taken, 2 * taken]
    of_stages = kept_by_all(pipeline, False)
    assert of_stages in ([2 * taken, each * taken, 2 * taken] for each in (5, 6))  # 5 from JAX 0.12 on


def kept_by_all(pipeline, recomputes):
    """Return the bytes that each stage keeps of a micro-batch that has passed all stages."""
    one = begun(pipeline, sequential(), recomputes)
    for stage in range(3):
        one.perform(0, StageAction(ActionKind.FORWARD, stage, 0))
    return [kept_bytes(one, stage, 0) for stage in range(3)]


def test_a_stage_that_fails_ends_all_devices(pipeline):
    def perform(action):
        if action.stage == 1 and action.micro_batch == 2:
            raise ArithmeticError("stage 1 cannot")

    timetable = SCHEDULES["grouped"].timetable(placed((0, 1, 2)), COUNT, True)
    with pytest.raises(ArithmeticError, match="stage 1 cannot"):
        run(pipeline, timetable, perform=perform)


def test_equal_stages_are_compiled_once():
    def deep(values, x):
        for number, value in enumerate(values):
            with pipeline_stage(number):
                x = jnp.tanh(x @ value)
        return (jnp.mean(x),)

    values = [np.eye(WIDTH, dtype=np.float32)] * 4
    shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in [*values, np.zeros((ROWS, WIDTH), "f")])
    graph = Graph.of(jax.make_jaxpr(deep)(values, np.zeros((ROWS, WIDTH), np.float32)))
    staged = Staged(cut_in_stages(graph, [1] * 4), shapes, (0, 1, 2, 3), frozenset([4]), {}, 0)
    accumulators = Accumulators({place: shapes[place] for place in range(4)})
    executables = Executables(DEVICES.compile)
    for number in range(4):
        StagePrograms(staged, number, accumulators, executables).compiled(DEVICE)
    alone = Executables(DEVICES.compile)
    StagePrograms(staged, 1, accumulators, alone).compiled(DEVICE)
    assert len(alone) == 3
    assert len(executables) == 3 + 3  # the last stage has the loss
