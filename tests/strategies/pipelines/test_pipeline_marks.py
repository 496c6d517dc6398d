"""Loss functions that are cut at their marks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import strategies
from strategies import ipu_shard
from strategies.jax.programs.jaxpr import Graph
from strategies.pipelines.stages import check_shard_marks, cut_in_stages, function_of_stage, pipeline_stage

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def cut(function, widths, *arguments, **options):
    return cut_in_stages(Graph.of(jax.make_jaxpr(function)(*arguments)), widths, **options)


def run(stages, arguments):
    """Return the results of all stages, run one after another."""
    values, results = {}, {}
    for segment in (segment for stage in stages for segment in stage):
        given = [arguments[place] for place in segment.inputs] + [values[number] for number in segment.takes]
        made = segment.function(*given)
        results |= zip(segment.results, made, strict=False)
        values |= zip(segment.gives, made[len(segment.results) :], strict=True)
    return [results[number] for number in sorted(results)]


def marked(w, v, x):
    before = jnp.cos(w)  # needed by both
    with pipeline_stage(0):
        h = jnp.tanh(x @ before)
    h = h * 2
    with pipeline_stage(1):
        y = (h @ before) @ v
    return y.sum(), h.mean()


def test_stages_compute_the_result_of_the_whole_function():
    arguments = np.eye(3, dtype=np.float32), np.ones((3, 2), np.float32), X
    stages = cut(marked, [1, 1], *arguments)
    assert [segment.inputs for (segment,) in stages] == [(0, 2), (0, 1)]
    assert [segment.results for (segment,) in stages] == [(1,), (0,)]
    np.testing.assert_allclose(run(stages, arguments), marked(*arguments), rtol=1e-6)


def test_a_jitted_function_is_cut_at_marks_around_and_inside_the_function():
    inner = jax.jit(lambda h, v: jnp.exp(h) @ v)

    def around(w, v, x):
        with pipeline_stage(0):
            h = jax.jit(jnp.matmul)(x, w)
        with pipeline_stage(1):
            return inner(h, v).sum()

    arguments = np.eye(3, dtype=np.float32), np.ones((3, 2), np.float32), X
    for function in (around, jax.jit(around)):
        assert [segment.inputs for (segment,) in cut(function, [1, 1], *arguments)] == [(0, 2), (1,)]


def test_functions_of_a_stage_get_segments_of_their_own():
    def function(w, x):
        with function_of_stage(0, 0):
            one = x * w
        with function_of_stage(0, 1):
            two = x + w
        with pipeline_stage(1):
            return (one * two).sum()

    stages = cut(function, [2, 1], np.float32(3), X)
    assert [len(stage) for stage in stages] == [2, 1]
    assert stages[1][0].takes == (0, 1)
    np.testing.assert_allclose(run(stages, (np.float32(3), X)), [(X * 3 * (X + 3)).sum()])


def test_results_can_be_left_out():
    stages = cut(lambda w, v, x: (*marked(w, v, x), w), [1, 1], np.eye(3), np.ones((3, 2)), X, without={2})
    assert [segment.results for (segment,) in stages] == [(1,), (0,)]


def test_without_a_pipeline_marks_do_nothing():
    assert jax.jit(marked)(np.eye(3), np.ones((3, 2)), X)[0].shape == ()


def stage(number, x):
    with strategies.pipeline_stage(number):
        return jnp.sin(x)


def nested(x):
    with pipeline_stage(0):
        return stage(1, jnp.cos(x))


def looped(x):
    return stage(1, jax.lax.fori_loop(0, 3, lambda _, value: stage(0, value), x))


def late(x):
    with pipeline_stage(0):
        y = jnp.cos(x)
    return stage(1, y) + stage(0, x)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: stage(0, x), "stage 1 is marked nowhere in the loss function"),
        (lambda x: stage(2, stage(1, stage(0, x))), "marks stage 2, but device_mapping has 2 stages"),
        (late, "stage 0 is marked after stage 1"),
        (nested, "stage 1 is marked within stage 0"),
        (looped, "stage 0 is marked in a "),
    ],
)
def test_marks_that_make_no_pipeline_are_refused(function, words):
    with pytest.raises(ValueError, match=words):
        cut(function, [1, 1], X)


@pytest.mark.parametrize("mark", [pipeline_stage, ipu_shard])
def test_numbers_of_stages_and_devices_are_whole_and_not_negative(mark):
    with pytest.raises(TypeError, match="whole numbers"):
        mark("first")
    with pytest.raises(ValueError, match="from 0$"):
        mark(-1)


def sharded(x):
    with pipeline_stage(0):
        with ipu_shard(0):
            one = jnp.sin(x)
        with ipu_shard(1):
            two = jax.lax.fori_loop(0, 2, lambda _, h: h * 2, x)
        both = one + two
    with pipeline_stage(1):
        return both.sum()


def test_a_stage_on_all_devices_can_shard():
    graph = Graph.of(jax.make_jaxpr(sharded)(X))
    check_shard_marks(graph, ((0, 1), (1,)))
    np.testing.assert_allclose(run(cut(sharded, [1, 1], X), (X,)), [(np.sin(X) + 4 * X).sum()], rtol=1e-6)


@pytest.mark.parametrize(
    ("devices", "words"), [((0,), r"ipu_shard\(1\), but is on device 0;"), ((1, 2), "devices 1, 2;")]
)
def test_shards_on_other_devices_than_the_stage_are_refused(devices, words):
    with pytest.raises(ValueError, match=f"stage 0 computes .*{words} map it to all devices, -1, or take"):
        check_shard_marks(Graph.of(jax.make_jaxpr(sharded)(X)), (devices, (0,)))
