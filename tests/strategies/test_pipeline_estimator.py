"""Estimators of pipelines: the original's rows."""

import itertools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from estimator_parts import Seen, config_of, increasing
from tiers import also

import strategies
from strategies.compat import estimator as est
from strategies.compat.estimator import IPUPipelineEstimator, IPUPipelineEstimatorSpec, ModeKeys
from strategies.compat.pipelining_ops import OptimizerFunctionOutput


def constant(*values):
    return lambda: itertools.repeat(tuple(np.float32(value) for value in values))


def line(count=4, method="sum", mapping=None, **options):
    """Return a `model_fn` whose loss is w x + y, in two stages."""

    def first(x, y=0.0):
        return est.get_variable("w", initializer=2.0) * x, y

    def second(product, y):
        return product + y

    def model_fn(mode):
        return IPUPipelineEstimatorSpec(
            mode,
            [first, second],
            count,
            lambda loss: {"loss": loss, "twice": 2 * loss},
            lambda loss: OptimizerFunctionOutput(optax.sgd(0.5), loss),
            mapping,
            reduction_method=method,
            **options,
        )

    return model_fn


@pytest.mark.parametrize(
    ("method", "count", "updates", "losses", "last"),
    [
        ("sum", 4, 1, [4, -0.5], -4),
        also("mean", 4, 1, [4, 2.875], 0.5),
        also("running_mean", 4, 1, [4, 2.875], 0.5),
        also("sum", 4, 2, [1.75, -7.25], -10),
        ("mean", 4, 2, [3.4375, 1.1875], -1),
        also("sum", 8, 1, [4, -5], -10),
        also("sum", 8, 2, [-0.5, -18.5], -22),
    ],
)
def test_training_follows_the_analytical_reference(method, count, updates, losses, last, tmp_path):
    seen = Seen()
    estimator = IPUPipelineEstimator(line(count, method), tmp_path, config_of(shards=2, loops=count * updates))
    for _ in range(2):
        estimator.train(constant(1.5, 1), [seen], steps=count * updates)
    assert seen.losses == losses
    assert seen.steps == [count * updates, 2 * count * updates]
    assert estimator.get_variable_value("w") == last


@pytest.mark.parametrize("instances", [also(1), 2])
def test_workers_average_gradients_and_add_losses(on_instances, instances):
    """Three updates of four micro-batches; each worker has an input of its own."""

    def run(strategy):
        seen, ids = Seen(), []

        def input_fn(input_context):
            ids.append(input_context.input_pipeline_id)
            return constant(1 + 2 * input_context.input_pipeline_id, 1)()

        config = config_of(shards=2, loops=4, train_distribute=strategy)
        estimator = IPUPipelineEstimator(line(mapping=[0, 1]), config=config)
        estimator.train(input_fn, [seen], steps=12)
        return seen.losses, seen.steps, float(estimator.get_variable_value("w")), ids

    told = on_instances(instances, 2, run, ipus_per_replica=2)
    assert [one[:3] for one in told] == [([10, -6, -22], [4, 8, 12], -10)] * instances
    assert [one[3] for one in told] == ([[0, 1]] if instances == 1 else [[0], [1]])


@pytest.mark.complete
def test_training_has_the_bits_of_a_trainer_with_a_pipeline():
    random = np.random.default_rng(0)
    x = random.standard_normal((16, 8, 4)).astype(np.float32)
    first, second = (random.standard_normal(shape).astype(np.float32) for shape in ((4, 8), (8,)))

    def model_fn(mode):
        return IPUPipelineEstimatorSpec(
            mode,
            [
                lambda features, labels: (jnp.tanh(features @ est.get_variable("first", initializer=first)), labels),
                lambda hidden, labels: jnp.mean(
                    (hidden @ est.get_variable("second", initializer=second) - labels) ** 2
                ),
            ],
            4,
            optimizer_function=lambda loss: OptimizerFunctionOutput(optax.adam(0.1), loss),
            reduction_method="mean",
            pipeline_schedule="interleaved",
        )

    estimator = IPUPipelineEstimator(model_fn, config=config_of(shards=2, loops=8))
    estimator.train(lambda: zip(x, x.sum(2), strict=True), steps=16)

    def loss_fn(variables, batch, key):
        with strategies.pipeline_stage(0):
            hidden = jnp.tanh(batch["x"] @ variables["first"])
        with strategies.pipeline_stage(1):
            return jnp.mean((hidden @ variables["second"] - batch["y"]) ** 2)

    alone = strategies.IPUStrategy(1, ipus_per_replica=2)
    pipeline = strategies.Pipelining([0, 1])
    trainer = strategies.Trainer(alone, loss_fn, optax.adam(0.1), gradient_accumulation_count=4, pipeline=pipeline)
    state = trainer.init({"first": first, "second": second})
    for update in range(4):
        rows = x[4 * update : 4 * update + 4]
        state, _ = trainer.step(state, {"x": rows.reshape(32, 4), "y": rows.sum(2).reshape(32)})
    found = {name: estimator.get_variable_value(name) for name in ("first", "second")}
    assert strategies.fingerprint(found) == strategies.fingerprint(state.variables)


def test_evaluation_averages_micro_batches():
    estimator = IPUPipelineEstimator(line(), config=config_of(shards=2, loops=4))
    data = lambda: zip(np.arange(4, dtype=np.float32), np.ones(4, np.float32), strict=True)  # noqa: E731
    assert estimator.evaluate(data, steps=4) == {"loss": 4, "twice": 8, "global_step": 0}


def predicting(*outputs):
    def model_fn(mode):
        return IPUPipelineEstimatorSpec(mode, [lambda x: x, lambda x: [one(x) for one in outputs]], 4)

    return model_fn


def test_predictions_are_an_array_or_a_dictionary():
    config = config_of(shards=2, loops=4)
    one = IPUPipelineEstimator(predicting(lambda x: x * x), config=config)
    assert list(itertools.islice(one.predict(increasing(10, (1,))), 6)) == [0, 1, 4, 9, 16, 25]
    named = IPUPipelineEstimator(predicting(lambda x: {"square": x * x}), config=config)
    assert next(named.predict(increasing(10, (1,)), yield_single_examples=False))["square"].tolist() == [0, 1, 4, 9]
    two = IPUPipelineEstimator(predicting(lambda x: x, lambda x: x), config=config)
    with pytest.raises(ValueError, match="returns 2 arrays"):
        next(two.predict(increasing(10, (1,))))


@pytest.mark.complete
def test_stages_read_the_global_step():
    seen = Seen()

    def model_fn(mode):
        return IPUPipelineEstimatorSpec(
            mode,
            [lambda x: x * est.get_variable("w", initializer=0.0), lambda x: x + est.get_global_step()],
            4,
            optimizer_function=lambda loss: OptimizerFunctionOutput(optax.sgd(0.0), loss),
        )

    IPUPipelineEstimator(model_fn, config=config_of(shards=2, loops=8)).train(increasing(3), [seen], steps=16)
    assert (seen.losses, seen.steps) == ([0, 8], [8, 16])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: IPUPipelineEstimator(lambda features, mode: None), "not expected args"),
        (lambda: trained(lambda mode: None), "IPUPipelineEstimatorSpec"),
        (lambda: trained(line(mapping=[0, 0]), shards=4), "uses 1 devices, but num_shards is 4"),
        (lambda: trained(line(mapping=[0, 3]), shards=2), "uses 4 devices, but num_shards is 2"),
        (lambda: trained(line(), shards=4), "uses 2 devices, but num_shards is 4"),
        (lambda: IPUPipelineEstimatorSpec(ModeKeys.TRAIN, [], 4), "optimizer_function"),
        (lambda: IPUPipelineEstimatorSpec(ModeKeys.EVAL, [], 4), "eval_metrics_fn"),
        (lambda: line(accumulate_outfeed=True)("infer"), "accumulate_outfeed"),
        (lambda: trained(line(3), loops=4), "multiple of the gradient_accumulation_count"),
        (lambda: trained(line(8), loops=4), "multiple of the gradient_accumulation_count"),
        (lambda: trained(line(method="median")), "Cannot parse"),
    ],
)
def test_misuse_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def trained(model_fn, shards=2, loops=4):
    return IPUPipelineEstimator(model_fn, config=config_of(shards=shards, loops=loops)).train(
        constant(1, 1), steps=loops
    )
