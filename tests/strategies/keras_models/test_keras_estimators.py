"""Estimators whose `model_fn` calls layers of Keras."""

import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from tiers import also

import strategies
from strategies import estimator as est

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((32, 6)).astype(np.float32)
Y = np.sin(X[:, :1])


def layers():
    return keras.Sequential(
        [
            keras.layers.Dense(4, activation="tanh", kernel_initializer=keras.initializers.GlorotUniform(seed=1)),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.25),
            keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(seed=2)),
        ]
    )


def model_fn(features, labels, mode):
    model = layers()
    outputs = model(features, training=mode == est.ModeKeys.TRAIN)
    if mode == est.ModeKeys.PREDICT:
        return est.IPUEstimatorSpec(mode, predictions=outputs)
    loss = jnp.mean((outputs - labels) ** 2)
    if mode == est.ModeKeys.EVAL:
        return est.IPUEstimatorSpec(mode, loss=loss, eval_metric_ops={"mean": jnp.mean(outputs)})
    train_op = est.EstimatorOptimizer(optax.adam(0.01)).minimize(loss, var_list=model.trainable_variables)
    return est.IPUEstimatorSpec(mode, loss=loss, train_op=train_op)


def input_fn(mode, input_context=None):
    own = slice(None) if input_context is None else slice(input_context.input_pipeline_id, None, 4)
    return [(X[own][k : k + 4], Y[own][k : k + 4]) for k in range(0, len(X[own]), 4)] * (2 if mode == "train" else 1)


def trained(strategy, folder=None):
    return est.IPUEstimator(model_fn, folder, est.RunConfig(train_distribute=strategy)).train(input_fn)


@pytest.mark.parametrize("instances", [also(2), also(4)])
def test_training_has_the_same_bits_on_any_number_of_instances(on_instances, instances):
    def run(strategy):
        estimator = trained(strategy)
        return strategies.fingerprint(
            {name: estimator.get_variable_value(name) for name in estimator.get_variable_names()}
        )

    [alone] = on_instances(1, 4, run)
    assert on_instances(instances, 4, run) == [alone] * instances


def test_variables_have_names_that_do_not_change_and_moving_means_are_kept(strategy, tmp_path):
    estimator = trained(strategy, tmp_path)
    assert estimator.get_variable_names() == [
        "sequential/batch_normalization/beta",
        "sequential/batch_normalization/gamma",
        "sequential/dense/bias",
        "sequential/dense/bias_1",
        "sequential/dense/kernel",
        "sequential/dense/kernel_1",
        "sequential/batch_normalization/moving_mean",
        "sequential/batch_normalization/moving_variance",
    ]
    assert np.any(estimator.get_variable_value("sequential/batch_normalization/moving_mean") != 0)
    again = est.IPUEstimator(model_fn, tmp_path)
    assert sorted(again.get_variable_names()) == sorted(estimator.get_variable_names())
    assert again.evaluate(input_fn) == estimator.evaluate(input_fn)


@pytest.mark.complete
def test_an_exported_model_predicts_the_same(strategy, tmp_path):
    estimator = trained(strategy)
    predicted = np.concatenate(list(estimator.predict(input_fn, yield_single_examples=False)))
    model = layers()
    model(X)
    path = estimator.export_saved_model(tmp_path, model)
    assert path == str(tmp_path / "4.keras")
    loaded = keras.saving.load_model(path)
    np.testing.assert_allclose(loaded.predict(X, verbose=0), predicted, atol=1e-5)


@pytest.mark.complete
def test_a_model_with_other_layers_is_not_exported(strategy, tmp_path):
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(1)])
    model.add(keras.layers.LayerNormalization())
    with pytest.raises(ValueError, match="layer_normalization"):
        trained(strategy).export_saved_model(tmp_path, model)


def test_names_that_the_program_gives_to_layers_keep_their_numbers(strategy):
    """A mode that uses one of two towers gets the weights of this one."""

    def model_fn(features, labels, mode):
        towers = [keras.layers.Dense(1, name=f"tower_{number}", use_bias=False) for number in (1, 2)]
        outputs = [tower(features) for tower in towers[mode != est.ModeKeys.TRAIN :]]
        if mode == est.ModeKeys.PREDICT:
            return est.IPUEstimatorSpec(mode, predictions=outputs[0])
        loss = jnp.mean((sum(outputs) - labels) ** 2)
        return est.IPUEstimatorSpec(mode, loss=loss, train_op=est.EstimatorOptimizer(optax.sgd(0.1)).minimize(loss))

    estimator = est.IPUEstimator(model_fn, None, est.RunConfig(train_distribute=strategy)).train(input_fn)
    assert estimator.get_variable_names() == ["tower_1/kernel", "tower_2/kernel"]
    predicted = np.concatenate([row[None] for row in estimator.predict(lambda: [X])])
    np.testing.assert_allclose(predicted, X @ estimator.get_variable_value("tower_2/kernel"), rtol=1e-5)
