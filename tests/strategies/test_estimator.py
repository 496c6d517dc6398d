"""Estimators: the original's rows, and the same bits as `Trainer`."""

import functools
import gc
import itertools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from estimator_parts import Seen, config_of, increasing
from tiers import also

import strategies
from popdist.compat import ipu
from strategies.compat import estimator as est
from strategies.compat.estimator import (
    CrossReplicaOptimizer,
    EstimatorOptimizer,
    EvalSpec,
    IPUEstimator,
    IPUEstimatorSpec,
    IPURunConfig,
    ModeKeys,
    RunConfig,
    TrainSpec,
    train_and_evaluate,
)


def listed(*batches):
    return lambda: [np.asarray(batch, np.float32) for batch in batches]


def passed_on(reduce):
    """Return a `model_fn` that trains nothing, with a loss of the features."""
    hooks = dict.fromkeys(["training_hooks", "evaluation_hooks", "prediction_hooks"])

    def model_fn(features, mode):
        loss = reduce(features)
        return IPUEstimatorSpec(mode, predictions=features, loss=loss, train_op=loss, eval_metric_ops={}, **hooks)

    return model_fn


def square(features, labels, mode):
    w = est.get_variable("w", initializer=2.0)
    if mode == ModeKeys.PREDICT:
        return IPUEstimatorSpec(mode, w * features)
    loss = jnp.mean((w * features - labels) ** 2)
    return IPUEstimatorSpec(mode, None, loss, optax.sgd(0.5), {"error": loss})


def pairs(features, labels):
    return lambda: zip(np.asarray(features, np.float32), np.asarray(labels, np.float32), strict=True)


# ---- training


def test_steps_are_counted_in_iterations(tmp_path):
    seen, batch_sizes = Seen(), []

    def input_fn(params):
        batch_sizes.append(params["batch_size"])
        return increasing(10, (), params["batch_size"])()

    estimator = IPUEstimator(passed_on(jnp.sum), tmp_path, config_of(loops=2), train_batch_size=2)
    for steps in (4, 8):
        assert estimator.train(input_fn, [seen], steps=4).get_variable_value("global_step") == steps
    estimator.train(input_fn, [seen], max_steps=9)
    estimator.train(input_fn, [seen], max_steps=9)
    assert seen.steps == [2, 4, 6, 8, 10]
    assert set(batch_sizes) == {2}


def test_a_worker_alone_gets_the_input_context_that_its_function_needs():
    def needing(input_context):
        contexts.append((input_context.num_input_pipelines, input_context.input_pipeline_id))
        return increasing(2)()

    def asking(input_context="mine"):
        contexts.append(input_context)
        return increasing(2)()

    contexts = []
    for input_fn in (needing, asking):
        IPUEstimator(metric(jnp.mean)).evaluate(input_fn, steps=1)
    assert contexts == [(1, 0), "mine"]


def test_an_accumulating_optimizer_changes_variables_at_each_fourth_iteration():
    """The gradient of w is each feature."""

    def model_fn(features, mode):
        loss = est.get_variable("w", initializer=1.0) * features
        optimizer = ipu.optimizers.CrossReplicaGradientAccumulationOptimizerV2(optax.sgd(1.0), 4)
        return IPUEstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss))

    estimator, found = IPUEstimator(model_fn), []
    for _ in range(4):
        found.append(float(estimator.train(increasing(2), steps=2).get_variable_value("w")))
    assert found == [1, -1, -1, -3]


def test_the_loss_is_the_mean_over_the_iterations_of_a_loop():
    seen = Seen()
    IPUEstimator(passed_on(jnp.sum), config=config_of(loops=2)).train(increasing(10, (2,), 2), [seen], steps=6)
    assert seen.losses == [6, 22, 18]


def test_replicas_take_elements_in_turns_and_average_their_losses():
    seen = Seen()
    model_fn = passed_on(strategies.cross_replica_ops.cross_replica_sum)
    IPUEstimator(model_fn, config=config_of(4, 2)).train(increasing(10), [seen], steps=6)
    assert (seen.losses, seen.steps) == ([14, 16, 18], [2, 4, 6])


@pytest.mark.parametrize("instances", [also(1), 2])
def test_gradients_of_workers_are_averaged_by_a_host_call(on_instances, instances, tmp_path):
    """A row of the original: w is 2, -0.5, 3.25, -2.375. The reported loss is the mean over workers."""

    def run(strategy):
        contexts, values = [], []

        def model_fn(features, labels, mode):
            w = est.get_variable("w", initializer=2.0)
            loss = jnp.mean((w * features - labels) ** 2)
            optimizer = EstimatorOptimizer(optax.sgd(0.5))
            gradients, variables = zip(*optimizer.compute_gradients(loss), strict=True)

            def apply(*gradients):
                return optimizer.apply_gradients(zip(gradients, variables, strict=True))

            return IPUEstimatorSpec(mode, loss=loss, train_op=loss, host_call=(apply, gradients))

        def input_fn(mode, input_context):
            contexts.append((input_context.num_input_pipelines, input_context.input_pipeline_id))
            data = np.array([[1], [2]], np.float32)[input_context.input_pipeline_id :: 2]
            return ((row[None], row[None]) for row in itertools.cycle(data))

        class Values:
            def after_run(self, estimator, run_values):
                values.append((run_values.results["global_step"], run_values.results["loss"]))

        estimator = IPUEstimator(model_fn, tmp_path, RunConfig(train_distribute=strategy))
        found = []
        for _ in range(3):
            estimator.train(input_fn, [Values()], steps=1)
            found.append(float(estimator.get_variable_value("w")))
        return found, values, set(contexts)

    told = on_instances(instances, 2, run)
    assert [found for found, _, _ in told] == [[-0.5, 3.25, -2.375]] * instances
    losses = [(1 + 4) / 2, (2.25 + 9) / 2, (5.0625 + 20.25) / 2]
    assert [values for _, values, _ in told] == [list(zip((1, 2, 3), losses, strict=True))] * instances
    assert set().union(*(contexts for *_, contexts in told)) == {(2, 0), (2, 1)}


def test_the_reported_loss_is_the_mean_over_workers_and_replicas():
    seen = Seen()
    config = config_of(2, train_distribute=strategies.IPUStrategy(4))

    def model_fn(features, labels, mode):
        loss = est.get_variable("w", initializer=1.0) * jnp.mean(features)
        return IPUEstimatorSpec(mode, loss=loss, train_op=CrossReplicaOptimizer(optax.sgd(0.0)).minimize(loss))

    def input_fn(input_context):
        return pairs(np.arange(4) + 4 * input_context.input_pipeline_id, np.zeros(4))()

    IPUEstimator(model_fn, config=config).train(input_fn, [seen])
    assert seen.losses == [(0 + 1 + 4 + 5) / 4, (2 + 3 + 6 + 7) / 4]


@pytest.mark.parametrize("instances", [also(1), 2, also(4)])
def test_training_has_the_bits_of_a_trainer(on_instances, instances, tmp_path):
    """Four workers; the variables do not depend on the number of instances."""
    random = np.random.default_rng(0)
    x, y = random.standard_normal((64, 8)).astype(np.float32), random.standard_normal(64).astype(np.float32)
    first = random.standard_normal((8, 1)).astype(np.float32)

    def loss_of(w, b, x, y):
        return jnp.mean((jnp.tanh(x @ w)[:, 0] + b - y) ** 2)

    def model_fn(features, labels, mode):
        loss = loss_of(est.get_variable("w", initializer=first), est.get_variable("b"), features["x"], labels)
        return IPUEstimatorSpec(mode, loss=loss, train_op=EstimatorOptimizer(optax.adam(0.1)).minimize(loss))

    def input_fn(mode, params, input_context):
        own, size = slice(input_context.input_pipeline_id, None, 4), params["batch_size"]
        rows = [({"x": x[own][k : k + size]}, y[own][k : k + size]) for k in range(0, 16, size)]
        return rows * 3

    def run(strategy):
        config = RunConfig(train_distribute=strategy)
        estimator = IPUEstimator(model_fn, tmp_path, config, {"unused": 1}, train_batch_size=16)
        estimator.train(input_fn, steps=5).train(input_fn, steps=3)
        return {name: estimator.get_variable_value(name) for name in ("w", "b")}

    model_fn = _with_params(model_fn)
    found = on_instances(instances, 4, run)
    strategy = strategies.IPUStrategy(4)

    def loss_fn(variables, batch, key):
        return loss_of(variables["w"], variables["b"], batch["x"], batch["y"])

    trainer = strategies.Trainer(strategy, loss_fn, optax.adam(0.1))
    state = trainer.init({"w": first, "b": np.zeros((), np.float32)})
    for step in [0, 1, 2, 3, 0, 0, 1, 2]:
        rows = np.concatenate([np.arange(64)[worker::4][4 * step : 4 * step + 4] for worker in range(4)])
        state, _ = trainer.step(state, {"x": x[rows], "y": y[rows]})
    wanted = strategies.fingerprint(state.variables)
    assert [strategies.fingerprint(one) for one in found] == [wanted] * instances


def _with_params(model_fn):
    def taking(features, labels, mode, params):
        return model_fn(features, labels, mode)

    return taking


def test_each_training_calls_model_fn_with_its_present_values():
    """A training continues with the momentum of the one before."""
    scale = 1.0

    def model_fn(features, mode, params):
        loss = scale * est.get_variable("w", initializer=0.0) * features
        return IPUEstimatorSpec(mode, loss=loss, train_op=optax.sgd(params["rate"], 0.5))

    estimator, found = IPUEstimator(model_fn, params={"rate": 1.0}), []
    for scale, estimator.params["rate"] in ((1.0, 1.0), (3.0, 1.0), (3.0, 10.0)):  # noqa: B007  model_fn reads it
        estimator.train(lambda: np.ones(1, np.float32))
        found.append(float(estimator.get_variable_value("w")))
    assert found == [-1, -1 - 3.5, -1 - 3.5 - 10 * 4.75]


def test_another_optimizer_in_a_later_training_is_refused():
    optimizer = optax.sgd(0.1)

    def model_fn(features, mode):
        return IPUEstimatorSpec(mode, loss=est.get_variable("w", initializer=0.0) * features, train_op=optimizer)

    estimator = IPUEstimator(model_fn).train(lambda: np.ones(1, np.float32))
    optimizer = optax.adam(0.1)
    with pytest.raises(ValueError, match="another optimizer or other variables than before; use a new estimator"):
        estimator.train(lambda: np.ones(1, np.float32))
    optimizer = optax.sgd(0.2)
    estimator.train(lambda: np.ones(1, np.float32))
    assert estimator.get_variable_value("w") == pytest.approx(-0.3)


def test_a_later_training_frees_the_state_of_the_one_before():
    def model_fn(features, mode):
        w = est.get_variable("w", initializer=np.zeros(1031, np.float32))
        return IPUEstimatorSpec(mode, loss=(w.sum() - features) ** 2, train_op=optax.adam(0.1))

    class Counting:
        def after_run(self, context, values):
            found.append(sum(array.shape == (1031,) for array in jax.live_arrays()))

    found, estimator = [], IPUEstimator(model_fn)
    for _ in range(3):
        gc.collect()
        estimator.train(lambda: np.ones(1, np.float32), [Counting()])
    assert found[1:] == found[:1] * 2


def test_the_loss_that_is_trained_may_be_another_than_the_loss_that_is_reported():
    seen = Seen()

    def model_fn(features, mode):
        w = est.get_variable("w", initializer=1.0)
        train_op = EstimatorOptimizer(optax.sgd(1.0)).minimize(3 * w)
        return IPUEstimatorSpec(mode, loss=w + 10, train_op=train_op)

    estimator = IPUEstimator(model_fn).train(increasing(3), [seen], steps=2)
    assert (seen.losses, estimator.get_variable_value("w")) == ([11, 8], -5)


def test_only_the_given_variables_are_trained():
    def model_fn(features, mode):
        v, w = est.get_variable("v", initializer=1.0), est.get_variable("w", initializer=1.0)
        loss = v + 2 * w
        return IPUEstimatorSpec(
            mode, loss=loss, train_op=EstimatorOptimizer(optax.sgd(1.0)).minimize(loss, var_list=[w])
        )

    estimator = IPUEstimator(model_fn).train(increasing(3), steps=1)
    assert [estimator.get_variable_value(name) for name in ("v", "w")] == [1, -1]


def test_the_global_step_is_that_before_the_loop():
    seen = Seen()

    def model_fn(features, mode):
        loss = est.get_global_step().astype(jnp.float32)
        return IPUEstimatorSpec(mode, loss=loss, train_op=loss)

    IPUEstimator(model_fn, config=config_of(loops=2)).train(increasing(3), [seen], steps=6)
    assert seen.losses == [0, 2, 4]


def test_an_increment_of_the_global_step_is_refused():
    def model_fn(features, mode):
        loss = est.get_variable("w")
        return IPUEstimatorSpec(
            mode, loss=loss, train_op=EstimatorOptimizer(optax.sgd(1)).minimize(loss, est.get_global_step())
        )

    with pytest.raises(ValueError, match="global_step"):
        IPUEstimator(model_fn).train(increasing(3), steps=1)


def calling(function, arrays, train_op=None):
    def model_fn(features, mode):
        loss = jnp.sum(features)
        return IPUEstimatorSpec(mode, loss=loss, train_op=loss, host_call=(function, arrays(features, loss)))

    return model_fn


@pytest.mark.parametrize(
    ("arrays", "wanted"),
    [
        also(lambda features, loss: [loss], [(1,), (2,)]),
        also(lambda features, loss: [], [(), ()]),
        (lambda features, loss: [loss, features + 1], [(1, 2), (2, 3)]),
    ],
)
def test_the_host_calls_a_function_after_each_step(arrays, wanted):
    calls = []

    def function(*arguments):
        calls.append(arguments)
        return 0

    IPUEstimator(calling(function, arrays)).train(lambda: np.array([1, 2], np.float32), steps=2)
    assert calls == wanted


def test_the_host_calls_the_function_for_each_worker(on_instances):
    def run(strategy):
        calls = []
        model_fn = calling(lambda *arguments: calls.append(arguments) or 0, lambda features, loss: [features, loss])

        def input_fn(input_context):
            return [np.full((2,), 10 * input_context.input_pipeline_id + k, np.float32) for k in range(2)]

        IPUEstimator(model_fn, config=RunConfig(train_distribute=strategy)).train(input_fn)
        return [(features.tolist(), float(loss)) for features, loss in calls]

    both = [[([10 * worker + k] * 2, 2.0 * (10 * worker + k)) for worker in range(2)] for k in range(2)]
    assert on_instances(1, 2, run) == [both[0] + both[1]]
    assert on_instances(2, 2, run) == [[both[0][worker], both[1][worker]] for worker in range(2)]


def test_a_host_function_without_a_result_is_refused():
    model_fn = calling(lambda loss: None, lambda features, loss: [loss])
    with pytest.raises(TypeError, match="returns None"):
        IPUEstimator(model_fn).train(increasing(3), steps=1)


@pytest.mark.complete
def test_a_variable_of_the_model_and_of_the_host_is_refused():
    def model_fn(features, mode):
        w = est.get_variable("w")
        return IPUEstimatorSpec(
            mode, loss=w, train_op=optax.sgd(1.0), host_call=(lambda w: w + est.get_variable("w"), [w])
        )

    with pytest.raises(ValueError, match="host_call makes {'w'}"):
        IPUEstimator(model_fn).train(increasing(3), steps=1)


def test_a_host_function_that_applies_no_gradients_is_refused():
    def model_fn(features, mode):
        loss = est.get_variable("w")
        [(gradient, _)] = EstimatorOptimizer(optax.sgd(1)).compute_gradients(loss)
        return IPUEstimatorSpec(mode, loss=loss, train_op=loss, host_call=(lambda gradient: 0, [gradient]))

    with pytest.raises(ValueError, match="return apply_gradients"):
        IPUEstimator(model_fn).train(increasing(3), steps=1)


def test_a_changed_gradient_is_refused():
    optimizer = EstimatorOptimizer(optax.sgd(1))
    with pytest.raises(TypeError, match="MapGradientOptimizer"):
        optimizer.apply_gradients([(np.ones(1), None)])


def test_host_calls_with_several_iterations_are_refused():
    model_fn = calling(lambda loss: 0, lambda features, loss: [loss])
    with pytest.raises(ValueError, match="host_call"):
        IPUEstimator(model_fn, config=config_of(loops=2)).train(increasing(3), steps=2)


def counting(features, mode):
    """Return a spec whose `host_call` adds the losses, and counts its calls."""
    loss = jnp.sum(features)

    def add(loss):
        total = est.get_variable("total", initializer=0.0)
        calls = est.get_variable("calls", initializer=0, dtype=np.int32)
        total += loss
        calls += 1
        return total

    return IPUEstimatorSpec(mode, loss=loss, train_op=loss, host_call=(add, [loss]))


@pytest.mark.parametrize("instances", [also(1), 2])
def test_variables_of_a_host_call_are_of_the_worker_and_kept_in_checkpoints(on_instances, instances, tmp_path):
    def run(strategy):
        def input_fn(input_context):
            return listed([1 + 10 * input_context.input_pipeline_id], [2])()

        config, found = RunConfig(train_distribute=strategy), []
        for _ in range(2):
            estimator = IPUEstimator(counting, tmp_path, config).train(input_fn)
            found.append(tuple(float(estimator.get_variable_value(name)) for name in ("total", "calls")))
        return found

    assert on_instances(instances, 2, run) == [[(3, 2), (6, 4)], [(13, 2), (16, 4)]][:instances]
    assert IPUEstimator(counting, tmp_path).get_variable_value("total") == 6


def test_a_host_call_reads_the_global_step_and_calls_an_initializer_once():
    calls, steps = [], []

    def first(key, shape, dtype):
        calls.append(shape)
        return np.zeros(shape, dtype)

    def on_host(loss):
        steps.append(est.get_global_step())
        return est.get_variable("total", (), initializer=first) + loss

    def model_fn(features, mode):
        return IPUEstimatorSpec(mode, loss=features, train_op=features, host_call=(on_host, [features]))

    IPUEstimator(model_fn).train(increasing(3), steps=3)
    assert (calls, steps, {step.dtype for step in steps}) == ([()], [1, 2, 3], {np.dtype(np.int32)})


@pytest.mark.parametrize("steps", [1, 2])
def test_steps_must_be_multiples_of_the_iterations(steps):
    estimator = IPUEstimator(passed_on(jnp.sum), config=config_of(loops=3))
    with pytest.raises(ValueError, match="multiple of iterations_per_loop"):
        estimator.train(increasing(3), steps=steps)
    with pytest.raises(ValueError, match="multiple of iterations_per_loop"):
        estimator.evaluate(increasing(3), steps=steps)


@pytest.mark.parametrize("is_scope", [False, True])
def test_several_iterations_with_a_strategy_are_not_implemented(is_scope, strategy):
    config = config_of(loops=2, train_distribute=None if is_scope else strategy)
    estimator = IPUEstimator(passed_on(jnp.sum), config=config)
    if is_scope:
        with strategy.scope(), pytest.raises(NotImplementedError):
            estimator.train(increasing(3), steps=2)
    else:
        with pytest.raises(NotImplementedError):
            estimator.train(increasing(3), steps=2)


def test_replicas_without_a_cross_replica_optimizer_are_refused():
    def model_fn(features, mode):
        loss = est.get_variable("w") * features
        return IPUEstimatorSpec(mode, loss=loss, train_op=EstimatorOptimizer(optax.sgd(1)).minimize(loss))

    with pytest.raises(ValueError, match="not a valid replicated training graph"):
        IPUEstimator(model_fn, config=config_of(4)).train(increasing(3), steps=1)


@pytest.mark.parametrize("instances", [also(1), 2])
def test_weights_of_losses_give_weighted_means(on_instances, instances):
    """The third worker's first batch has no row that counts."""
    x = np.array([[[1, 0], [1, 2]], [[3, 0], [0, 0]], [[0, 0], [2, 0]], [[1, 1], [4, 1]]], np.float32)

    def model_fn(features, mode):
        own = (est.get_variable("w", initializer=1.0) * features - 1) ** 2 * (features > 0)
        loss = strategies.Outcome(own.sum() / jnp.sum(features > 0), weight=jnp.sum(features > 0, dtype=jnp.float32))
        return IPUEstimatorSpec(mode, loss=loss, train_op=optax.sgd(0.1), eval_metric_ops={})

    def run(strategy):
        seen, estimator = Seen(), IPUEstimator(model_fn, config=RunConfig(train_distribute=strategy))
        estimator.train(lambda input_context: x[input_context.input_pipeline_id], [seen], steps=1)
        return (
            seen.losses,
            float(estimator.get_variable_value("w")),
            estimator.evaluate(lambda: x.reshape(8, 2))["loss"],
        )

    first = np.array([1, 3, 1, 1])
    w = 1 - 0.1 * np.mean(2 * (first - 1) * first)
    wanted = [np.mean((first - 1.0) ** 2)], w, np.mean((w * x[x > 0] - 1) ** 2)
    for losses, value, evaluated in on_instances(instances, 4, run):
        np.testing.assert_allclose([*losses, value, evaluated], [*wanted[0], *wanted[1:]], rtol=1e-6)


def test_a_model_state_that_would_be_lost_is_refused():
    def model_fn(features, mode):
        loss = strategies.Outcome(est.get_variable("w", initializer=1.0), model_state={"mean": 1.0})
        return IPUEstimatorSpec(mode, loss=loss, train_op=optax.sgd(1.0))

    with pytest.raises(ValueError, match="does not keep"):
        IPUEstimator(model_fn).train(increasing(3), steps=1)


def test_a_weight_that_would_be_lost_is_refused():
    def model_fn(features, mode):
        w = est.get_variable("w", initializer=1.0)
        train_op = EstimatorOptimizer(optax.sgd(1.0)).minimize(w)
        return IPUEstimatorSpec(mode, loss=strategies.Outcome(w, weight=2.0), train_op=train_op)

    with pytest.raises(ValueError, match="minimize that Outcome"):
        IPUEstimator(model_fn).train(increasing(3), steps=1)


@pytest.mark.complete
def test_replicas_train_on_a_regression_together():
    random, seen = np.random.default_rng(0), Seen()
    x = random.standard_normal((256, 4)).astype(np.float32)

    def model_fn(features, labels, mode):
        w = est.get_variable("w", (4,))
        loss = jnp.mean((features @ w - labels) ** 2)
        return IPUEstimatorSpec(mode, loss=loss, train_op=CrossReplicaOptimizer(optax.sgd(0.1)).minimize(loss))

    def input_fn():
        return zip(x.reshape(-1, 8, 4), x.reshape(-1, 8, 4).sum(2), strict=True)

    IPUEstimator(model_fn, config=config_of(4)).train(input_fn, [seen])
    assert len(seen.losses) == 8
    assert seen.losses[-1] < seen.losses[0] / 5


def two_variables(train_op):
    """Return a `model_fn` with the update that `train_op` makes of an optimizer and two variables."""

    def model_fn(features, mode):
        optimizer = EstimatorOptimizer(optax.sgd(1.0))
        variables = [est.get_variable(name, initializer=1.0) for name in ("v", "w")]
        return IPUEstimatorSpec(mode, loss=sum(variables), **train_op(optimizer, *variables))

    return model_fn


def by_two_losses(optimizer, v, w):
    pairs = optimizer.compute_gradients(2 * v, [v]) + optimizer.compute_gradients(5 * w, [w])
    return {"train_op": optimizer.apply_gradients(pairs)}


def to_the_wrong_variables(optimizer, v, w):
    (of_v, _), (of_w, _) = optimizer.compute_gradients(2 * v + 5 * w)
    return {"train_op": optimizer.apply_gradients([(of_v, w), (of_w, v)])}


def twice(optimizer, v, w):
    [(gradient, _)] = optimizer.compute_gradients(w, [w])
    host_call = (lambda given: optimizer.apply_gradients([(given, w)]), [gradient])
    return {"train_op": optimizer.minimize(v, var_list=[v]), "host_call": host_call}


@pytest.mark.parametrize(
    ("train_op", "message"),
    [
        (by_two_losses, "several losses"),
        (to_the_wrong_variables, "another variable"),
        (twice, "both train_op and host"),
    ],
)
def test_an_update_that_would_be_lost_is_refused(train_op, message):
    with pytest.raises(ValueError, match=message):
        IPUEstimator(two_variables(train_op)).train(increasing(3), steps=1)


def test_gradients_come_in_the_order_of_the_asked_variables():
    def train_op(optimizer, v, w):
        gradients = [gradient for gradient, _ in optimizer.compute_gradients(2 * v + 5 * w, [w, v])]
        return {"train_op": optimizer.apply_gradients(zip(gradients, [w, v], strict=True))}

    estimator = IPUEstimator(two_variables(train_op)).train(increasing(3), steps=1)
    assert [estimator.get_variable_value(name) for name in ("v", "w")] == [-1, -4]


def test_another_strategy_than_that_of_the_last_training_is_refused(strategy):
    estimator = IPUEstimator(square).train(pairs([[1]], [[1]]))
    with strategy.scope(), pytest.raises(ValueError, match="another strategy"):
        estimator.train(pairs([[1]], [[1]]))


def test_a_loss_that_is_not_a_number_ends_the_training_before_a_checkpoint(tmp_path):
    estimator = IPUEstimator(square, tmp_path, RunConfig(save_checkpoints_steps=1))
    with pytest.raises(est.NanLossDuringTrainingError, match="at step 2"):
        estimator.train(pairs([[1], [np.nan], [1]], [[1]] * 3))
    assert estimator.latest_checkpoint().endswith("step_00000001")


def test_first_values_depend_on_the_seed():
    def model_fn(features, mode):
        return IPUEstimatorSpec(mode, jnp.sum(est.get_variable("w", (2, 2))) + features)

    one, other = (IPUEstimator(model_fn, config=RunConfig(tf_random_seed=seed)) for seed in (1, 2))
    assert list(one.predict(listed([0]))) != list(other.predict(listed([0])))


class Told:
    """A hook and a listener that keeps the names of its calls."""

    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def __getattr__(self, name):
        if name not in ("begin", "before_run", "after_run", "before_save", "after_save", "end"):
            raise AttributeError(name)
        return lambda *_: self.calls.append((self.name, name))


def test_hooks_are_called_in_the_order_of_the_original():
    calls = []
    hook, of_spec, listener = (Told(name, calls) for name in ("hook", "of_spec", "listener"))

    def model_fn(features, mode):
        return IPUEstimatorSpec(mode, loss=features, train_op=features, training_hooks=[of_spec])

    estimator = IPUEstimator(model_fn, config=RunConfig(save_checkpoints_steps=1))
    estimator.train(increasing(3), [hook], max_steps=1, saving_listeners=[listener])
    both = [[(name, event) for name in ("hook", "of_spec")] for event in ("begin", "before_run", "after_run", "end")]
    of_listener = [("listener", event) for event in ("begin", "before_save", "after_save", "end")]
    assert calls == [of_listener[0], *both[0], *both[1], *both[2], *of_listener[1:], *both[3]]
    estimator.train(increasing(3), [hook], max_steps=1)
    assert len(calls) == 12


def test_a_hook_that_asks_for_values_is_refused():
    hook = type("Asks", (), {"before_run": lambda self, context: ["loss:0"]})()
    with pytest.raises(NotImplementedError, match="before_run"):
        IPUEstimator(square).train(pairs([[1]], [[1]]), [hook])


def test_a_hook_of_one_worker_stops_all(on_instances):
    def run(strategy):
        class Stops(Seen):
            def after_run(self, run_context, run_values):
                super().after_run(run_context, run_values)
                if strategy.is_chief and run_values.results["global_step"] == 2:
                    run_context.request_stop()

        hook = Stops()
        IPUEstimator(square, config=RunConfig(train_distribute=strategy)).train(pairs([[1]] * 9, [[1]] * 9), [hook])
        return hook.steps

    assert on_instances(2, 2, run) == [[1, 2]] * 2


def test_a_hook_that_asks_before_a_loop_stops_after_it():
    calls = []

    class Stops(Seen):
        def before_run(self, run_context):
            calls.append(len(self.steps))
            if len(self.steps) == 1:
                run_context.request_stop()

    hook = Stops()
    IPUEstimator(passed_on(jnp.sum), config=config_of(loops=2)).train(increasing(3), [hook], steps=8)
    assert (hook.steps, calls) == ([2, 4], [0, 1])


def test_a_listener_that_returns_true_stops():
    listener = type("Stops", (), {"after_save": lambda self, session, step: step == 2})()
    seen, config = Seen(), RunConfig(save_checkpoints_steps=1)
    IPUEstimator(square, config=config).train(pairs([[1]] * 5, [[1]] * 5), [seen], saving_listeners=[listener])
    assert seen.steps == [1, 2]


# ---- batch sizes


@pytest.mark.parametrize(("size", "wanted"), [also(2, 1), (4, 2), also(6, 3)])
@pytest.mark.parametrize("kind", ["train", "eval", "predict"])
def test_batch_sizes_are_divided_among_replicas(kind, size, wanted):
    found = []

    def input_fn(params):
        found.append(params["batch_size"])
        return increasing(3)()

    model_fn = passed_on(strategies.cross_replica_ops.cross_replica_sum)
    estimator = IPUEstimator(model_fn, config=config_of(2), **{f"{kind}_batch_size": size})
    {
        "train": lambda: estimator.train(input_fn, steps=1),
        "eval": lambda: estimator.evaluate(input_fn, steps=1),
        "predict": lambda: next(estimator.predict(input_fn)),
    }[kind]()
    assert found == [wanted]


@pytest.mark.parametrize("kind", ["train", "eval", "predict"])
@pytest.mark.parametrize("size", [0, 1])
def test_batch_sizes_that_replicas_do_not_divide_are_refused(kind, size):
    with pytest.raises(ValueError, match=f"{kind}_batch_size"):
        IPUEstimator(passed_on(jnp.sum), config=config_of(2), **{f"{kind}_batch_size": size})


def test_batch_sizes_are_divided_among_workers():
    config = config_of(2, train_distribute=strategies.IPUStrategy(4), eval_distribute=strategies.IPUStrategy(6))
    for sizes, message in [({"train_batch_size": 6}, "(2 * 2)"), ({"eval_batch_size": 8}, "(3 * 2)")]:
        with pytest.raises(ValueError, match=re.escape(message)):
            IPUEstimator(passed_on(jnp.sum), config=config, **sizes)
    sizes = {"train_batch_size": 4, "eval_batch_size": 12, "predict_batch_size": 6}
    estimator = IPUEstimator(passed_on(jnp.sum), config=config, **sizes)
    assert [estimator._named(mode)["params"]["batch_size"] for mode in ("train", "eval", "infer")] == [1, 2, 3]


def test_batch_sizes_exclude_each_other():
    with pytest.raises(ValueError, match="batch size"):
        IPUEstimator(_with_params(square), params={"batch_size": 1}, train_batch_size=1)
    with pytest.raises(ValueError, match="does not take params"):
        IPUEstimator(square, train_batch_size=1).train(pairs([1], [1]), steps=1)


@pytest.mark.parametrize(
    ("asked", "ipus", "message"),
    [
        ({"num_replicas": 2}, None, "2 num_replicas times 1 num_shards"),
        ({"num_shards": 2}, None, "1 num_replicas times 2 num_shards"),
        ({"num_replicas": 2}, 1, "ipu_options has 1"),
        ({}, 2, "ipu_options has 2"),
        ({"num_replicas": 2, "num_shards": 2}, 2, "4 devices"),
        ({"prefetch_depth": -1}, 1, "prefetch_depth"),
        ({"iterations_per_loop": 0}, 1, "iterations_per_loop"),
    ],
)
def test_devices_must_be_those_of_the_configuration(asked, ipus, message):
    config = strategies.config.IPUConfig()
    config.auto_select_ipus = ipus or 1
    with pytest.raises(ValueError, match=message):
        IPURunConfig(ipu_options=None if ipus is None else config, **asked)


# ---- evaluation and prediction


def of_eval(**given):
    def model_fn(features, labels, mode):
        own = {name: function(features, labels) for name, function in given.items()}
        return IPUEstimatorSpec(mode, loss=jnp.sum(features), **own)

    return model_fn


def test_evaluation_averages_scalars_over_batches():
    model_fn = of_eval(eval_metric_ops=lambda x, y: {"mean": jnp.mean(x), "rows": strategies.Mean(jnp.sum(x), 2.0)})
    found = IPUEstimator(model_fn).evaluate(pairs([[1, 2], [3, 4]], [0, 0]))
    assert found == {"loss": 5, "mean": 2.5, "rows": 2.5, "global_step": 0}


@pytest.mark.parametrize("is_on_host", [also(False), True])
def test_replicated_evaluation_counts_every_replica(is_on_host):
    labels, predictions = np.array([0, 1, 0, 1], np.float32), np.array([0, 0, 0, 1], np.float32)

    def metrics(predictions, labels):
        right = predictions == labels
        positive = strategies.Mean((predictions * labels).sum(), labels.sum())
        precise = strategies.Mean((predictions * labels).sum(), predictions.sum())
        error = ((predictions - labels) ** 2).mean()
        return {"accuracy": right.mean(), "recall": positive, "precision": precise, "mse": error}

    def model_fn(features, labels, mode):
        given = {"eval_metrics": (metrics, [features, labels])} if is_on_host else {}
        given = given or {"eval_metric_ops": metrics(features, labels)}
        return IPUEstimatorSpec(mode, loss=jnp.sum(features) + jnp.sum(labels), **given)

    found = IPUEstimator(model_fn, config=config_of(4)).evaluate(pairs(predictions[:, None], labels[:, None]), steps=1)
    assert found == {"loss": 0.75, "accuracy": 0.75, "recall": 0.5, "precision": 1, "mse": 0.25, "global_step": 0}


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({}, ValueError),
        ({"eval_metric_ops": lambda x, y: {}, "eval_metrics": lambda x, y: (dict, [])}, ValueError),
        ({"eval_metrics": lambda x, y: (lambda x: {}, {"wrong": x})}, TypeError),
        ({"eval_metrics": lambda x, y: lambda x: {}}, TypeError),
        ({"eval_metrics": lambda x, y: (dict, x)}, TypeError),
    ],
)
def test_wrong_metrics_are_refused(given, error):
    with pytest.raises(error):
        IPUEstimator(of_eval(**given)).evaluate(pairs([1], [1]))


@pytest.mark.parametrize("is_on_host", [False, True])
def test_evaluation_counts_batches_that_not_all_replicas_have(is_on_host):
    def model_fn(features, mode):
        total = {"rows": strategies.Mean(jnp.sum(features), 2.0)}
        given = {"eval_metrics": (lambda x: {"rows": strategies.Mean(x.sum(), 2.0)}, [features])}
        return IPUEstimatorSpec(mode, loss=jnp.mean(features), **(given if is_on_host else {"eval_metric_ops": total}))

    found = IPUEstimator(model_fn, config=config_of(2)).evaluate(listed([1, 2], [3, 4], [50, 60]))
    assert found == {"loss": 20, "rows": 20, "global_step": 0}


@pytest.mark.parametrize("instances", [1, 2])
def test_workers_evaluate_all_their_batches_together(on_instances, instances):
    def run(strategy):
        def input_fn(input_context):
            worker = input_context.input_pipeline_id
            return listed(*[[10 * worker + batch] for batch in range(2 + worker)])()

        return IPUEstimator(metric(jnp.mean), config=RunConfig(eval_distribute=strategy)).evaluate(input_fn)

    assert on_instances(instances, 2, run) == [{"loss": 6.8, "mean": 6.8, "global_step": 0}] * instances


def metric(reduce):
    def model_fn(features, mode):
        return IPUEstimatorSpec(
            mode, predictions=features, loss=jnp.mean(features), eval_metric_ops={"mean": reduce(features)}
        )

    return model_fn


def test_replicas_that_are_added_need_a_batch_each():
    model_fn = metric(lambda features: jnp.mean(strategies.cross_replica_ops.cross_replica_sum(features)))
    with pytest.raises(ValueError, match="give a multiple"):
        IPUEstimator(model_fn, config=config_of(2)).evaluate(listed([1], [2], [3]))


def test_a_metric_that_is_no_scalar_is_refused():
    with pytest.raises(ValueError, match=re.escape("mean of model_fn is of shape [2]")):
        IPUEstimator(metric(lambda features: features)).evaluate(listed([1, 2]))


def predicting(predictions):
    return lambda features, mode: IPUEstimatorSpec(mode, predictions(features))


def test_predictions_come_row_by_row_or_loop_by_loop():
    data, twice = listed([1, 2], [3, 4], [5, 6], [7, 8]), predicting(lambda x: 2 * x)
    estimator = IPUEstimator(twice, config=config_of(loops=2))
    assert list(estimator.predict(data)) == [2, 4, 6, 8, 10, 12, 14, 16]
    batches = list(estimator.predict(data, yield_single_examples=False))
    assert [batch.tolist() for batch in batches] == [[2, 4, 6, 8], [10, 12, 14, 16]]
    few = estimator.predict(data, num_predictions=3)
    assert [next(few), next(few), next(few)] == [2, 4, 6]
    with pytest.raises(StopIteration):
        next(few)


def test_a_partial_function_takes_the_other_arguments():
    estimator = IPUEstimator(
        functools.partial(lambda features, mode, by: predicting(lambda x: by * x)(features, mode), by=3)
    )
    assert list(estimator.predict(functools.partial(lambda rows: listed(rows)(), rows=[1, 2]))) == [3, 6]


def test_predictions_may_be_a_dictionary():
    estimator = IPUEstimator(predicting(lambda x: {"x": x, "square": x * x}))
    assert list(estimator.predict(listed([1, 2]))) == [{"x": 1, "square": 1}, {"x": 2, "square": 4}]
    assert list(estimator.predict(listed([1, 2]), ["square"])) == [{"square": 1}, {"square": 4}]


def test_replicas_predict_in_turns():
    data = listed([1], [2], [3], [4])
    estimator = IPUEstimator(predicting(lambda x: 2 * x + 1), config=config_of(4))
    assert list(itertools.islice(estimator.predict(data), 2)) == [3, 5]
    assert next(estimator.predict(data, yield_single_examples=False)).tolist() == [3, 5, 7, 9]


def test_replicas_predict_the_last_rows_too():
    estimator = IPUEstimator(predicting(lambda x: x), config=config_of(2))
    assert list(estimator.predict(listed([1, 2], [3, 4], [5, 6]))) == [1, 2, 3, 4, 5, 6]


def test_predictions_with_different_numbers_of_rows_are_refused():
    estimator = IPUEstimator(predicting(lambda x: {"mean": jnp.mean(x), "x": x}))
    with pytest.raises(ValueError, match="predictions have"):
        next(estimator.predict(listed([1, 2])))


# ---- checkpoints


def test_training_continues_from_the_folder(tmp_path):
    data = pairs([[1], [2]], [[1], [2]])
    values = []
    for _ in range(2):
        estimator = IPUEstimator(square, tmp_path).train(data, steps=1)
        values.append(float(estimator.get_variable_value("w")))
    together = IPUEstimator(square).train(pairs([[1], [1]], [[1], [1]]))
    assert values[-1] == together.get_variable_value("w")
    fresh = IPUEstimator(square, tmp_path)
    assert fresh.evaluate(pairs([[1]], [[0]])) == {"loss": 1, "error": 1, "global_step": 2}
    assert list(fresh.predict(listed([3]))) == [3 * values[-1]]
    assert fresh.get_variable_names() == ["w"]
    assert fresh.latest_checkpoint().endswith("step_00000002")
    warm = IPUEstimator(square, warm_start_from=tmp_path).train(data, steps=1)
    assert warm.get_variable_value("w") == values[-1]


def test_checkpoints_are_made_and_kept_as_configured(tmp_path):
    steps = []

    class Listener:
        def after_save(self, session, global_step):
            steps.append(global_step)

    config = RunConfig(save_checkpoints_steps=2, keep_checkpoint_max=2)
    estimator = IPUEstimator(square, tmp_path, config)
    estimator.train(pairs([[1]] * 7, [[1]] * 7), saving_listeners=[Listener()])
    assert steps == [2, 4, 6, 7]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000006", "step_00000007"]


def test_training_continues_a_checkpoint_of_a_trainer(tmp_path):
    trainer = strategies.Trainer(
        strategies.IPUStrategy(1), lambda variables, batch, key: variables["w"], optax.sgd(0.5)
    )
    state = trainer.init({"w": np.float32(2)})
    for _ in range(3):
        state, _ = trainer.step(state, np.zeros((1, 1), np.float32))
    with strategies.Checkpoints(tmp_path, trainer) as checkpoints:
        checkpoints.save(state)
    seen = Seen()
    IPUEstimator(square, tmp_path).train(pairs([[1]] * 9, [[1]] * 9), [seen], max_steps=5)
    assert seen.steps == [4, 5]


@pytest.mark.parametrize("extra", [None, {}])
def test_training_counts_from_the_step_of_a_newer_checkpoint_of_a_trainer(tmp_path, extra):
    """The trainer may save the values of the estimator again."""
    estimator = IPUEstimator(square, tmp_path).train(pairs([[1]] * 2, [[0]] * 2))
    trainer = strategies.Trainer(
        strategies.IPUStrategy(1), lambda variables, batch, key: variables["w"], optax.sgd(0.5)
    )
    state = trainer.init({"w": np.float32(3)})
    with strategies.Checkpoints(tmp_path, trainer) as checkpoints:
        checkpoints.save(replace(checkpoints.restore(state), step=7), extra=extra)
    estimator.train(pairs([[1]], [[0]]))
    assert estimator.get_variable_value("global_step") == 8


@pytest.mark.parametrize("listening", [0, also(1), None])
def test_a_checkpoint_is_written_when_listeners_and_other_estimators_look(on_instances, listening, tmp_path):
    def run(strategy):
        names = []

        class Listener:
            def after_save(self, session, global_step):
                names.append(estimator.latest_checkpoint()[-13:])

        config = RunConfig(train_distribute=strategy, save_checkpoints_steps=1)
        estimator = IPUEstimator(square, tmp_path, config)
        listeners = [Listener()] if listening in (strategy.instance_index, None) else None
        estimator.train(pairs([[1]] * 3, [[1]] * 3), saving_listeners=listeners)
        return names, IPUEstimator(square, tmp_path).evaluate(pairs([[1]], [[1]]))["global_step"]

    steps = ["step_00000001", "step_00000002", "step_00000003"]
    assert on_instances(2, 2, run) == [(steps if listening in (number, None) else [], 3) for number in range(2)]


@pytest.mark.parametrize("instances", [also(1), 2])
def test_training_is_evaluated_at_checkpoints_and_at_the_end(on_instances, instances, tmp_path):
    def run(strategy):
        evaluated, exported = [], []

        class Exporter:
            name = "best"

            def export(self, estimator, export_path, checkpoint_path, eval_result, is_the_final_export):
                exported.append((eval_result["global_step"], is_the_final_export))
                return export_path

        class Begin:
            def begin(self):
                evaluated.append(True)

        config = RunConfig(train_distribute=strategy, save_checkpoints_steps=2)
        estimator = IPUEstimator(square, tmp_path, config)
        data = pairs([[1]] * 8, [[1]] * 8)
        found, exports = train_and_evaluate(
            estimator,
            TrainSpec(data, max_steps=5),
            EvalSpec(data, 1, hooks=[Begin()], exporters=[Exporter()], throttle_secs=0),
        )
        return found["global_step"], len(evaluated), exported, exports

    wanted = (5, 3, [(2, False), (4, False), (5, True)], [str(tmp_path / "export" / "best")])
    assert on_instances(instances, 2, run) == [wanted, (5, 3, [], [])][:instances]


def test_evaluations_come_after_listeners_and_those_after_the_first_wait_for_their_time():
    events = []
    config = RunConfig(save_checkpoints_steps=1)
    data = pairs([[1]] * 4, [[1]] * 4)
    hook = type("Begin", (), {"begin": lambda self: events.append("evaluation")})()
    listener = type("Saved", (), {"after_save": lambda self, session, step: events.append(step)})()
    trained = TrainSpec(data, saving_listeners=[listener])
    found, _ = train_and_evaluate(IPUEstimator(square, config=config), trained, EvalSpec(data, hooks=[hook]))
    assert (events, found["global_step"]) == ([1, "evaluation", 2, 3, 4, "evaluation"], 4)


# ---- misuse


def drawing(features, mode):
    return IPUEstimatorSpec(mode, loss=1.0, train_op=features, host_call=(lambda _: est.get_random_key(), [features]))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: IPUEstimator(None), TypeError, "give a function"),
        (lambda: IPUEstimator(lambda x: x), ValueError, "not expected"),
        (lambda: IPUEstimator(lambda features: 0, params={}), ValueError, "does not include params"),
        (lambda: IPUEstimator(square, config={}), TypeError, "RunConfig"),
        (lambda: IPUEstimator(square, "a", RunConfig(model_dir="b")), ValueError, "that of RunConfig is b"),
        (lambda: next(IPUEstimator(square).predict(listed([1]), ["w"])), ValueError, "keys of a dictionary"),
        (lambda: IPUEstimator(lambda features: 0).train(listed([1])), ValueError, "IPUEstimatorSpec"),
        (lambda: IPUEstimator(square).train(listed([1]), steps=1, max_steps=1), ValueError, "both steps and max_steps"),
        (lambda: IPUEstimator(square).train(listed([1]), steps=0), ValueError, "steps > 0"),
        (lambda: IPUEstimator(square).get_variable_value("w"), ValueError, "use one of global_step"),
        (lambda: IPUEstimator(square).train([1]), TypeError, "input_fn"),
        (lambda: IPUEstimator(square).train(lambda: (1, 2)), TypeError, "iterable of batches"),
        (lambda: IPUEstimator(square).train(list), ValueError, "too few batches"),
        (lambda: IPUEstimator(square).train(lambda: [(1, 2, 3)]), ValueError, "3 parts"),
        (lambda: IPUEstimator(square).train(lambda: [()]), ValueError, "0 parts"),
        (lambda: IPUEstimator(square).train(pairs([[1], [1, 2]], [[1], [1, 2]])), ValueError, "inhomogeneous"),
        (lambda: IPUEstimator(passed_on(jnp.sum)).train(pairs([1], [1])), ValueError, "does not take labels"),
        (lambda: IPUEstimator(square).evaluate(pairs([1], [1]), checkpoint_path="nowhere"), Exception, "nowhere"),
        (lambda: IPUEstimatorSpec("training"), ValueError, "ModeKeys"),
        (lambda: IPUEstimatorSpec("train", loss=1), ValueError, "Missing train_op"),
        (lambda: IPUEstimatorSpec("infer"), ValueError, "Missing predictions"),
        (lambda: IPUEstimator(two_variables(lambda *_: {"train_op": "sgd"})).train(listed([1])), TypeError, "optax"),
        (lambda: RunConfig(train_distribute="mirrored"), TypeError, "strategy|Strategy"),
        (lambda: RunConfig(save_checkpoints_steps=1, save_checkpoints_secs=1), ValueError, "both"),
        (lambda: TrainSpec(listed([1]), max_steps=-1), ValueError, "max_steps"),
        (
            lambda: train_and_evaluate(None, TrainSpec(listed([1])), EvalSpec(listed([1]))),
            TypeError,
            "an object of Estimator",
        ),
        (lambda: est.get_variable("w"), RuntimeError, "outside of model_fn"),
        (lambda: IPUEstimator(drawing).train(listed([1])), RuntimeError, "draw in model_fn"),
    ],
)
def test_misuse_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.complete
def test_a_batch_may_have_labels_alone():
    def model_fn(features, labels, mode):
        loss = est.get_variable("w", initializer=1.0) * jnp.mean(labels)
        return IPUEstimatorSpec(mode, loss=loss if features is None else 0.0, train_op=optax.sgd(1.0))

    estimator = IPUEstimator(model_fn).train(lambda: [(None, np.float32([1, 3]))])
    assert estimator.get_variable_value("w") == -1


def test_a_batch_of_another_shape_is_refused():
    data = [(np.ones(2, np.float32),) * 2, (np.ones(1, np.float32),) * 2]
    with pytest.raises(ValueError, match="drop the remainder"):
        IPUEstimator(square).train(lambda: data)


def test_a_worker_is_not_split():
    config = config_of(2, train_distribute=strategies.IPUStrategy(3))
    with pytest.raises(ValueError, match="cannot be split"):
        IPUEstimator(square, config=config).train(pairs([1], [1]))


def test_a_variable_exists_once_and_in_all_modes():
    def twice(features, mode):
        return IPUEstimatorSpec(mode, loss=est.get_variable("w") + est.get_variable("w"), train_op=optax.sgd(1))

    with pytest.raises(ValueError, match="already exists"):
        IPUEstimator(twice).train(listed([1]))

    def by_mode(features, mode):
        loss = est.get_variable(mode)
        return IPUEstimatorSpec(mode, loss=loss, train_op=optax.sgd(1.0), eval_metric_ops={})

    estimator = IPUEstimator(by_mode).train(listed([1]))
    with pytest.raises(ValueError, match="reads variable 'eval', but the model has train"):
        estimator.evaluate(listed([1]))


def test_random_keys_differ_for_replicas_and_steps():
    keys = []

    def function(data):
        keys.extend(map(bytes, data))
        return 0

    def model_fn(features, mode):
        loss = strategies.cross_replica_ops.cross_replica_sum(features)
        data = [jax.random.key_data(est.get_random_key())]
        return IPUEstimatorSpec(mode, loss=loss, train_op=loss, host_call=(function, data))

    IPUEstimator(model_fn, config=config_of(2)).train(increasing(3), steps=2)
    assert len(set(keys)) == 4


def test_training_goes_on_after_an_error():
    class Fails:
        def after_run(self, estimator, run_values):
            raise KeyError("of the user")

    estimator = IPUEstimator(square)
    with pytest.raises(KeyError):
        estimator.train(pairs([[1]] * 3, [[1]] * 3), [Fails()], steps=3)
    seen = Seen()
    estimator.train(pairs([[1]], [[1]]), [seen])
    assert seen.steps == [2]


@pytest.mark.complete
def test_float64_is_trained_as_float32():
    estimator = IPUEstimator(square).train(lambda: [(np.ones((2, 1)), np.zeros((2, 1)))])
    assert estimator.get_variable_value("w") == 0


def test_all_workers_end_with_the_first_that_has_no_batch(on_instances, caplog):
    def run(strategy):
        def input_fn(input_context):
            return pairs([[1]] * (2 + input_context.input_pipeline_id), [[1]] * (2 + input_context.input_pipeline_id))()

        seen = Seen()
        IPUEstimator(square, config=RunConfig(train_distribute=strategy)).train(input_fn, [seen])
        return seen.steps

    assert on_instances(2, 2, run) == [[1, 2], [1, 2]]
    assert "instance 0 ran out of data after 2 steps" in caplog.text
    assert on_instances(1, 2, run) == [[1, 2]]
    assert "1 batches of input_fn are not used" in caplog.text
