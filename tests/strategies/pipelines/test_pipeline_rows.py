"""Tests of the original's strategies that train pipelines."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiers import first_of

import strategies
from strategies import InfeedMode, InfeedQueue, OutfeedQueue, pipelining_ops
from strategies.compat.functions.optimizer_function import OptimizerFunctionOutput

METHODS = list(strategies.GradientAccumulationReductionMethod)
SUM = METHODS[0]


def made(strategy, stages, count, optimizer_function, elements, mode=InfeedMode.INSTANCE, **options):
    """Return a pipeline of two devices that trains, and its outfeed of losses."""
    outfeed = OutfeedQueue()
    with strategy.scope():
        net = pipelining_ops.pipeline(
            stages, count, infeed_queue=InfeedQueue(elements, mode=mode), outfeed_queue=outfeed, outfeed_loss=True,
            optimizer_function=optimizer_function, **options,
        )  # fmt: skip
    return net, outfeed


def sgd(*arguments):
    return lambda loss: OptimizerFunctionOutput(optax.sgd(*arguments), loss)


def dense(rng, *widths):
    """Return kernels drawn by Glorot's rule, and biases of zeros."""
    kernels = {}
    for number, (before, after) in enumerate(itertools.pairwise(widths)):
        limit = np.sqrt(6 / (before + after))
        kernels[f"kernel{number}"] = rng.uniform(-limit, limit, (before, after)).astype(np.float32)
        kernels[f"bias{number}"] = np.zeros(after, np.float32)
    return kernels


def layer(variables, number, x):
    return x @ variables[f"kernel{number}"] + variables[f"bias{number}"]


class TestMultiWorker:
    def test_two_workers_have_every_digit_of_three_updates_and_the_summed_losses(self, on_instances):
        """The losses are summed over the two workers."""

        def program(strategy):
            worker = strategy.instance_index
            net, outfeed = made(
                strategy, [lambda v, x: v["w0"] * x, lambda v, partial: (partial + v["w1"] - 1) ** 2], 4,
                sgd(0.5, 0.0), [np.float32(worker + 1)] * 12, accumulate_outfeed=True,
            )  # fmt: skip
            state, found = net.init({"w0": np.float32(1), "w1": np.float32(2)}), []
            for _ in range(3):
                state = net(state)
                of_worker = np.float32(outfeed.dequeue()[0] / 4)
                loss = strategy.reduce("sum", strategy.per_replica(lambda _, loss=of_worker: loss))
                found.append((float(state.variables["w0"]), float(state.variables["w1"]), float(loss)))
            return found

        expected = [(-15, -8, 13), (189, 118, 2097), (-2403, -1484, 338661)]
        assert on_instances(2, 2, program, ipus_per_replica=2) == [expected] * 2

    @pytest.mark.complete
    def test_two_workers_have_the_losses_of_one_with_the_whole_batch(self, on_instances):
        """Two workers with batches of 2 have the falling losses of one worker with batches of 4.

        The learning rate is an input that the stages pass through to the optimizer.
        """
        variables = dense(np.random.default_rng(42), 20, 256, 128, 10)

        def stage1(variables, lr, images, labels):
            partial = jax.nn.relu(layer(variables, 0, images))
            return lr, jax.nn.relu(layer(variables, 1, partial)), labels

        def stage2(variables, lr, partial, labels):
            logits = layer(variables, 2, partial)
            return lr, optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        def optimizer_function(lr, loss):
            return OptimizerFunctionOutput(optax.sgd(lr), loss)

        def program(strategy):
            workers = [0, 0, 1, 1] if strategy.num_instances == 1 else [strategy.instance_index] * 2
            element = (np.repeat(np.float32(workers)[:, None], 20, 1), np.int32(workers))
            net, outfeed = made(
                strategy, [stage1, stage2], 4, optimizer_function, [element] * 40, inputs=[np.float32(0.01)],
            )  # fmt: skip
            state, losses = net.init(variables), []
            for _ in range(10):
                state = net(state)
                losses.append(float(net.metrics["loss"]))
            assert outfeed.dequeue().shape == (40,)
            return losses

        [reference] = on_instances(1, 1, program, ipus_per_replica=2)
        for losses in on_instances(2, 2, program, ipus_per_replica=2):
            np.testing.assert_almost_equal(losses, reference, decimal=6)
        assert all(after < before for before, after in itertools.pairwise(reference))


@pytest.mark.complete
@pytest.mark.parametrize("method", first_of(METHODS))
def test_two_dense_layers_on_one_device_lower_the_loss_with_equal_variables(method, on_instances):
    """The global loss falls in each of 10 runs, and variables stay equal."""
    variables = dense(np.random.default_rng(1), 4, 8, 2)

    def stage1(variables, x, label):
        return jax.nn.relu(layer(variables, 0, x)), label

    def stage2(variables, x, label):
        return optax.softmax_cross_entropy_with_integer_labels(layer(variables, 1, x), label).mean() / 2

    def program(strategy):
        rank = strategy.instance_index
        element = (np.full((2, 4), rank, np.float32), np.full(2, rank, np.int32))
        net, outfeed = made(
            strategy, [stage1, stage2], 4, sgd(0.01), [element] * 80, repeat_count=2, device_mapping=[0, 0],
            reduction_method=method,
        )  # fmt: skip
        state, losses = net.init(variables), []
        for _ in range(10):
            state = net(state)
            mean = np.float32(outfeed.dequeue().mean())
            losses.append(float(strategy.reduce("sum", strategy.per_replica(lambda _, mean=mean: mean))))
        return losses, strategies.fingerprint(state.variables)

    (losses, variables_of_0), other = on_instances(2, 2, program)
    assert (losses, variables_of_0) == other
    assert all(after < before for before, after in itertools.pairwise(losses))


class TestShardedState:
    """Sharded optimizer state: losses and variables are the same to the last bit."""

    def conv(self, strategy, optimizer, count, repeat, **options):
        """Return the losses and variables of convolutions in a pipeline, on data that differ for each replica."""
        rng = np.random.default_rng(0)
        variables = {
            "first": rng.normal(0, 0.2, (3, 3, 2, 4)).astype(np.float32),
            "scale": np.float32(1),
            "last": rng.normal(0, 0.2, (4, 5)).astype(np.float32),
        }
        base = rng.normal(0, 1, (2, 6, 6, 2)).astype(np.float32)
        elements = [(base * (1 + number % 7) / 7, np.int32([0, number % 5])) for number in range(8 * count * repeat)]

        def stage1(variables, x, label):
            x = jax.lax.conv_general_dilated(
                x * variables["scale"], variables["first"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            return jax.nn.relu(x), label

        def stage2(variables, x, label):
            return optax.softmax_cross_entropy_with_integer_labels(x.mean((1, 2)) @ variables["last"], label).mean()

        net, outfeed = made(
            strategy, [stage1, stage2], count, lambda loss: OptimizerFunctionOutput(optimizer, loss), elements,
            InfeedMode.WHOLE, repeat_count=repeat, **options,
        )  # fmt: skip
        state = net(net.init(variables))
        return strategies.fingerprint(state.variables), np.asarray(outfeed.dequeue())

    def compare(self, on_instances, runs, replicas, *arguments, **more):
        found = []
        for instances, options in runs:
            made = on_instances(
                instances, replicas, lambda s, o=options: self.conv(s, *arguments, **o, **more), ipus_per_replica=2
            )
            losses = [one[1].reshape(len(one[1]), -1) for one in made]
            found.append((made[0][0], np.concatenate(losses, 1).tobytes()))
        assert found == [found[0]] * len(runs)

    @pytest.mark.complete
    def test_sharded_state_on_one_and_two_instances_has_the_same_bits(self, on_instances):
        """Two instances drive 8 replicas on 2 devices each, and are compared with one instance."""
        runs = [
            (1, {}),
            (2, {"replicated_optimizer_state_sharding": True}),
            (2, {}),
        ]
        self.compare(on_instances, runs, 8, optax.sgd(0.01, 0.5), 8, 2)

    @pytest.mark.complete
    @pytest.mark.parametrize("instances", [1, 2])
    def test_offloaded_lamb_has_the_same_bits_with_sharded_state(self, instances, on_instances):
        """LAMB needs norms over all elements; 8 micro-batches, 10 updates, offloaded."""
        offloaded = {"offload_weight_update_variables": True}
        runs = [(1, offloaded), (instances, {**offloaded, "replicated_optimizer_state_sharding": True})]
        self.compare(on_instances, runs, 2, optax.lamb(0.01), 8, 10, reduction_method="mean")

    @pytest.mark.complete
    @pytest.mark.parametrize(
        "options",
        first_of([{"replicated_optimizer_state_sharding": True}, {"offload_activations": True}]),
    )
    def test_weights_shared_by_the_first_and_last_stage_have_the_same_bits(self, options):
        """The mapping is [0, 1, 2, 3, 0]."""
        rng = np.random.default_rng(0)
        variables = {f"w{number}": rng.normal(0, 0.5, (4, 4)).astype(np.float32) for number in range(4)}

        def product(name):
            return lambda variables, x: jnp.tanh(x @ variables[name])

        stages = [*map(product, sorted(variables)), lambda variables, x: jnp.mean((x @ variables["w0"] - 1) ** 2)]
        found = set()
        for mapping, more in (([0] * 5, {"pipeline_schedule": "sequential"}), ([0, 1, 2, 3, 0], options)):
            net, outfeed = made(
                strategies.IPUStrategy(2, ipus_per_replica=4), stages, 20, sgd(0.01, 0.98),
                [np.full((2, 4), number / 7, np.float32) for number in range(40)], device_mapping=mapping, **more,
            )  # fmt: skip
            state = net(net.init(variables))
            found.add((strategies.fingerprint(state.variables), outfeed.dequeue().tobytes()))
        assert len(found) == 1
