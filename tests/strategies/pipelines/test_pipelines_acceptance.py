"""Acceptance tests of the original's pipelines, with its inputs and expected numbers."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiers import first_of

import strategies
from strategies import InfeedQueue, OutfeedQueue, pipelining_ops
from strategies.compat.functions.optimizer_function import OptimizerFunctionOutput
from strategies.pipelines.timetable import PipelineSchedule

SUM = strategies.GradientAccumulationReductionMethod.SUM


METHODS = first_of(strategies.GradientAccumulationReductionMethod)


class Elements:
    """A source whose element k is k mod n in all places; `rows` elements make a batch, which `change` converts."""

    def __init__(self, n, shape, rows=None, change=lambda batch: batch, dtype=np.float32):
        self._numbers, self._shape, self._rows, self._change, self._dtype = n, shape, rows, change, dtype

    def __iter__(self):
        numbers = itertools.cycle(range(self._numbers))
        while True:
            rows = [np.full(self._shape, next(numbers), self._dtype) for _ in range(self._rows or 1)]
            yield self._change(np.stack(rows) if self._rows else rows[0])

    def first(self, count):
        return list(itertools.islice(self, count))


def sgd(*loss_of, rate=0.01):
    """Return an optimizer function; the loss is the first output, or computed by a function from all outputs."""

    def optimizer_function(*outputs):
        return OptimizerFunctionOutput(optax.sgd(rate), loss_of[0](*outputs) if loss_of else outputs[0])

    return optimizer_function


def made(stages, count, outfeed="new", elements=None, **options):
    """Return a pipeline on four devices and its outfeed; stages are functions of inputs, or of variables and inputs."""
    outfeed = OutfeedQueue() if outfeed == "new" else outfeed
    infeed = None if elements is None else InfeedQueue(elements)
    net = pipelining_ops.pipeline(
        stages, gradient_accumulation_count=count, infeed_queue=infeed, outfeed_queue=outfeed, **options
    )
    return net, outfeed


def run(stages, count, variables=None, executions=1, **options):
    """Return all outputs of a pipeline, and its state."""
    with strategies.IPUStrategy(num_replicas=1, ipus_per_replica=4).scope():
        net, outfeed = made(stages, count, **options)
        state = net.init({} if variables is None else variables)
        for _ in range(executions):
            state = net(state)
        return outfeed.dequeue(), state


def outputs_of(stage, variables, values):
    """Return the inputs of the next stage: for a list of functions, the outputs of all."""
    if isinstance(stage, list):
        return tuple(itertools.chain.from_iterable(outputs_of(one, variables, values) for one in stage))
    result = stage(variables, **values) if isinstance(values, dict) else stage(variables, *values)
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def trained(stages, variables, elements, count, updates, optimizer, method=SUM, inputs=()):
    """Return the losses and the variables of the same stages in one function, without a pipeline."""

    def loss_of(values, element):
        fed = (*inputs, *element)
        for stage in stages:
            fed = outputs_of(stage, values, fed)
        return fed[0].astype(jnp.float32) if fed[0].ndim == 0 else fed[0]

    step = jax.jit(jax.value_and_grad(loss_of))
    stream, losses = iter(elements), []
    memory = optimizer.init(variables)
    for _ in range(updates):
        total = jax.tree.map(jnp.zeros_like, variables)
        for _ in range(count):
            loss, gradients = step(variables, next(stream))
            losses.append(float(loss))
            total = jax.tree.map(jnp.add, total, gradients)
        if method is not SUM:
            total = jax.tree.map(lambda leaf: leaf / count, total)
        changes, memory = optimizer.update(total, memory, variables)
        variables = optax.apply_updates(variables, changes)
    return np.array(losses), variables


def identity(variables, *inputs):
    return inputs if len(inputs) > 1 else inputs[0]


def times_w(variables, x):
    return variables["w"] * x


ONE = {"w": jnp.float32(1)}
KWARGS = Elements(5, (4, 4, 2), 2, lambda a: {"a": a, "b": (a + 10) / 2})


def conv_of_ones(variables, c, a, b):
    return jnp.einsum("nhwi,io->nhwo", a, variables["kernel"]) + b, c


def sum_and_c(variables, x, c):
    return jnp.sum(x) + c


CONV = {"kernel": jnp.ones((2, 2))}
LOSSES = np.float32([410.01, 730.01, 650.01, 570.01, 890.01])


class TestComputation:
    @pytest.mark.parametrize("mapping", first_of([[2, 0, 1], [2, 2, 2], None]), ids=str)
    def test_dictionary_elements_become_keyword_arguments(self, mapping):
        """They come after the inputs, on every mapping of stages."""
        losses, _ = run(
            [conv_of_ones, sum_and_c, identity], 12, CONV, elements=KWARGS, inputs=[10.01], device_mapping=mapping,
            pipeline_schedule=PipelineSchedule.Interleaved,
        )  # fmt: skip
        np.testing.assert_allclose(losses, np.tile(LOSSES, 3)[:12], rtol=1e-6)

    def test_a_stage_can_return_one_array_several_times(self):
        def twice(variables, x, y):
            return x, y, y, x

        def last(variables, x1, y1, y2, x2):
            return x2, y2

        x, y = np.ones((1, 4, 4, 2), np.float32), np.ones((1, 2), np.float32)
        fed, _ = run([twice, identity, last], 12, inputs=[x, y], pipeline_schedule="interleaved")
        assert [one.shape for one in fed] == [(12, *x.shape), (12, *y.shape)]
        assert all(np.all(one == 1) for one in fed)

    def test_stages_work_without_variables(self):
        fed, _ = run([lambda _, x: x * x, lambda _, x: x + x, identity], 6, elements=Elements(5, (1,)))
        np.testing.assert_array_equal(fed, np.float32([[0], [2], [8], [18], [32], [0]]))

    def test_a_constant_input_reaches_all_micro_batches(self):
        add = lambda _, x: x + 1  # noqa: E731
        fed, _ = run([lambda _, x: 2 * x, add, add, add], 8, inputs=[42.0])
        np.testing.assert_array_equal(np.ravel(fed), np.full(8, 87, np.float32))

    def test_a_stage_can_contain_a_condition(self):
        def branch(variables, x):
            return jax.lax.cond(x[0, 0] > 2, lambda: 1.0, lambda: 2.0)

        fed, _ = run([identity, identity, branch], 6, elements=Elements(10, (1,), 1))
        np.testing.assert_array_equal(fed, np.float32([2, 2, 2, 1, 1, 1]))

    def test_dictionaries_are_fed_out_as_dictionaries(self):
        """The last stage of an inference gives a dictionary."""
        fed, _ = run([identity, identity, identity, lambda _, x: {"x": x}], 8, inputs=[1.0])
        assert set(fed) == {"x"}
        np.testing.assert_array_equal(fed["x"], np.ones(8))


class TestOutfeeds:
    def test_outfeed_loss_feeds_out_the_loss(self):
        """x = 0 and the loss is x + 1; it comes without a list around it."""
        stages = [lambda variables, _, x: variables["w"] * x, identity, identity, identity]
        fed, _ = run(stages, 8, ONE, inputs=[10, 0.0], optimizer_function=sgd(lambda x: x + 1.0), outfeed_loss=True)
        np.testing.assert_array_equal(fed, np.ones(8))

    def test_outfeed_mask_leaves_outputs_out(self):
        """True leaves an output out."""
        first = lambda variables, x: (x, variables["w"] * x)  # noqa: E731
        more = lambda _, x, y: (x, y + 1)  # noqa: E731
        fed, _ = run(
            [first, more, more, more], 8, ONE, inputs=[1.0], optimizer_function=sgd(), outfeed_mask=[True, False]
        )
        np.testing.assert_array_equal(np.asarray(fed), np.full((1, 8), 4))

    def test_all_outputs_are_fed_out_as_a_list(self):
        fed, _ = run([times_w, identity], 4, ONE, inputs=[3.0], optimizer_function=sgd())
        np.testing.assert_array_equal(np.asarray(fed), np.full((1, 4), 3))

    @pytest.mark.parametrize("method", METHODS)
    def test_an_accumulated_loss_is_a_sum(self, method):
        """The sum does not depend on the reduction method of gradients."""
        fed, _ = run(
            [times_w, identity, identity, identity], 8, ONE, inputs=[0.0], outfeed_loss=True, accumulate_outfeed=True,
            optimizer_function=sgd(lambda x: x + 1.0), reduction_method=method,
        )  # fmt: skip
        np.testing.assert_array_equal(fed, [8])

    def test_an_accumulated_output_comes_once_per_execution(self):
        """Training returns a list of sums, and inference does so too."""
        options = {"inputs": [1.0], "accumulate_outfeed": True}
        fed, _ = run([times_w, identity, identity, identity], 8, ONE, optimizer_function=sgd(), **options)
        np.testing.assert_array_equal(np.asarray(fed), [[8]])
        fed, _ = run([identity] * 4, 8, executions=2, **options)
        np.testing.assert_array_equal(np.ravel(fed), [8, 8])

    def test_accumulated_outputs_can_have_another_dtype(self):
        """8 times 30000 is too much for float16, the dtype of the stages; the original's simulator rounds less."""

        def more(variables, x):
            return (x + 10000).astype(jnp.float16)

        options = {"inputs": [1.0], "accumulate_outfeed": True, "optimizer_function": sgd(lambda x: x + 1.0)}
        fed, _ = run([times_w, more, more, more], 8, ONE, **options)
        assert np.all(np.isinf(np.asarray(fed)))
        fed, _ = run([times_w, more, more, more], 8, ONE, accumulate_outfeed_dtype=lambda of: jnp.float32, **options)
        np.testing.assert_array_equal(np.asarray(fed), [[240000]])
        assert np.asarray(fed).dtype == np.float32

    @pytest.mark.complete
    @pytest.mark.parametrize("training", [True, False])
    def test_several_outputs_are_accumulated(self, training):
        first = (lambda variables, x, y: (variables["w"] * x, y)) if training else identity
        more = {"optimizer_function": sgd(lambda x, y: x + y + 1.0)} if training else {}
        fed, _ = run([first, identity, identity, identity], 8, ONE, inputs=[1.0, 2.0], accumulate_outfeed=True, **more)
        np.testing.assert_array_equal(np.asarray(fed), [[8], [16]])


def stages_of_pl_20(dtype):
    def conv(variables, c, image, label):
        return jnp.einsum("nhwi,io->nhwo", image, variables["k1"]) + variables["b1"], c, label

    def larger(variables, x, c, label):
        return x * 20, c, label

    def dense(variables, x, c, label):
        return x @ variables["k2"] + variables["b2"], c, label

    def loss(variables, x, c, label):
        return jnp.sum(x @ variables["k3"] + variables["b3"]) + c + label

    variables = {f"k{n}": jnp.full((2, 2), 0.5, dtype) for n in (1, 2, 3)}
    return [conv, larger, dense, loss], variables | {f"b{n}": jnp.full(2, 0.5, dtype) for n in (1, 2, 3)}


class TestTraining:
    """Training in stages: losses and variables are those of the same stages in one function."""

    def compare(self, stages, variables, elements, count, rtol=1e-5, method=SUM, inputs=(), optimizer=None, **options):
        optimizer = optimizer or optax.sgd(0.01)
        losses, expected = trained(stages, variables, elements, count, 2, optimizer, method, inputs)
        fed, state = run(
            stages, count, variables, elements=elements, repeat_count=2, inputs=list(inputs), reduction_method=method,
            optimizer_function=lambda loss: OptimizerFunctionOutput(optimizer, loss), outfeed_loss=True, **options,
        )  # fmt: skip
        np.testing.assert_allclose(np.asarray(fed, np.float32), losses, rtol=rtol)
        for one, other in zip(jax.tree.leaves(state.variables), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=10 * rtol, atol=1e-6)

    @pytest.mark.complete
    @pytest.mark.parametrize("method", METHODS)
    def test_four_interleaved_stages_train_as_one_function_in_float32(self, method):
        """20 micro-batches, two updates, and a scalar beside the batches."""
        stages, variables = stages_of_pl_20(jnp.float32)
        elements = Elements(7, (4, 4, 2), 2, lambda batch: (batch / 7, batch[0, 0, 0, 0]))
        self.compare(
            stages, variables, elements, 20, method=method, inputs=[np.float32(10.01)], optimizer=optax.sgd(1e-6),
            pipeline_schedule=PipelineSchedule.Interleaved, rtol=1e-6,
        )  # fmt: skip

    @pytest.mark.complete
    @pytest.mark.parametrize("method", strategies.GradientAccumulationReductionMethod)
    def test_four_interleaved_stages_train_as_one_function_in_float16(self, method):
        """The tolerance is 2e-3."""
        stages, variables = stages_of_pl_20(jnp.float16)
        elements = Elements(7, (4, 4, 2), 2, lambda batch: (batch / 7, batch[0, 0, 0, 0]), np.float16)
        self.compare(
            stages, variables, elements, 20, method=method, inputs=[np.float16(10.01)], optimizer=optax.sgd(1e-7),
            pipeline_schedule=PipelineSchedule.Interleaved, rtol=2e-3,
        )  # fmt: skip

    @pytest.mark.complete
    @pytest.mark.parametrize("method", strategies.GradientAccumulationReductionMethod)
    def test_residual_blocks_train_as_one_function(self, method):
        """Convolutions with a skip connection; 18 micro-batches."""

        def conv(x, kernel, stride=1):
            shape = ("NHWC", "HWIO", "NHWC")
            return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=shape)

        def first(variables, image, label):
            x = jax.nn.relu(conv(image, variables["first"], 2))
            return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"), label

        def block(name):
            def residual(variables, x, label):
                return jax.nn.relu(x + conv(jax.nn.relu(conv(x, variables[f"{name}0"])), variables[f"{name}1"])), label

            return residual

        def loss(variables, x, label):
            logits = x.mean((1, 2)) @ variables["last"]
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, label))

        rng = np.random.default_rng(5)
        shapes = {"first": (3, 3, 1, 4), "last": (4, 10)} | {
            f"{name}{n}": (3, 3, 4, 4) for name in "ab" for n in (0, 1)
        }
        variables = {name: jnp.asarray(rng.normal(0, 0.3, shape), jnp.float32) for name, shape in shapes.items()}
        elements = Elements(10, (8, 8, 1), 4, lambda batch: (batch / 10, batch[:, 0, 0, 0].astype(np.int32)))
        self.compare(
            [first, block("a"), block("b"), loss], variables, elements, 18, method=method, rtol=1e-4,
            pipeline_schedule="one_forward_one_backward",
        )  # fmt: skip

    @pytest.mark.complete
    def test_an_embedding_trains_as_one_function(self):
        """20 micro-batches look up rows of a table."""

        def look_up(variables, index, label):
            return variables["table"][index], label

        def loss(variables, x, label):
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(jnp.sum(x, -1), label))

        table = np.random.default_rng(0).normal(0, 0.1, (10, 16)).astype(np.float32)
        elements = Elements(10, (4,), 2, lambda v: (np.int32(v + np.arange(4)) % 10, np.int32(v[:, 0] % 4)))
        self.compare(
            [look_up, identity, identity, loss], {"table": jnp.asarray(table)}, elements, 20,
            pipeline_schedule=PipelineSchedule.Interleaved,
        )  # fmt: skip

    @pytest.mark.complete
    @pytest.mark.parametrize("schedule", first_of([PipelineSchedule.Grouped, PipelineSchedule.Sequential]))
    @pytest.mark.parametrize("mapping", first_of([[0, 1, 0, 2, 0], [0, 1, 2, 3, 0], [0, 0, 2, 3, 0]]), ids=str)
    def test_stages_that_share_weights_train_as_one_function(self, schedule, mapping):
        """The first and the last stage have the same weights, and are on the same device."""

        def product(name):
            return lambda variables, x, label: (x @ variables[name], label)

        def loss(variables, x, label):
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(x @ variables["w0"], label))

        rng = np.random.default_rng(1)
        variables = {f"w{n}": jnp.asarray(rng.normal(0, 0.3, (4, 4)), jnp.float32) for n in range(4)}
        elements = Elements(7, (4,), 2, lambda batch: (batch / 7, (batch[:, 0] % 4).astype(np.int32)))
        self.compare(
            [*(product(f"w{n}") for n in range(4)), loss], variables, elements, 20, device_mapping=mapping,
            pipeline_schedule=schedule, rtol=1e-4,
        )  # fmt: skip

    def compare_small(self, second, count=24, labels=lambda v: (v.mean(1) / 10).astype(np.int32), **options):
        def product(variables, x, label):
            return x.astype(jnp.float32) @ variables["w"] / 10, label

        def loss(variables, x, label):
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(x, label))

        weights = np.random.default_rng(2).normal(0, 0.3, (4, 4)).astype(np.float32)
        elements = Elements(10, (4,), 4, lambda batch: (batch, labels(batch)))
        stages = [product, second, loss]
        self.compare(stages, {"w": jnp.asarray(weights)}, elements, count, rtol=1e-4, **options)

    @pytest.mark.complete
    def test_a_custom_derivative_trains_as_one_function(self):
        """The derivative is not the true one."""

        @jax.custom_vjp
        def squared(x):
            return x * x

        squared.defvjp(lambda x: (x * x, x * x), lambda residual, dy: (dy * residual,))
        self.compare_small(lambda _, x, label: (squared(x), label))

    @pytest.mark.complete
    def test_a_loop_trains_as_one_function(self):
        """The loop squares x several times."""
        self.compare_small(lambda _, x, label: (jax.lax.fori_loop(0, 3, lambda _, x: x * x, x), label))

    @pytest.mark.complete
    def test_arrays_made_by_a_loop_train_as_one_function(self):
        """The loop makes [0, 2, 4, 6]."""

        def second(variables, x, label):
            _, numbers = jax.lax.scan(lambda i, _: (i + 1, jnp.float32(2) * i), jnp.int32(0), length=4)
            return x * numbers, label

        self.compare_small(second)

    @pytest.mark.complete
    def test_a_permutation_trains_as_one_function(self):
        """The permutation is inverted."""
        inverted = np.argsort([1, 0])
        self.compare_small(lambda _, x, label: (jnp.transpose(x, inverted), label))

    @pytest.mark.complete
    @pytest.mark.parametrize("mapping", first_of([[0, [0, 1], 1], [[0, 1], 0, 1], [-1, 0, 1]]), ids=str)
    def test_concurrent_functions_of_a_stage_train_as_one_function(self, mapping):
        """All functions get the same arguments and elements of the infeed; the next stage gets the outputs of all."""

        def of(name):
            return lambda variables, x, label: (jnp.tanh(x @ variables[name]), label)

        def difference(variables, *values):
            x, label = (values[0] - values[2], values[3]) if len(values) == 4 else values
            return x @ variables["last"], label

        def loss(variables, x, label):
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(x, label))

        def difference_and_loss(variables, *values):
            return loss(variables, *difference(variables, *values))

        stages = {
            "[0, [0, 1], 1]": [of("first"), [of("left"), of("right")], difference_and_loss],
            "[[0, 1], 0, 1]": [[of("left"), of("right")], difference, loss],
            "[-1, 0, 1]": [of("first"), difference, loss],
        }[str(mapping)]
        rng = np.random.default_rng(3)
        names = ("first", "left", "right", "last")
        variables = {name: jnp.asarray(rng.normal(0, 0.5, (4, 4)), jnp.float32) for name in names}
        elements = Elements(10, (4,), 2, lambda batch: (batch / 10, (batch[:, 0] % 4).astype(np.int32)))
        self.compare(stages, variables, elements, 18, device_mapping=mapping, rtol=1e-4)


class TestGradients:
    def test_accumulated_gradients_have_the_shape_of_the_variable(self):
        seen = []

        def note(updates, state, params=None):
            seen.append(jax.tree.map(jnp.shape, updates))
            return jax.tree.map(lambda leaf: -0.01 * leaf, updates), state

        optimizer = optax.GradientTransformation(lambda params: optax.EmptyState(), note)
        run(
            [times_w, lambda _, x: jnp.sum(x)], 4, {"w": jnp.ones((1, 2, 3))}, inputs=[0.0],
            optimizer_function=lambda loss: OptimizerFunctionOutput(optimizer, loss),
        )  # fmt: skip
        assert jax.tree.leaves(seen, is_leaf=lambda each: isinstance(each, tuple) and len(each) == 3)[0] == (1, 2, 3)

    def test_float16_gradients_are_accumulated_in_float32(self):
        """The gradients are eight times the greatest float16, reduced to their mean."""
        greatest = np.finfo(np.float16).max
        seen = []

        def note(updates, state, params=None):
            jax.debug.callback(lambda leaf: seen.append(np.asarray(leaf)), updates["w"])
            return jax.tree.map(lambda leaf: (-(2.0**-10) * leaf).astype(jnp.float16), updates), state

        optimizer = optax.GradientTransformation(lambda params: optax.EmptyState(), note)
        elements = [(greatest, np.float16(0))] * 8
        run(
            [lambda variables, x, y: (variables["w"] * x, y), identity, identity, lambda _, x, y: x + y], 8,
            {"w": jnp.float16(1)}, elements=elements, gradient_accumulation_dtype=jnp.float32,
            reduction_method=strategies.GradientAccumulationReductionMethod.MEAN,
            optimizer_function=lambda loss: OptimizerFunctionOutput(optimizer, loss),
        )  # fmt: skip
        jax.effects_barrier()
        assert [(one.dtype, float(one)) for one in seen] == [(np.float32, float(greatest))]


def test_an_infeed_continues_in_the_next_execution():
    fed, _ = run([identity, identity], 10, executions=2, elements=Elements(7, ()), pipeline_schedule="sequential")
    np.testing.assert_array_equal(np.ravel(fed), np.arange(20) % 7)


@pytest.mark.parametrize("schedule", first_of(reversed(PipelineSchedule)))
def test_every_schedule_has_the_bits_of_stages_one_after_another(schedule):
    """A small network runs on four devices."""

    def layer(name):
        return lambda variables, x: jnp.tanh(x @ variables[name])

    def losses_of(schedule):
        stages = [*(layer(f"w{n}") for n in range(3)), lambda variables, x: jnp.mean((x @ variables["w3"] - 1) ** 2)]
        rng = np.random.default_rng(4)
        variables = {f"w{n}": jnp.asarray(rng.normal(0, 0.5, (8, 8)), jnp.float32) for n in range(4)}
        return run(
            stages, 8, variables, elements=Elements(7, (8,), 3, lambda batch: batch / 7), pipeline_schedule=schedule,
            optimizer_function=sgd(rate=0.1), outfeed_loss=True, repeat_count=3,
        )  # fmt: skip

    (losses, state), (others, other) = losses_of(PipelineSchedule.Sequential), losses_of(schedule)
    assert np.asarray(losses).tobytes() == np.asarray(others).tobytes()
    assert strategies.fingerprint(state.variables) == strategies.fingerprint(other.variables)
