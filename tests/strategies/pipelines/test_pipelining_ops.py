"""Pipelines of functions: the services for stages, the options, and refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiers import first_of

import strategies
from strategies import FailedPreconditionError, InfeedQueue, OutfeedMode, OutfeedQueue, pipelining_ops
from strategies.compat.functions.optimizer_function import OptimizerFunctionOutput, PipelineStageOptions
from strategies.compat.pipelining_ops import pipeline
from strategies.core.options import GradientAccumulationReductionMethod
from strategies.pipelines.pipelining import RecomputationMode
from strategies.pipelines.timetable import PipelineSchedule

SUM, MEAN, RUNNING_MEAN = METHODS = tuple(GradientAccumulationReductionMethod)
START = {"w": np.float32(2), "b": np.float32(1)}


def numbers(count=100):
    """Return an infeed of 0, 1, 2, 3, 4, 0, 1, ..."""
    return InfeedQueue([np.float32(number % 5) for number in range(count)])


def same(variables, *values):
    return values[0] if len(values) == 1 else values


def first(variables, x):
    return x * variables["w"]


def second(variables, x):
    return x + variables["b"]


TWO = [first, second]


def sgd(rate=0.01):
    return lambda *outputs: OptimizerFunctionOutput(optax.sgd(rate), outputs[0])


def made(net, variables=START, model_state=None):
    """Return the outfeed after a call, and the state."""
    state = net(net.init(variables, model_state))
    return net._outfeed.queue.dequeue(), state


# ---- inputs and outputs


@pytest.mark.parametrize("count", [12, np.int32(12), np.asarray(12)])
def test_dictionary_elements_become_keyword_arguments(count):
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


def test_an_outfeed_in_mode_last_keeps_the_last_output():
    net = pipeline(
        [lambda _, x: x, lambda _, x: x + 1], 6, infeed_queue=numbers(), outfeed_queue=OutfeedQueue(OutfeedMode.LAST)
    )
    assert made(net, {})[0] == 1.0


def test_the_iteration_counter_is_the_number_of_the_micro_batch():
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
    with pytest.raises(RuntimeError, match="call it in a stage"):
        counter()


def noisy(variables, x):
    """Move a mean, and add noise."""
    mean = pipelining_ops.get_model_state()["mean"]
    pipelining_ops.update_model_state(mean=(mean + x.mean()) / 2)
    return x * variables["w"] + jax.random.normal(pipelining_ops.get_random_key())


def counted(variables, x):
    pipelining_ops.update_model_state(seen=pipelining_ops.get_model_state()["seen"] + 1)
    return x.mean()


@pytest.mark.complete
def test_stages_have_a_model_state_and_random_keys():
    """Random keys differ for each micro-batch and replica; place and time of the stages change nothing."""
    found = []
    for mapping, schedule in (([0, 1], "grouped"), ([0, 0], "sequential")):
        with strategies.IPUStrategy(2, ipus_per_replica=2).scope():
            net = pipeline(
                [noisy, counted],
                4,
                repeat_count=2,
                infeed_queue=InfeedQueue([np.full(3, number // 8, np.float32) for number in range(16)]),
                outfeed_queue=OutfeedQueue(),
                optimizer_function=sgd(),
                device_mapping=mapping,
                pipeline_schedule=schedule,
            )
            state = net(net.init({"w": np.float32(1)}, {"mean": np.float32(0), "seen": np.int32(0)}))
        losses = net._outfeed.queue.dequeue()[0]
        assert len(set(losses.ravel().tolist())) == losses.size == 16
        assert (state.model_state["mean"], state.model_state["seen"]) == (1 - 2**-4, 8)
        found.append((strategies.fingerprint(state.variables), losses.tobytes()))
    assert found[0] == found[1]


def test_a_model_state_is_readable_in_inference():
    def shifted(variables, x):
        mean = pipelining_ops.get_model_state()["mean"]
        pipelining_ops.update_model_state(mean=mean + 1)
        return x + mean

    net = pipeline([shifted, same], 4, inputs=[1.0], outfeed_queue=OutfeedQueue())
    found, state = made(net, {}, {"mean": np.float32(3)})
    np.testing.assert_array_equal(found, [4] * 4)
    assert state.model_state["mean"] == 3


@pytest.mark.parametrize(
    ("stage", "error", "words"),
    [
        (lambda _, x: pipelining_ops.get_model_state()["mean"], RuntimeError, "net.init\\(variables, model_state\\)"),
        (lambda _, x: jax.random.normal(pipelining_ops.get_random_key()), RuntimeError, "pass keys in through the"),
    ],
)
def test_a_missing_model_state_or_random_key_is_an_error(stage, error, words):
    net = pipeline([stage, same], 4, inputs=[1.0], outfeed_queue=OutfeedQueue())
    with pytest.raises(error, match=words):
        net.init({})


def test_an_unknown_entry_of_the_model_state_is_refused():
    def stage(variables, x):
        pipelining_ops.update_model_state(seen=x)
        return x

    net = pipeline([stage, same], 4, inputs=[1.0], outfeed_queue=OutfeedQueue())
    with pytest.raises(ValueError, match="'seen' is not in the model state, which has 'seem'"):
        net.init({}, {"seem": np.int32(0)})


def actions_of(trace):
    """Return the actions of the two devices of replica 0, by the times at which they began."""
    spans = trace.replicas[0]
    return tuple(tuple(span.action for span in spans if span.device == device) for device in range(2))


@pytest.mark.parametrize("recomputes", [None, RecomputationMode.Auto])
def test_a_pipeline_has_a_trace(recomputes):
    net = pipeline(
        TWO, 4, infeed_queue=numbers(), outfeed_queue=OutfeedQueue(), optimizer_function=sgd(),
        recomputation_mode=recomputes,
    )  # fmt: skip
    assert net.trace is None
    made(net)
    assert actions_of(net.trace) == pipelining_ops.plan(TWO, 4).timetable.devices


def test_a_pipeline_for_inference_has_a_trace():
    net = pipeline([same, same], 4, inputs=[1.0], outfeed_queue=OutfeedQueue())
    made(net, {})
    assert actions_of(net.trace) == pipelining_ops.plan(2, 4, training=False).timetable.devices


def passing(rate_of):
    return [lambda v, rate, x: (rate_of(rate), v["w"] * x), lambda _, rate, y: (rate, y)]


def with_rate(rate, loss):
    return OptimizerFunctionOutput(optax.sgd(rate), loss)


def test_an_optimizer_can_use_inputs_that_stages_pass_through():
    net = pipeline(
        passing(lambda rate: rate), 4, inputs=[0.5], infeed_queue=numbers(), outfeed_queue=OutfeedQueue(),
        optimizer_function=with_rate,
    )  # fmt: skip
    _, state = made(net, {"w": np.float32(1)})
    assert state.variables["w"] == 1 - 0.5 * (0 + 1 + 2 + 3)


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_an_optimizer_made_of_computed_values_beside_constants_is_refused(dtype):
    stages = [lambda v, rate, x: (rate, dtype(2) * rate.astype(dtype), v["w"] * x), same]
    net = pipeline(
        stages, 4, inputs=[0.5], infeed_queue=numbers(), outfeed_queue=OutfeedQueue(),
        optimizer_function=lambda constant, computed, loss: with_rate(computed, loss),
    )  # fmt: skip
    with pytest.raises(ValueError, match="the optimizer of the optimizer_function depends on a stage's result"):
        net.init({"w": np.float32(1)})


def test_an_optimizer_made_of_computed_values_is_refused():
    net = pipeline(
        passing(lambda rate: 2 * rate), 4, inputs=[0.5], infeed_queue=numbers(), outfeed_queue=OutfeedQueue(),
        optimizer_function=with_rate,
    )  # fmt: skip
    with pytest.raises(ValueError, match="the optimizer of the optimizer_function depends on a stage's result"):
        net.init({"w": np.float32(1)})


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
    """Return the losses and variables of a loop on the host."""

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
    """Return the variables, and all losses."""
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


@pytest.mark.parametrize("method", first_of(METHODS))
def test_the_interleaved_schedule_matches_a_loop_on_the_host(method):
    check(DEEP, 20, method, pipeline_schedule=PipelineSchedule.Interleaved)


CASES = {
    "batch serialization": (TIED, 8, {"batch_serialization_iterations": 4}),
    "recomputation": (DEEP, 8, {"recomputation_mode": RecomputationMode.Auto}),
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
def test_all_options_match_a_loop_on_the_host(stages, count, options):
    check(stages, count, SUM if "batch_serialization_iterations" in options else MEAN, **options)


def dropping(variables, x):
    kept = jax.random.bernoulli(pipelining_ops.get_random_key(), 0.7, x.shape)
    return jnp.where(kept, jnp.tanh(x @ variables["w0"]), 0)


def checkpointed(name):
    return lambda variables, x: pipelining_ops.recomputation_checkpoint(jnp.tanh(x @ variables[name]))


RECOMPUTED = {
    "dropout": ([dropping, checkpointed("w1"), closing("w2")], None),
    "an input that is not changed": ([lambda v, x: (x, jnp.sin(x @ v["w0"])), lambda v, x, y: jnp.mean(x * y)], None),
    "three inputs": (
        [lambda v, x: (x, x @ v["w0"], jnp.tanh(x)), lambda v, x, y, z: jnp.mean(jnp.tanh(x * y + z @ v["w1"]))],
        None,
    ),
    "weights that stages share": ([checkpointed("w0"), layer("w1"), layer("w2"), closing("w0")], [0, 1, 2, 0]),
    "checkpoints": ([checkpointed("w0"), checkpointed("w1"), layer("w2"), closing("w3")], None),
}


@pytest.mark.complete
@pytest.mark.parametrize(
    ("name", "schedule", "mode"),
    [  # all pairs
        (name, schedule, RecomputationMode(2 + (number + is_sequential) % 2))
        for number, name in enumerate(RECOMPUTED)
        for is_sequential, schedule in enumerate(("grouped", "sequential"))
    ],
)
def test_recomputation_changes_no_bit(name, schedule, mode):
    """Cases are dropout and the original's UnmodifiedInput, ThreeInput, SharedWeights and Checkpoint."""
    stages, mapping = RECOMPUTED[name]
    options = {"device_mapping": mapping, "pipeline_schedule": schedule}
    expected, losses = trained(stages, optax.sgd(0.1), 24, **options)
    found, same_losses = trained(stages, optax.sgd(0.1), 24, recomputation_mode=mode, **options)
    np.testing.assert_array_equal(losses, same_losses)
    assert strategies.fingerprint(found) == strategies.fingerprint(expected)


@pytest.mark.parametrize(
    ("stages", "mapping"),
    [
        ([layer("w0"), [layer("w1"), layer("w2")], lambda v, x, y: jnp.mean((x * y) @ v["w3"])], [0, [0, 1], 1]),
        *(
            pytest.param(*case, marks=pytest.mark.complete)
            for case in (
                ([layer("w0"), layer("w1"), closing("w2")], [-1, 0, 1]),
                ([[layer("w0"), layer("w1")], lambda v, x, y: (x - y) @ v["w2"], closing("w3")], [[0, 1], 0, 1]),
            )
        ),
    ],
)
def test_concurrent_stages_have_the_bits_of_sequential_ones(stages, mapping):
    one, losses = trained(
        stages, optax.sgd(0.1), 18, device_mapping=mapping, pipeline_schedule="one_forward_one_backward"
    )
    flat = [0 if not isinstance(device, list) else [0] * len(device) for device in mapping]
    other, same_losses = trained(stages, optax.sgd(0.1), 18, device_mapping=flat, pipeline_schedule="sequential")
    assert strategies.fingerprint(one) == strategies.fingerprint(other)
    np.testing.assert_array_equal(losses, same_losses)
    assert losses[-1] != losses[0]


# ---- refusals


LOSS = jnp.float32(1)
SGD = optax.sgd(0.1)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"compute_gradients_args": (1,)}, ValueError, "compute_gradients_args may not be used"),
        ({"compute_gradients_kwargs": {"x": 1}}, ValueError, "compute_gradients_kwargs may not be used"),
        ({"tape": object()}, ValueError, "leave out the tape"),
        ({"tape": object(), "variables": True}, ValueError, "both variables and a tape"),
        ({"compute_gradients_args": [1]}, TypeError, "must be a tuple"),
        ({"apply_gradients_kwargs": [1]}, TypeError, "must be a dictionary"),
        ({"captured_gradient_outfeed": OutfeedQueue()}, ValueError, "no gradient_capture_context"),
        ({"variables": []}, ValueError, "No variables to optimize."),
        ({"compute_gradients_args": ([],)}, ValueError, "No variables to optimize."),
        ({"opt": "sgd"}, TypeError, "use an optax gradient transformation"),
        ({"loss": 1.0}, TypeError, "it must be an array"),
    ],
)
def test_invalid_optimizer_functions_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        OptimizerFunctionOutput(**{"opt": SGD, "loss": LOSS} | options)


LEARNS = {"optimizer_function": sgd(), "outfeed_queue": OutfeedQueue(), "outfeed_loss": True, "infeed_queue": numbers()}
ONLY_RUN = {"outfeed_queue": OutfeedQueue(), "infeed_queue": numbers()}
LAST = OutfeedQueue(OutfeedMode.LAST)


def learns(stages=TWO, count=4, **options):
    return stages, count, LEARNS | options


def runs(stages=(same,) * 3, count=6, **options):
    return stages, count, ONLY_RUN | options


SERIAL = {"count": 8, "batch_serialization_iterations": 4}
CONCURRENT = {"stages": [same, same, [same, same], same], "count": 8, "device_mapping": [0, 1, [2, 3], 0]}
NESTED = {"stages": [first, [[first], second]], "device_mapping": [0, [0, 1]]}
LIST_LAST = {"stages": [first, [second, second]], "device_mapping": [0, [0, 0]]}
UNSHARDED = {"replicated_optimizer_state_sharding": True, "offload_weight_update_variables": False}
OPTIONS = [PipelineStageOptions()]

REFUSED = {
    "interleaved count": (
        runs(count=10, pipeline_schedule="interleaved"), FailedPreconditionError, "must be a multiple of 3"
    ),
    "grouped count": (runs(count=10), FailedPreconditionError, "must be a multiple of 3"),
    "sharded without offloading": (learns(**UNSHARDED), ValueError, "only offloaded optimizer state can be sharded"),
    "mapping type": (runs(device_mapping=1), TypeError, "device_mapping"),
    "long mapping": (runs(device_mapping=range(4)), ValueError, "Each stage must be mapped"),
    "short mapping": (runs(device_mapping=(0,)), ValueError, "Each stage must be mapped"),
    "no list of stages": (runs(same, 2), TypeError, "computational_stages is .* must be a list of functions"),
    "one stage": (runs([same], 2), ValueError, "at least two"),
    "interleaved branches": (
        learns(**CONCURRENT, pipeline_schedule="interleaved"), NotImplementedError, "The pipelining schedule"
    ),
    "few stage options": (learns(forward_propagation_stages_poplar_options=OPTIONS), ValueError, "2 stages"),
    "kind of stage options": (learns(weight_update_poplar_options=OPTIONS), TypeError, "must be one"),
    "loss alone": (runs(TWO, outfeed_loss=True), ValueError, "An optimizer_function must be provided"),
    "mask alone": (runs(TWO, outfeed_mask=[True]), ValueError, "An optimizer_function must be provided"),
    "no outfeed": (learns(outfeed_queue=None), ValueError, "An outfeed_queue must be provided"),
    "no outfeed for a mask": (
        learns(outfeed_queue=None, outfeed_loss=False, outfeed_mask=[False]),
        ValueError,
        "no outfeed_queue has been provided",
    ),
    "loss and mask": (learns(outfeed_mask=[True]), ValueError, "only one of them"),
    "a mask that is no list": (learns(outfeed_loss=False, outfeed_mask=True), TypeError, "list of bools"),
    "a mask of numbers": (learns(outfeed_loss=False, outfeed_mask=[1]), TypeError, "list of bools"),
    "accumulated last output": (learns(outfeed_queue=LAST, accumulate_outfeed=True), ValueError, "use OutfeedMode.ALL"),
    "reduction method None": (learns(reduction_method=None), ValueError, "Cannot parse None"),
    "reduction method as a number": (learns(reduction_method=10), ValueError, "Cannot parse 10"),
    "unknown reduction method": (learns(reduction_method="Exp"), ValueError, "Cannot parse 'Exp'"),
    "serial on two devices": (learns([same] * 3, **SERIAL, device_mapping=[0, 1, 0]), NotImplementedError, "one"),
    "serial but grouped": (learns(**SERIAL, pipeline_schedule="grouped"), NotImplementedError, "Sequential"),
    "batch serialization with means": (learns(**SERIAL, reduction_method="mean"), ValueError, "use SUM"),
    "interleaved on a shared device": (
        learns([same] * 4, 8, pipeline_schedule="interleaved", device_mapping=[0, 1, 2, 0]),
        NotImplementedError,
        "The pipelining",
    ),
    "no count": (learns(count=None), ValueError, "gradient_accumulation_count is missing"),
    "a count in between": (learns(count=jnp.float32(4.5)), TypeError, "an integer of at least 1 is needed"),
    "nested": (learns(**NESTED), ValueError, "cannot be nested"),
    "a list at the end": (learns(**LIST_LAST), ValueError, "add a stage"),
    "continuous": (learns(continuous_weight_updates=True), NotImplementedError, "leave it out"),
    "a queue": (learns(infeed_queue=[1]), TypeError, "use an InfeedQueue"),
    "an outfeed": (learns(outfeed_queue=[1]), TypeError, "use an OutfeedQueue"),
    "a schedule": (learns(pipeline_schedule=1), TypeError, "PipelineSchedule"),
    "a mode": (learns(recomputation_mode=1), TypeError, "RecomputationMode"),
    "blocks in turns": (
        learns(recomputation_mode=RecomputationMode(3), pipeline_schedule="interleaved"), NotImplementedError, "Then"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_invalid_arguments_are_refused_at_once(arguments, error, words):
    stages, count, options = arguments
    with pytest.raises(error, match=words):
        pipeline(stages, count, **options)


@pytest.mark.parametrize("optimizer_function", [None, sgd()])
def test_a_pipeline_inside_strategy_run_is_refused(optimizer_function):
    """Programs of the original call a pipeline in `strategy.run`; here it must be outside."""
    net = pipeline(TWO, 4, infeed_queue=numbers(), outfeed_queue=OutfeedQueue(), optimizer_function=optimizer_function)
    strategy, state = strategies.IPUStrategy(), net.init(START)
    for call, name in ((lambda: net.init(START), "init of a pipeline"), (lambda: net(state), "a pipeline")):
        with pytest.raises(RuntimeError, match=f"^{name} was called by a replica, inside strategy.run"):
            strategy.run(call)


@pytest.mark.parametrize("mapping", [range(2), (np.int64(0), np.int64(1)), [0, 1], None])
def test_without_a_strategy_a_replica_spans_the_devices_of_the_mapping(mapping):
    net = pipeline(TWO, 4, infeed_queue=numbers(), device_mapping=mapping)
    assert net.strategy.replicas.grid.ipus_per_replica == 2


@pytest.mark.parametrize("options", [{}, {"optimizer_function": sgd()}])
def test_outputs_need_an_outfeed(options):
    net = pipeline(TWO, 4, infeed_queue=numbers(), **options)
    with pytest.raises(ValueError, match="The last computational stage has tensor outputs"):
        net.init(START)


def test_sharding_over_a_device_of_another_stage_is_refused():
    def stage(variables, x):
        with strategies.ipu_shard(1):
            return x * variables["w"]

    net = pipeline([stage, same], 4, device_mapping=[0, 1], **ONLY_RUN)
    with pytest.raises(ValueError, match=r"stage 0 computes something in ipu_shard\(1\), but is on device 0"):
        net.init(START)


def test_capturing_tensors_of_other_programs_is_refused():
    def outer(y):
        return pipeline([lambda _, x: x * y, second], 4, **ONLY_RUN)

    with pytest.raises(ValueError, match="Trying to capture the tensor"):
        jax.jit(outer)(1.0)


@pytest.mark.parametrize(("stages", "number"), [([lambda v, x: None, lambda v: 1.0], 0), ([first, lambda v, x: []], 1)])
def test_a_stage_without_results_is_refused(stages, number):
    with pytest.raises(ValueError, match=f"stage {number} of the pipeline returns nothing"):
        pipeline(stages, 4, **ONLY_RUN).init(START)


def test_wrong_masks_and_results_of_optimizer_functions_are_refused():
    net = pipeline(TWO, 4, **LEARNS | {"outfeed_loss": False, "outfeed_mask": [True, False]})
    with pytest.raises(ValueError, match="outfeed_mask has 2 entries, but 1 outputs of the last stage need one each"):
        net.init(START)
    net = pipeline(TWO, 4, **LEARNS | {"accumulate_outfeed": True, "accumulate_outfeed_dtype": "wide"})
    with pytest.raises(ValueError, match="accumulate_outfeed_dtype is 'wide' for an output of shape"):
        net.init(START)
    net = pipeline(TWO, 4, **LEARNS | {"optimizer_function": lambda loss: loss})
    with pytest.raises(TypeError, match="must return an OptimizerFunctionOutput"):
        net.init(START)
    for early in (net, pipeline(TWO, 4, **ONLY_RUN)):
        with pytest.raises(RuntimeError, match="before init"):
            early(START)


def test_options_of_stages_are_dictionaries():
    with pytest.raises(TypeError, match="matmul_options is 1, a int"):
        PipelineStageOptions(matmul_options=1)
    assert PipelineStageOptions(convolution_options={"a": "b"}).slice_options is None
