"""Pipelines of functions: the rows PL-* of the original's tests, its outfeeds, and what it refuses."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import strategies
from strategies import FailedPreconditionError, InfeedQueue, OutfeedMode, OutfeedQueue, pipelining_ops
from strategies.gradients.accumulation import GradientAccumulationReductionMethod
from strategies.pipelines.pipelining_ops import (
    OptimizerFunctionOutput,
    PipelineSchedule,
    PipelineStageOptions,
    RecomputationMode,
    pipeline,
)

SUM, MEAN, RUNNING_MEAN = METHODS = tuple(GradientAccumulationReductionMethod)
START = {"w": np.float32(2), "b": np.float32(1)}


def numbers(count=100):
    """0, 1, 2, 3, 4, 0, 1, ..."""
    return InfeedQueue([np.float32(number % 5) for number in range(count)])


def same(variables, *values):
    return values[0] if len(values) == 1 else values


def first(variables, x):
    return x * variables["w"]


def second(variables, x):
    return x + variables["b"]


def sgd(rate=0.01):
    return lambda *outputs: OptimizerFunctionOutput(optax.sgd(rate), outputs[0])


def made(net, variables=START):
    """The outfeed after a call, and the state."""
    state = net(net.init(variables))
    return net._outfeed.queue.dequeue(), state


# ---- what comes in and goes out


def test_pl_19_stages_without_variables():
    net = pipeline([lambda _, x: x * x, lambda _, x: x + x], 6, infeed_queue=numbers(), outfeed_queue=OutfeedQueue())
    np.testing.assert_array_equal(made(net, {})[0], [0, 2, 8, 18, 32, 0])


def test_pl_17_outputs_twice():
    ones = InfeedQueue([np.float32(1)] * 12)
    net = pipeline([lambda _, x: (x, x), same], 12, infeed_queue=ones, outfeed_queue=OutfeedQueue())
    found, _ = made(net, {})
    np.testing.assert_array_equal(found, np.ones((2, 12)))


def test_pl_27_a_constant_input():
    net = pipeline([lambda _, x: x * 2, lambda _, x: x + 3], 8, inputs=[42.0], outfeed_queue=OutfeedQueue())
    np.testing.assert_array_equal(made(net, {})[0], [87] * 8)


@pytest.mark.parametrize("count", [12, np.int32(12), np.asarray(12)])
def test_pl_14_elements_with_names(count):
    elements = InfeedQueue([{"a": np.float32(number), "b": np.float32(1)} for number in range(12)])
    stages = [lambda _, b, a: (a, b), lambda _, a, b: a - b, lambda _, x: 2 * x]
    net = pipeline(
        stages,
        count,
        infeed_queue=elements,
        outfeed_queue=OutfeedQueue(),
        device_mapping=[0, 1, 3],
        pipeline_schedule="interleaved",
    )
    np.testing.assert_array_equal(made(net, {})[0], 2 * (np.arange(12) - 1.0))


def test_pl_32_dictionaries_stay_dictionaries():
    net = pipeline(
        [lambda _, x: x, lambda _, x: {"one": x + 1, "two": x + 2}], 8, inputs=[0.0], outfeed_queue=OutfeedQueue()
    )
    found, _ = made(net, {})
    np.testing.assert_array_equal([found["one"], found["two"]], [np.ones(8), np.full(8, 2)])


def test_pl_36_a_condition():
    stages = [lambda _, x: x, lambda _, x: jax.lax.cond(x > 2, lambda: 1.0, lambda: 2.0)]
    elements = InfeedQueue([np.float32(number) for number in range(6)])
    net = pipeline(stages, 6, infeed_queue=elements, outfeed_queue=OutfeedQueue())
    np.testing.assert_array_equal(made(net, {})[0], [2, 2, 2, 1, 1, 1])


def test_pl_25_the_loss_alone():
    net = pipeline(
        [lambda v, x: x * v["w"], lambda _, x: x + 1],
        8,
        inputs=[0.0],
        outfeed_queue=OutfeedQueue(),
        optimizer_function=sgd(),
        outfeed_loss=True,
    )
    np.testing.assert_array_equal(made(net)[0], np.ones(8))


def test_pl_26_a_mask_drops_outputs():
    net = pipeline(
        [lambda v, x: x * v["w"], lambda _, x: (x + 1, x + 4)],
        8,
        inputs=[0.0],
        outfeed_queue=OutfeedQueue(),
        optimizer_function=sgd(),
        outfeed_mask=[True, False],
    )
    np.testing.assert_array_equal(made(net)[0], np.full((1, 8), 4))


@pytest.mark.parametrize("method", METHODS)
def test_pl_28_29_31_sums_of_outputs(method):
    """Whatever becomes of the gradients, outputs are added up."""
    for options, expected in [({"outfeed_loss": True}, [8]), ({}, [[8], [16]])]:
        net = pipeline(
            [lambda v, x: (x * v["w"], x), lambda _, x, y: (x + 1, y + 2)],
            8,
            inputs=[0.0],
            outfeed_queue=OutfeedQueue(),
            optimizer_function=sgd(),
            accumulate_outfeed=True,
            reduction_method=method,
            **options,
        )
        np.testing.assert_array_equal(made(net)[0], expected)


def test_pl_29_31_sums_without_training():
    net = pipeline(
        [lambda _, x: x, lambda _, x: (x + 1, x + 2)],
        8,
        inputs=[0.0],
        outfeed_queue=OutfeedQueue(),
        accumulate_outfeed=True,
    )
    np.testing.assert_array_equal(made(net, {})[0], [[8], [16]])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, lambda output: np.float32])
def test_pl_30_the_dtype_of_sums(dtype):
    add = lambda _, x: x + 10000  # noqa: E731
    net = pipeline(
        [add, add, add],
        12,
        inputs=[np.float32(1)],
        outfeed_queue=OutfeedQueue(),
        accumulate_outfeed=True,
        accumulate_outfeed_dtype=dtype,
    )
    found, _ = made(net, {})
    assert found.dtype == np.float16 if dtype is np.float16 else np.float32
    np.testing.assert_array_equal(found, [np.inf if dtype is np.float16 else 12 * 30001])


def test_an_outfeed_of_the_last_keeps_the_last():
    net = pipeline(
        [lambda _, x: x, lambda _, x: x + 1], 6, infeed_queue=numbers(), outfeed_queue=OutfeedQueue(OutfeedMode.LAST)
    )
    assert made(net, {})[0] == 1.0


def test_g_14_the_number_of_the_micro_batch():
    counter = pipelining_ops.get_current_iteration_counter
    net = pipeline(
        [lambda v: (v["w"], counter()), lambda _, x, one: (x, one, counter())],
        10,
        repeat_count=3,
        pipeline_schedule="sequential",
        device_mapping=[0, 1],
        outfeed_queue=OutfeedQueue(),
        optimizer_function=sgd(),
        outfeed_mask=[True, False, False],
    )
    np.testing.assert_array_equal(made(net)[0], [np.tile(np.arange(10), 3)] * 2)
    with pytest.raises(RuntimeError, match="there is none here"):
        counter()


# ---- training


WIDTH = 5
LAYERS = {f"w{number}": np.eye(WIDTH, dtype=np.float32) * (1 + number / 8) for number in range(4)}
ROWS = [np.random.default_rng(number).standard_normal((3, WIDTH)).astype(np.float32) for number in range(48)]


def layer(name):
    return lambda variables, x: jnp.tanh(x @ variables[name])


def closing(name):
    return lambda variables, x: jnp.mean(jnp.tanh(x @ variables[name]) ** 2)


DEEP = [layer("w0"), layer("w1"), layer("w2"), closing("w3")]
TIED = [layer("w0"), layer("w1"), layer("w2"), layer("w1"), closing("w0")]


def reference(stages, optimizer, count, updates, method):
    """What a loop on the host makes of it."""

    def loss_of(variables, x):
        for stage in stages:
            x = stage(variables, x)
        return x

    variables, losses = LAYERS, []
    state = optimizer.init(variables)
    value_and_grad = jax.jit(jax.value_and_grad(loss_of))
    for update in range(updates):
        found = [value_and_grad(variables, x) for x in ROWS[update * count : (update + 1) * count]]
        losses += [loss for loss, _ in found]
        scale = 1 if method is SUM else 1 / count
        total = jax.tree.map(lambda *each, scale=scale: scale * sum(each), *(gradient for _, gradient in found))
        changes, state = optimizer.update(total, state, variables)
        variables = optax.apply_updates(variables, changes)
    return variables, losses


def trained(stages, optimizer, count, *, updates=2, **options):
    """The variables, and all losses."""
    net = pipeline(
        stages,
        count,
        repeat_count=updates,
        infeed_queue=InfeedQueue(ROWS),
        outfeed_queue=OutfeedQueue(),
        optimizer_function=lambda loss: OptimizerFunctionOutput(optimizer, loss),
        outfeed_loss=True,
        **options,
    )
    losses, state = made(net, LAYERS)
    return state.variables, losses


def check(stages, count, method=MEAN, optimizer=None, **options):
    optimizer = optimizer or optax.sgd(0.1, 0.8)
    found = trained(stages, optimizer, count, reduction_method=method, **options)
    expected = reference(stages, optimizer, count, 2, method)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6), found, expected)
    return found


@pytest.mark.parametrize("method", METHODS)
def test_pl_20_interleaved_is_a_loop_on_the_host(method):
    check(DEEP, 20, method, pipeline_schedule=PipelineSchedule.Interleaved)


CASES = {
    "PL-43 grouped": (TIED, 20, {"device_mapping": [0, 1, 2, 1, 0]}),
    "PL-44 sequential": (TIED, 4, {"device_mapping": [0, 1, 2, 1, 0], "pipeline_schedule": "sequential"}),
    "PL-46 batch serialization": (TIED, 8, {"batch_serialization_iterations": 4}),
    "PL-48 recomputation": (DEEP, 8, {"recomputation_mode": RecomputationMode.Auto}),
    "offloaded": (
        DEEP,
        8,
        {
            "offload_activations": True,
            "offload_gradient_accumulation_buffers": True,
            "offload_weight_update_variables": True,
        },
    ),
}


@pytest.mark.parametrize(("stages", "count", "options"), CASES.values(), ids=CASES)
def test_other_ways_to_run_it_are_the_same(stages, count, options):
    check(stages, count, SUM if "batch_serialization_iterations" in options else MEAN, **options)


def test_pl_48_blocks_between_checkpoints_are_computed_again():
    def before(variables, x):
        return pipelining_ops.recomputation_checkpoint(jnp.tanh(x @ variables["w0"]))

    def last(variables, x):
        x = pipelining_ops.recomputation_checkpoint(jnp.tanh(x @ variables["w1"]))
        return jnp.mean(jnp.tanh(x @ variables["w2"]) ** 2)

    found = [
        trained([before, last], optax.sgd(0.1), 4, recomputation_mode=mode)
        for mode in (None, RecomputationMode.RecomputeThenBackpropagate, RecomputationMode(3))
    ]
    fingerprints = {strategies.fingerprint(variables) for variables, _ in found}
    assert len(fingerprints) == 1


@pytest.mark.parametrize(
    ("stages", "mapping"),
    [
        ([layer("w0"), layer("w1"), closing("w2")], [-1, 0, 1]),
        ([layer("w0"), [layer("w1"), layer("w2")], lambda v, x, y: jnp.mean((x * y) @ v["w3"])], [0, [0, 1], 1]),
        ([[layer("w0"), layer("w1")], lambda v, x, y: (x - y) @ v["w2"], closing("w3")], [[0, 1], 0, 1]),
    ],
)
def test_pl_40_concurrent_stages(stages, mapping):
    one, losses = trained(
        stages, optax.sgd(0.1), 18, device_mapping=mapping, pipeline_schedule="one_forward_one_backward"
    )
    flat = [0 if not isinstance(device, list) else [0] * len(device) for device in mapping]
    other, same_losses = trained(stages, optax.sgd(0.1), 18, device_mapping=flat, pipeline_schedule="sequential")
    assert strategies.fingerprint(one) == strategies.fingerprint(other)
    np.testing.assert_array_equal(losses, same_losses)
    assert losses[-1] != losses[0]


def test_pl_37_loops_and_gradients_of_ones_own():
    @jax.custom_vjp
    def halved(x):
        return x

    halved.defvjp(lambda x: (x, None), lambda _, slope: (slope / 2,))

    def looped(variables, x):
        return jax.lax.fori_loop(0, 3, lambda _, y: jnp.sin(y @ variables["w1"]), x)

    check(
        [lambda v, x: halved(jnp.tanh(x @ v["w0"])), looped, closing("w2")],
        24,
        pipeline_schedule="one_forward_one_backward",
    )


def test_pl_38_wide_accumulators_of_small_floats():
    """Eight gradients of the largest float16: their mean is one, and so is it in float32."""
    largest = np.float16(65504)

    def keep(gradients, state, params=None):
        return gradients, gradients

    optimizer = optax.GradientTransformation(lambda v: jax.tree.map(lambda one: jnp.zeros((), jnp.float32), v), keep)
    net = pipeline(
        [lambda v, x: v["w"] * x, lambda _, x: x],
        8,
        inputs=[largest],
        outfeed_queue=OutfeedQueue(),
        optimizer_function=lambda loss: OptimizerFunctionOutput(optimizer, loss),
        outfeed_loss=True,
        gradient_accumulation_dtype=np.float32,
        reduction_method=MEAN,
    )
    _, state = made(net, {"w": np.float16(0)})
    assert state.optimizer_state["w"].dtype == np.float32
    assert state.optimizer_state["w"] == np.float32(largest)


def test_pl_34_shapes_of_gradients():
    net = pipeline(
        [lambda v, x: v["w"] * x, lambda _, x: x.sum()],
        4,
        inputs=[2.0],
        outfeed_queue=OutfeedQueue(),
        optimizer_function=sgd(0.5),
        outfeed_loss=True,
    )
    _, state = made(net, {"w": np.ones((1, 2, 3), np.float32)})
    np.testing.assert_array_equal(state.variables["w"], np.full((1, 2, 3), 1 - 0.5 * 2 * 4))


@pytest.mark.parametrize("replicas", [1, 2])
def test_pl_51_53_sharded_optimizer_state_is_the_same(replicas):
    found = set()
    for sharding in (False, True):
        with strategies.IPUStrategy(replicas, ipus_per_replica=4).scope():
            variables, _ = trained(
                DEEP[:1] + DEEP[-1:], optax.sgd(0.01, 0.98), 4, replicated_optimizer_state_sharding=sharding
            )
        found.add(strategies.fingerprint(variables))
    assert len(found) == 1


def test_replicas_of_several_instances_train_alike(on_instances):
    """P-30, M-20: an infeed of all replicas, an outfeed of the local ones; the variables of one instance."""

    def program(strategy):
        infeed = InfeedQueue(ROWS, mode=strategies.InfeedMode.WHOLE)
        with strategy.scope():
            net = pipeline(
                DEEP[:1] + DEEP[-1:],
                4,
                repeat_count=2,
                infeed_queue=infeed,
                outfeed_queue=OutfeedQueue(),
                optimizer_function=lambda loss: OptimizerFunctionOutput(optax.adam(0.01), loss),
                outfeed_loss=True,
            )
            losses, state = made(net, LAYERS)
        infeed.delete()
        return strategies.fingerprint(state.variables), losses, dict(net.metrics)

    [alone] = on_instances(1, 4, program, ipus_per_replica=2)
    assert alone[1].shape == (8, 4)
    for index, found in enumerate(on_instances(2, 4, program, ipus_per_replica=2)):
        assert (found[0], found[2]) == (alone[0], alone[2])
        np.testing.assert_array_equal(found[1], alone[1][:, 2 * index : 2 * index + 2])
    np.testing.assert_allclose(alone[2]["loss"], alone[1][4:].mean(), rtol=1e-6)


def test_the_program_of_the_issue_learns():
    """H-04 to H-06: every update lowers the loss."""
    for method in METHODS:
        infeed = InfeedQueue([np.ones((2, WIDTH), np.float32)] * 40)
        net = pipeline(
            DEEP[:1] + DEEP[-1:],
            4,
            infeed_queue=infeed,
            outfeed_queue=OutfeedQueue(),
            device_mapping=[0, 0],
            optimizer_function=lambda loss: OptimizerFunctionOutput(optax.sgd(0.01), loss),
            outfeed_loss=True,
            reduction_method=method,
        )
        state, means = net.init(LAYERS), []
        for _ in range(10):
            state = net(state)
            means.append(net.metrics["loss"])
        assert all(after < before for before, after in itertools.pairwise(means))


# ---- what is refused


LOSS = jnp.float32(1)
SGD = optax.sgd(0.1)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"compute_gradients_args": (1,)}, ValueError, "compute_gradients_args may not be used"),  # PL-01
        ({"compute_gradients_kwargs": {"x": 1}}, ValueError, "compute_gradients_kwargs may not be used"),  # PL-02
        ({"tape": object()}, ValueError, "leave out the tape"),  # PL-03, PL-04
        ({"tape": object(), "variables": True}, ValueError, "both variables and a tape"),  # PL-06, PL-07
        ({"compute_gradients_args": [1]}, TypeError, "must be a tuple"),
        ({"apply_gradients_kwargs": [1]}, TypeError, "must be a dictionary"),
        ({"variables": []}, ValueError, "No variables to optimize."),
        ({"compute_gradients_args": ([],)}, ValueError, "No variables to optimize."),  # PL-39
        ({"opt": "sgd"}, TypeError, "use an optax gradient transformation"),
        ({"loss": 1.0}, TypeError, "it must be an array"),
    ],
)
def test_pl_01_to_07_and_39_optimizer_functions(options, error, words):
    with pytest.raises(error, match=words):
        OptimizerFunctionOutput(**{"opt": SGD, "loss": LOSS} | options)


TWO = [first, second]
LEARNS = {"optimizer_function": sgd(), "outfeed_queue": OutfeedQueue(), "outfeed_loss": True, "infeed_queue": numbers()}
ONLY_RUN = {"outfeed_queue": OutfeedQueue(), "infeed_queue": numbers()}
NESTED = [first, [[first], second]]
LAST = OutfeedQueue(OutfeedMode.LAST)

REFUSED = {
    "PL-09 interleaved": (
        [same] * 3,
        10,
        ONLY_RUN | {"pipeline_schedule": "interleaved"},
        FailedPreconditionError,
        "must be a multiple of 3",
    ),
    "PL-09 grouped": ([same] * 3, 10, ONLY_RUN, FailedPreconditionError, "must be a multiple of 3"),
    "PL-10": (
        TWO,
        4,
        LEARNS | {"replicated_optimizer_state_sharding": True, "offload_weight_update_variables": False},
        ValueError,
        "optimizer state must be offloaded",
    ),
    "PL-11 type": ([same] * 3, 6, ONLY_RUN | {"device_mapping": 1}, TypeError, "device_mapping"),
    "PL-11 long": ([same] * 3, 6, ONLY_RUN | {"device_mapping": range(4)}, ValueError, "Each stage must be mapped"),
    "PL-11 short": ([same] * 3, 6, ONLY_RUN | {"device_mapping": (0,)}, ValueError, "Each stage must be mapped"),
    "PL-16": ([same], 2, ONLY_RUN, ValueError, "at least two"),
    "PL-22": (
        [same, same, [same, same], same],
        8,
        LEARNS | {"device_mapping": [0, 1, [2, 3], 0], "pipeline_schedule": "interleaved"},
        NotImplementedError,
        "The pipelining schedule",
    ),
    "PL-23 few": (
        TWO,
        4,
        LEARNS | {"forward_propagation_stages_poplar_options": [PipelineStageOptions()]},
        ValueError,
        "2 stages",
    ),
    "PL-23 kind": (
        TWO,
        4,
        LEARNS | {"weight_update_poplar_options": [PipelineStageOptions()]},
        TypeError,
        "must be one",
    ),
    "PL-24 loss alone": (
        TWO,
        4,
        ONLY_RUN | {"outfeed_loss": True},
        ValueError,
        "An optimizer_function must be provided",
    ),
    "PL-24 mask alone": (
        TWO,
        4,
        ONLY_RUN | {"outfeed_mask": [True]},
        ValueError,
        "An optimizer_function must be provided",
    ),
    "PL-24 no outfeed": (TWO, 4, LEARNS | {"outfeed_queue": None}, ValueError, "An outfeed_queue must be provided"),
    "PL-24 no outfeed for a mask": (
        TWO,
        4,
        {"optimizer_function": sgd(), "outfeed_mask": [False]},
        ValueError,
        "no outfeed_queue has been provided",
    ),
    "PL-24 both": (TWO, 4, LEARNS | {"outfeed_mask": [True]}, ValueError, "only one of them"),
    "PL-33": (TWO, 4, LEARNS | {"outfeed_queue": LAST, "accumulate_outfeed": True}, ValueError, "use OutfeedMode.ALL"),
    "PL-41 None": (TWO, 4, LEARNS | {"reduction_method": None}, ValueError, "Cannot parse None"),
    "PL-41": (TWO, 4, LEARNS | {"reduction_method": "Exp"}, ValueError, "Cannot parse 'Exp'"),
    "PL-45 mapping": (
        [same] * 3,
        8,
        LEARNS | {"batch_serialization_iterations": 4, "device_mapping": [0, 1, 0]},
        NotImplementedError,
        "one",
    ),
    "PL-45 schedule": (
        TWO,
        8,
        LEARNS | {"batch_serialization_iterations": 4, "pipeline_schedule": "grouped"},
        NotImplementedError,
        "Sequential",
    ),
    "batch serialization with means": (
        TWO,
        8,
        LEARNS | {"batch_serialization_iterations": 4, "reduction_method": "mean"},
        ValueError,
        "use SUM",
    ),
    "PL-50": (
        [same] * 4,
        8,
        LEARNS | {"pipeline_schedule": "interleaved", "device_mapping": [0, 1, 2, 0]},
        NotImplementedError,
        "The pipelining",
    ),
    "no count": (TWO, None, LEARNS, ValueError, "gradient_accumulation_count is needed"),
    "a count below one": (TWO, -1, LEARNS, ValueError, "gradient_accumulation_count"),
    "a huge count": (TWO, 2**31, LEARNS, ValueError, "at most"),
    "nested": (NESTED, 4, LEARNS | {"device_mapping": [0, [0, 1]]}, ValueError, "cannot be nested"),
    "a list at the end": (
        [first, [second, second]],
        4,
        LEARNS | {"device_mapping": [0, [0, 0]]},
        ValueError,
        "add a stage",
    ),
    "continuous": (TWO, 4, LEARNS | {"continuous_weight_updates": True}, NotImplementedError, "leave it out"),
    "a queue": (TWO, 4, LEARNS | {"infeed_queue": [1]}, TypeError, "use an InfeedQueue"),
    "an outfeed": (TWO, 4, LEARNS | {"outfeed_queue": [1]}, TypeError, "use an OutfeedQueue"),
    "a schedule": (TWO, 4, LEARNS | {"pipeline_schedule": 1}, TypeError, "PipelineSchedule"),
    "a mode": (TWO, 4, LEARNS | {"recomputation_mode": 1}, TypeError, "RecomputationMode"),
    "blocks in turns": (
        TWO,
        4,
        LEARNS | {"recomputation_mode": RecomputationMode(3), "pipeline_schedule": "interleaved"},
        NotImplementedError,
        "Then",
    ),
}


@pytest.mark.parametrize(("stages", "count", "options", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_at_once(stages, count, options, error, words):
    with pytest.raises(error, match=words):
        pipeline(stages, count, **options)


@pytest.mark.parametrize("options", [{}, {"optimizer_function": sgd()}])
def test_pl_08_outputs_need_an_outfeed(options):
    net = pipeline(TWO, 4, infeed_queue=numbers(), **options)
    with pytest.raises(ValueError, match="The last computational stage has tensor outputs"):
        net.init(START)


def test_pl_15_tensors_of_other_programs_are_not_captured():
    def outer(y):
        return pipeline([lambda _, x: x * y, second], 4, **ONLY_RUN)

    with pytest.raises(ValueError, match="Trying to capture the tensor"):
        jax.jit(outer)(1.0)


def test_masks_are_as_long_as_outputs_and_optimizer_functions_return_what_they_must():
    net = pipeline(TWO, 4, **LEARNS | {"outfeed_loss": False, "outfeed_mask": [True, False]})
    with pytest.raises(ValueError, match="outfeed_mask has 2 entries, and the last stage 1 outputs"):
        net.init(START)
    net = pipeline(TWO, 4, **LEARNS | {"optimizer_function": lambda loss: loss})
    with pytest.raises(TypeError, match="must return an OptimizerFunctionOutput"):
        net.init(START)
    with pytest.raises(RuntimeError, match="before init"):
        net(START)


def test_options_of_stages_are_dictionaries():
    with pytest.raises(TypeError, match="matmul_options is 1, a int"):
        PipelineStageOptions(matmul_options=1)
    assert PipelineStageOptions(convolution_options={"a": "b"}).slice_options is None
