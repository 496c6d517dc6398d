"""Metrics of Keras: merged exactly over replicas, or refused."""

import inspect

import jax
import keras
import numpy as np
import pytest
from keras import ops
from keras.src import backend
from small_models import LABELS, TARGETS, X, dense, linear

from strategies.errors import StrategyError
from strategies.jax.programs.jaxpr import looks

NEEDED = {
    "MeanIoU": {"num_classes": 2},
    "OneHotIoU": {"num_classes": 2, "target_class_ids": [0]},
    "OneHotMeanIoU": {"num_classes": 2},
    "IoU": {"num_classes": 2, "target_class_ids": [0]},
    "BinaryIoU": {},
    "MeanMetricWrapper": {"fn": keras.losses.mean_squared_error},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
}
OF_VALUES = {"Mean", "Sum"}
ABSTRACT = {"Metric"}


def all_metrics():
    for name, kind in inspect.getmembers(keras.metrics, inspect.isclass):
        if issubclass(kind, keras.metrics.Metric) and name not in ABSTRACT:
            yield name, kind(**NEEDED.get(name, {}))


@pytest.mark.parametrize(("name", "metric"), list(all_metrics()))
def test_every_metric_of_keras_only_adds_to_its_variables(name, metric):
    rows = jax.ShapeDtypeStruct((8, 1 if "Sparse" in name else 2), np.float32)
    given = (rows,) if name in OF_VALUES else (rows, jax.ShapeDtypeStruct((8, 2), np.float32))
    backend.compute_output_spec(metric.update_state, *(keras.KerasTensor(one.shape, one.dtype) for one in given))
    old = [jax.ShapeDtypeStruct(one.shape, np.dtype(one.dtype)) for one in metric.variables]
    changed, adds = looks(lambda old, *given: metric.stateless_update_state(old, *given), old, *given)
    assert all(adds), [variable.path for variable in metric.variables]
    assert any(changed)


def test_counts_curves_and_matrices_cover_all_rows(in_scopes):
    """On three replicas, the mean of three does not give back the exact sum."""

    def program(strategy=None):
        model = keras.Sequential([keras.Input((6,)), dense(1, 1, activation="sigmoid")])
        names = [keras.metrics.AUC(num_thresholds=20), keras.metrics.Precision(), keras.metrics.FalsePositives()]
        model.compile("sgd", "binary_crossentropy", metrics=names)
        labels = (LABELS > 0).astype(np.int32)[:48]
        history = model.fit(
            X[:48], labels, batch_size=12 if strategy is None else 4, epochs=2, shuffle=False, verbose=0
        ).history
        return {name.rstrip("_0123456789"): values for name, values in history.items()}

    stock = program()
    for found in in_scopes(3, program, replicas=3):
        assert set(found) == set(stock)
        assert found["false_positives"] == stock["false_positives"]
        assert all(found[name] == pytest.approx(stock[name], rel=1e-5) for name in stock)


@pytest.mark.complete
def test_metrics_of_masked_outputs_count_the_tokens_of_the_mask(alone):
    """Nothing is learned. On JAX, stock Keras loses the mask in `fit`, and keeps it in `evaluate`."""
    tokens = np.where(np.arange(5) < 1 + np.arange(16)[:, None] % 5, 1 + np.arange(5), 0)

    def program(strategy=None):
        embedding = keras.layers.Embedding(7, 4, keras.initializers.RandomNormal(seed=1), mask_zero=True)
        model = keras.Sequential([keras.Input((5,)), embedding, dense(3, 3)])
        names = {"metrics": ["accuracy"], "weighted_metrics": ["sparse_categorical_crossentropy"]}
        model.compile(keras.optimizers.SGD(0.0), keras.losses.SparseCategoricalCrossentropy(from_logits=True), **names)
        data = {"x": tokens, "y": tokens % 3, "sample_weight": 1.0 + tokens, "batch_size": 4, "verbose": 0}
        told = model.evaluate(**data, return_dict=True)
        return told if strategy is None else (told, {name: of[0] for name, of in model.fit(**data).history.items()})

    evaluated, fitted = alone(program)
    stock = program()
    for name in ("accuracy", "sparse_categorical_crossentropy"):
        assert evaluated[name] == pytest.approx(stock[name], rel=1e-5)
        assert fitted[name] == pytest.approx(stock[name], rel=1e-5)


class Largest(keras.metrics.Metric):
    def __init__(self, aggregation):
        super().__init__(name="largest")
        self.value = self.add_variable(shape=(), initializer="zeros", aggregation=aggregation, name="value")

    def update_state(self, y, y_pred, sample_weight=None):
        self.value.assign(ops.maximum(self.value, ops.max(y_pred)))

    def result(self):
        return ops.convert_to_tensor(self.value)


class Total(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="total")
        self.value = self.add_variable(shape=(), initializer="zeros", name="value")

    def update_state(self, y, y_pred, sample_weight=None):
        self.value.assign_add(ops.sum(y))

    def result(self):
        return ops.convert_to_tensor(self.value)


def test_metrics_of_an_evaluation_are_added_in_the_order_of_the_tree(in_scopes):
    """Four replicas have one row each; their sum is 1 in the order of the tree, and 0 one after another."""
    rows = np.array([[2**24], [1], [1], [-(2**24)]], np.float32)

    def program(strategy):
        return linear(Total()).evaluate(X[:4], rows, batch_size=1, verbose=0, return_dict=True)["total"]

    assert in_scopes(1, program) == [1]
    assert in_scopes(2, program) == [1, 1]


def test_a_metric_that_cannot_be_added_is_refused(alone):
    message = r"variable 'largest/value' of a metric .* add_variable\(aggregation='mean'\)"
    with pytest.raises(StrategyError, match=message):
        alone(lambda strategy: linear(Largest("sum")).fit(X, TARGETS, batch_size=4, verbose=0))


@pytest.mark.complete
def test_a_metric_can_be_averaged_over_replicas(in_scopes):
    def program(strategy):
        model = linear(Largest("mean"))
        trained = model.fit(X, TARGETS, batch_size=4, shuffle=False, verbose=0).history["largest"]
        return trained, model.evaluate(X, TARGETS, batch_size=4, verbose=0, return_dict=True)

    [alone] = in_scopes(1, program)
    assert in_scopes(2, program) == [alone] * 2
    assert alone[0][0] > 0
    assert alone[1]["largest"] > 0


def test_a_mean_metric_is_reset_in_each_validation(alone):
    """Nothing is learned, so each validation finds the same."""

    def program(strategy):
        model = linear(Largest("mean"), optimizer=keras.optimizers.SGD(0.0))
        data = {"validation_data": (X, TARGETS), "batch_size": 4, "epochs": 3, "verbose": 0}
        found = model.fit(X, TARGETS, **data).history["val_largest"]
        single = []
        for _ in range(2):
            model.reset_metrics()
            single.append(model.test_on_batch(X[:16], TARGETS[:16], return_dict=True)["largest"])
        return found, single

    found, single = alone(program)
    assert len(set(found)) == 1
    assert len(set(single)) == 1
    assert found[0] > 0
    assert single[0] > 0


@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_a_running_mean_of_an_evaluation_counts_all_batches(in_scopes, steps_per_execution):
    """Thirteen batches make steps of four, so the last step has one batch."""

    def program(strategy):
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
        model.compile("sgd", "mse", metrics=[Largest("mean")], steps_per_execution=steps_per_execution)
        return model.evaluate(np.abs(X), TARGETS, batch_size=4, verbose=0, return_dict=True)["largest"]

    batches = np.abs(X).sum(1).reshape(-1, 4).max(1)
    for instances in (1, 2):
        for found in in_scopes(instances, program):
            assert found == pytest.approx(batches.mean(), rel=1e-5)
