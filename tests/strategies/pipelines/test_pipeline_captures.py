"""Captured gradients of pipeline stages: they reach the optimizer, an outfeed and the context."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import strategies
from strategies import (
    GradientAccumulationReductionMethod,
    GradientCaptureContext,
    InfeedMode,
    InfeedQueue,
    OutfeedQueue,
    capture_upstream_gradients,
    pipelining_ops,
)

SUM, MEAN, RUNNING_MEAN = GradientAccumulationReductionMethod
NUMBERS = np.arange(16, dtype=np.float32) / 10
COUNT = 4


def stage_0(variables, x):
    return jnp.tanh(capture_upstream_gradients(variables["w"] * x, tag="tanh_grad_stage_0"))


def stage_1(variables, y):
    return jnp.tanh(capture_upstream_gradients(y, tag="tanh_grad_stage_1"))


def keeping():
    """Return gradient descent whose state is the captured gradients."""

    def update(gradients, state, variables=None, *, captured_grads, **extra):
        return jax.tree.map(lambda leaf: -0.1 * leaf, gradients), captured_grads

    zeros = {f"tanh_grad_stage_{number}": jnp.zeros(()) for number in (0, 1)}
    return optax.GradientTransformationExtraArgs(lambda variables: zeros, update)


def trained(
    optimizer=None,
    replicas=1,
    context=None,
    queue=None,
    stages=(stage_0, stage_1),
    variables=None,
    strategy=None,
    **options,
):
    with (strategy or strategies.IPUStrategy(replicas, ipus_per_replica=2)).scope():
        net = pipelining_ops.pipeline(
            list(stages), COUNT, infeed_queue=InfeedQueue(NUMBERS, mode=InfeedMode.WHOLE),
            outfeed_queue=OutfeedQueue(), outfeed_loss=True,
            optimizer_function=lambda loss: pipelining_ops.OptimizerFunctionOutput(
                optimizer or optax.sgd(0.1), loss, gradient_capture_context=context, captured_gradient_outfeed=queue
            ),
            **options,
        )  # fmt: skip
        return net(net.init({"w": np.float32(1)} if variables is None else variables))


def slopes(replicas=1):
    """Return the gradients of each micro-batch, as means over the replicas."""
    y = np.tanh(NUMBERS[: COUNT * replicas])
    of_1 = 1 - np.tanh(y) ** 2
    return [one.reshape(COUNT, replicas).mean(1) for one in (of_1 * (1 - y**2), of_1)]


@pytest.mark.parametrize(("replicas", "method"), [(1, SUM), (2, MEAN)])
def test_captured_gradients_reach_the_optimizer_an_outfeed_and_the_context(replicas, method):
    """Captured gradients are summed over the micro-batches, like those of variables."""
    context, queue = GradientCaptureContext(), OutfeedQueue()
    state = trained(keeping(), replicas, context, queue, reduction_method=method)
    of_0, of_1 = (one.sum() if method is SUM else one.mean() for one in slopes(replicas))
    fed = queue.dequeue()
    assert fed["tanh_grad_stage_0"].shape == ((1, replicas) if replicas > 1 else (1,))
    for tag, expected in (("tanh_grad_stage_0", of_0), ("tanh_grad_stage_1", of_1)):
        found = [state.optimizer_state.optimizer[tag], context.captured_gradients[tag], fed[tag].ravel()[0]]
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    expected = trained(replicas=replicas, reduction_method=method)
    assert strategies.fingerprint(state.variables) == strategies.fingerprint(expected.variables)


@pytest.mark.parametrize("method", [SUM, RUNNING_MEAN])
def test_without_accumulation_the_optimizer_gets_gradients_of_each_micro_batch(method):
    context = GradientCaptureContext()
    trained(context=context, reduction_method=method, gradient_accumulation_for_captured_grads=False)
    for number, expected in enumerate(slopes()):
        np.testing.assert_allclose(context.captured_gradients[f"tanh_grad_stage_{number}"], expected, rtol=1e-6)


WIDTH = 300  # makes the state sharded


def wide(variables, x):
    return capture_upstream_gradients(variables["w"] * x, tag="wide")


def narrow(variables, y):
    return jnp.sum(jnp.tanh(y) ** 2)


def noting(shapes):
    """Return Adam that records the shapes of the captured gradients."""
    adam = optax.adam(0.1)

    def update(gradients, state, variables=None, *, captured_grads, **extra):
        shapes.append(captured_grads["wide"].shape)
        return adam.update(gradients, state, variables)

    return optax.GradientTransformationExtraArgs(adam.init, update)


def test_captured_gradients_are_whole_if_the_optimizer_state_is_sharded(on_instances):
    """The optimizer and the context of all instances get whole gradients, with the same bits."""
    shapes = []

    def program(strategy, **options):
        context = GradientCaptureContext()
        state = trained(
            noting(shapes),
            context=context,
            stages=(wide, narrow),
            variables={"w": np.linspace(-1, 1, WIDTH, dtype=np.float32)},
            strategy=strategy,
            **options,
        )
        captured = context.captured_gradients["wide"]
        assert captured.shape == (WIDTH,)
        return strategies.fingerprint(state.variables), strategies.fingerprint(captured)

    alone = program(strategies.IPUStrategy(2, ipus_per_replica=2))
    sharded = on_instances(
        2, 2, lambda strategy: program(strategy, replicated_optimizer_state_sharding=True), ipus_per_replica=2
    )
    assert sharded == [alone] * 2
    assert set(shapes) == {(WIDTH,)}


def test_nothing_is_captured_without_a_context():
    state = trained(optax.sgd(0.1))
    assert not hasattr(state.optimizer_state, "captured")
    inference = pipelining_ops.pipeline(
        [stage_0, stage_1], COUNT, inputs=[np.float32(0.5)], outfeed_queue=(fed := OutfeedQueue())
    )
    inference(inference.init({"w": np.float32(1)}))
    np.testing.assert_allclose(fed.dequeue(), np.full(COUNT, np.tanh(np.tanh(0.5))), rtol=1e-6)


NAMES = []


@pytest.mark.parametrize(
    "trainable", [{"w": True, "still": False}, lambda name, leaf: NAMES.append(name) or name == "['w']"]
)
def test_variables_keep_their_names(trainable):
    context = GradientCaptureContext()
    net = pipelining_ops.pipeline(
        [stage_0, lambda variables, y: stage_1(variables, y) * variables["still"]], COUNT, device_mapping=[0, 0],
        infeed_queue=InfeedQueue(NUMBERS), outfeed_queue=OutfeedQueue(),
        optimizer_function=lambda loss: pipelining_ops.OptimizerFunctionOutput(
            optax.sgd(0.1), loss, variables=trainable, gradient_capture_context=context
        ),
    )  # fmt: skip
    state = net(net.init({"w": np.float32(1), "still": np.float32(2)}))
    assert (state.variables["still"], state.variables["w"] != 1) == (2, True)
    assert context.captured_gradients["tanh_grad_stage_1"] > 0
    if callable(trainable):
        assert {"['w']", "['still']"} <= set(NAMES)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"queue": OutfeedQueue()}, ValueError, "no gradient_capture_context captures"),
        ({"context": 1}, TypeError, "use a GradientCaptureContext"),
        ({"context": GradientCaptureContext(), "queue": 1}, TypeError, "use an OutfeedQueue"),
        ({"context": GradientCaptureContext(), "stages": [stage_0, stage_0]}, ValueError, "marks two arrays"),
    ],
)
def test_invalid_capture_options_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        trained(**options)
