"""Tests of pipelines of the original that no other file covers."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from small_models import LABELS, TARGETS, X, bits_of, dense, largest_difference, values_of

from strategies.keras import PipelineStage

SETTINGS = {"shuffle": False, "verbose": 0}


def in_stages(model, stages, count=4, **options):
    model.set_pipeline_stage_assignment(stages)
    model.set_pipelining_options(count, gradient_accumulation_reduction_method="mean", **options)
    return model


def regression(**compiled):
    model = keras.Sequential([keras.Input((6,)), dense(4, 1), dense(1, 2)])
    model.compile(keras.optimizers.SGD(0.05), "mse", **compiled)
    return model


@pytest.mark.parametrize("stages", [[0, 0, 1], [0, 1, 1]], ids=str)
def test_stages_of_two_replicas_predict_the_same_for_the_same_row(alone, stages):
    """The models are sequential and functional."""

    def program(strategy):
        given = keras.Input((6,))
        parts = [dense(4, 1), layers.BatchNormalization(), dense(2, 2)]
        values = given
        for part in parts:
            values = part(values)
        models = [keras.Sequential([keras.Input((6,)), *parts]), keras.Model(given, values)]
        return [in_stages(model, stages).predict(np.tile(X[:1], (24, 1)), batch_size=2, verbose=0) for model in models]

    one, other = alone(program, replicas=2, ipus_per_replica=2)
    assert one.shape == (24, 2)
    assert (one == one[0]).all()
    assert (one == other).all()


@pytest.mark.complete
def test_class_weights_count_in_a_pipeline(alone):
    """Classes of the original's test have weights without rows; here each class has rows."""
    weights = {0: 0.0, 1: 0.1, 2: 0.9}

    def program(strategy=None):
        model = keras.Sequential([keras.Input((6,)), dense(4, 1), dense(3, 2, activation="softmax")])
        model.compile(keras.optimizers.SGD(0.05), "sparse_categorical_crossentropy")
        before = values_of(model)
        size = 24 if strategy is None else 3
        if strategy is not None:
            in_stages(model, [0, 1])
        history = model.fit(X[:48], LABELS[:48], batch_size=size, class_weight=weights, **SETTINGS).history
        return values_of(model), history["loss"][0], largest_difference(values_of(model), before)

    stock, loss, _ = program()
    ours, our_loss, moved = alone(program, replicas=2, ipus_per_replica=2)
    assert largest_difference(ours, stock) < 1e-6 < moved
    assert our_loss == pytest.approx(loss, rel=1e-5)


@pytest.mark.complete
def test_callbacks_get_one_call_per_execution_with_and_without_accumulating_outfeeds(alone):
    def program(strategy, accumulates):
        model = regression(steps_per_execution=8, metrics=["mae"])
        in_stages(model, [0, 1], accumulate_outfeed=accumulates)
        told = []
        counts = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: told.append((batch, logs)))
        history = model.fit(X[:48], TARGETS[:48], batch_size=1, epochs=2, callbacks=[counts], **SETTINGS).history
        return history, told, model.evaluate(X, TARGETS, verbose=0)

    history, told, evaluated = alone(lambda strategy: program(strategy, True), replicas=2, ipus_per_replica=2)
    assert [batch for batch, _ in told] == [1, 3, 5] * 2  # updates of four micro-batches, two in an execution
    expected = alone(lambda strategy: program(strategy, False), replicas=2, ipus_per_replica=2)
    assert (history, told, evaluated) == expected


def test_a_pipeline_that_is_fitted_again_continues_and_compiles_nothing(alone):
    def program(strategy):
        model = in_stages(regression(), [0, 1])
        losses = model.fit(X[:48], TARGETS[:48], batch_size=3, epochs=2, **SETTINGS).history["loss"]
        function, weights = model.train_function, values_of(model)
        losses += model.fit(X[:24], TARGETS[:24], batch_size=3, **SETTINGS).history["loss"]
        return losses, model.train_function is function, largest_difference(values_of(model), weights)

    losses, is_same, moved = alone(program, replicas=2, ipus_per_replica=2)
    assert losses[1] < losses[0]
    assert is_same
    assert moved > 0


def reused(nodes):
    """Make a functional model whose layer is called in stage 0 and again in stage 2."""
    given = keras.Input((6,))
    twice = dense(6, 1)
    with PipelineStage(0):
        hidden = twice(given)
    with PipelineStage(1):
        hidden = layers.Activation("tanh")(hidden)
    with PipelineStage(2 if nodes else 1):
        hidden = twice(hidden)
        output = dense(1, 2)(hidden)
    model = keras.Model(given, output)
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


@pytest.mark.complete
@pytest.mark.parametrize(("nodes", "mapping"), [(True, [0, 1, 0]), (True, [0, 0, 0]), (False, [0, 0])], ids=str)
def test_a_layer_can_be_in_several_stages_on_one_device(alone, nodes, mapping):
    stock = reused(nodes)
    stock.fit(X[:48], TARGETS[:48], batch_size=48, **SETTINGS)

    def program(strategy):
        model = reused(nodes)
        model.set_pipelining_options(12, mapping, gradient_accumulation_reduction_method="mean")
        model.fit(X[:48], TARGETS[:48], batch_size=2, **SETTINGS)
        return values_of(model)

    ours = alone(program, replicas=2, ipus_per_replica=1 + max(mapping))
    assert largest_difference(ours, values_of(stock)) < 1e-6


def test_layers_of_a_pipeline_know_whether_they_are_trained(alone):
    class Knows(layers.Layer):
        def __init__(self):
            super().__init__()
            self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, values, training=False):
            if training:
                self.calls.assign_add(1.0)
            return values * (1.0 if training else 10.0)

    def program(strategy):
        model = keras.Sequential([keras.Input((6,)), Knows(), layers.Rescaling(1.0)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
        in_stages(model, [0, 1])
        zeros = model.fit(X[:24], X[:24], batch_size=3, **SETTINGS).history["loss"]
        return zeros, model.evaluate(X[:24], 10 * X[:24], verbose=0), float(model.layers[0].calls.value)

    trained, evaluated, calls = alone(program, replicas=2, ipus_per_replica=2)
    assert (trained, calls) == ([0.0], 4.0)
    assert evaluated < 1e-9


def test_moving_statistics_follow_each_micro_batch_in_turn(alone):
    """The original's results are wrong here, as its warning states."""

    def program(strategy):
        model = keras.Sequential([keras.Input((6,)), layers.BatchNormalization(momentum=0.5), dense(1, 1)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        in_stages(model, [0, 1], 8)
        model.fit(X[:32], TARGETS[:32], batch_size=2, **SETTINGS)
        return np.asarray(model.layers[0].moving_mean), np.asarray(model.layers[0].moving_variance)

    mean, variance = alone(program, replicas=2, ipus_per_replica=2)
    means, variances = [], []
    for replica in range(2):
        one, other = np.zeros(6), np.ones(6)
        for rows in X[replica * 16 : replica * 16 + 16].reshape(8, 2, 6):
            one, other = (one + rows.mean(0)) / 2, (other + rows.var(0)) / 2
        means.append(one)
        variances.append(other)
    np.testing.assert_allclose(mean, np.mean(means, 0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(variance, np.mean(variances, 0), rtol=1e-5, atol=1e-6)


def test_integers_pass_through_the_stages_of_a_branching_graph(alone):
    def program(strategy):
        given = keras.Input((1,), dtype="uint8")
        with PipelineStage(0):
            number = layers.Lambda(lambda values: ops.cast(values, "float32"))(given)
            thrice = layers.Rescaling(3.0)(number)
        with PipelineStage(1):
            sevenfold = layers.Rescaling(7.0)(number)
        with PipelineStage(2):
            total = layers.Add()([thrice, sevenfold])
        model = keras.Model(given, total)
        return model.predict(np.arange(24, dtype=np.uint8)[:, None], batch_size=2, verbose=0)

    predicted = alone(program, replicas=2, ipus_per_replica=3)
    np.testing.assert_array_equal(predicted.ravel(), 10.0 * np.arange(24))


@pytest.mark.complete
def test_asynchronous_callbacks_of_a_pipeline_see_each_step_and_change_no_bit(alone):
    def program(strategy, asynchronous):
        model = in_stages(regression(steps_per_execution=8), [0, 1])
        model.set_asynchronous_callbacks(asynchronous)
        calls = {"begin": 0, "end": 0, "test": 0, "predict": 0}

        def count(name):
            return lambda batch, logs: calls.update({name: calls[name] + 1})

        counts = keras.callbacks.LambdaCallback(
            on_train_batch_begin=count("begin"),
            on_train_batch_end=count("end"),
            on_test_batch_end=count("test"),
            on_predict_batch_end=count("predict"),
        )
        model.fit(X[:48], TARGETS[:48], batch_size=1, epochs=2, callbacks=[counts], **SETTINGS)
        evaluated = model.evaluate(X[:48], TARGETS[:48], batch_size=1, verbose=0, callbacks=[counts])
        model.predict(X[:48], batch_size=1, verbose=0, callbacks=[counts])
        return bits_of(model), evaluated, calls

    *found, calls = alone(lambda strategy: program(strategy, True), replicas=2, ipus_per_replica=2)
    *expected, fewer = alone(lambda strategy: program(strategy, False), replicas=2, ipus_per_replica=2)
    assert found == expected
    assert calls == {"begin": 12, "end": 12, "test": 24, "predict": 24}
    assert fewer == {"begin": 6, "end": 6, "test": 3, "predict": 3}
