"""Training with Keras's own `fit`: the same bits on any number of instances, and the results of stock Keras."""

import threading

import jax.numpy as jnp
import keras
import numpy as np
import pytest
from connected import ConnectedStrategy
from keras import layers, ops
from small_models import (
    LABELS,
    ROWS,
    TARGETS,
    WEIGHTS,
    AddsLoss,
    X,
    bits_of,
    classifier,
    dense,
    largest_difference,
    regression,
    values_of,
)
from tiers import first_of

import collectives
import strategies
from collectives.backends.thread import run_on_threads
from collectives.instruments import Instruments
from popdist import Instance
from strategies.jax.updates.optimizers import AS_WRITTEN, StepFacts
from strategies.keras.callbacks import VariableWatch
from strategies.keras.updates import KerasOptimizer


def trained_classifier(strategy):
    model = classifier(steps_per_execution=2)
    history = model.fit(
        X, LABELS, batch_size=4, epochs=2, validation_data=(X[:21], LABELS[:21]), shuffle=False, verbose=0
    )
    evaluated = model.evaluate(X, LABELS, batch_size=8, verbose=0, return_dict=True)
    return bits_of(model), history.history, evaluated, strategies.fingerprint(model.predict(X, batch_size=4, verbose=0))


@pytest.mark.parametrize("instances", first_of([2, 4]))
def test_a_model_with_state_has_the_same_bits_however_replicas_are_spread(in_scopes, instances):
    [alone] = in_scopes(1, trained_classifier)
    assert in_scopes(instances, trained_classifier) == [alone] * instances


def many_ways():
    """Make a model of two inputs and outputs, a shared layer, regularizer, added loss, and all optimizer options."""
    left, right = keras.Input((6,), name="left"), keras.Input((6,), name="right")
    shared = dense(4, 1, activation="tanh", kernel_regularizer="l2")
    joined = AddsLoss()(layers.Concatenate()([shared(left), shared(right)]))
    outputs = {"kind": dense(3, 2, activation="softmax", name="kind")(joined), "size": dense(1, 3, name="size")(joined)}
    model = keras.Model([left, right], outputs)
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.9)
    model.compile(
        keras.optimizers.SGD(
            rate, momentum=0.9, clipnorm=1.0, weight_decay=0.01, use_ema=True, ema_overwrite_frequency=3
        ),
        loss={"kind": "sparse_categorical_crossentropy", "size": "mse"},
        loss_weights={"kind": 1.0, "size": 0.5},
        metrics={"kind": ["accuracy"], "size": [keras.metrics.RootMeanSquaredError()]},
        weighted_metrics={"kind": ["accuracy"]},
    )
    return model


def trained_many_ways(batch_size):
    model = many_ways()
    given = {"left": X, "right": X[::-1]}
    wanted = {"kind": LABELS, "size": TARGETS}
    history = model.fit(
        given,
        wanted,
        sample_weight={"kind": WEIGHTS, "size": WEIGHTS},
        batch_size=batch_size,
        epochs=2,
        shuffle=False,
        verbose=0,
    ).history
    evaluated = model.evaluate(given, wanted, batch_size=batch_size, verbose=0, return_dict=True)
    return model, history, evaluated, model.predict(given, batch_size=batch_size, verbose=0)


@pytest.fixture(scope="module")
def stock_many_ways():
    """Provide the results of stock Keras with the batches of all four replicas."""
    return trained_many_ways(16)


@pytest.mark.complete
def test_training_matches_stock_keras_with_the_batch_of_all_replicas(in_scopes, stock_many_ways):
    """The last step of an epoch has fewer rows."""
    model, history, evaluated, predicted = stock_many_ways
    results = in_scopes(2, lambda strategy: trained_many_ways(4))
    ours, our_history, our_evaluated, our_predicted = results[0]
    assert largest_difference(values_of(ours), values_of(model)) < 1e-6
    assert {name: pytest.approx(values, rel=1e-5) for name, values in history.items()} == our_history
    assert our_evaluated == pytest.approx(evaluated, rel=1e-5)
    assert all(np.allclose(our_predicted[name], predicted[name], atol=1e-5) for name in predicted)
    assert bits_of(results[0][0]) == bits_of(results[1][0])


class OwnLoss(keras.Model):
    """A model with its own loss, metrics and state."""

    def __init__(self):
        super().__init__()
        self.first, self.last = dense(4, 1, activation="relu"), dense(1, 2)
        self.noise = keras.random.SeedGenerator(5)
        self.tracker = keras.metrics.Mean(name="own")
        self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="calls")
        self.highest = self.add_weight(shape=(), initializer="zeros", trainable=False, name="highest")

    def call(self, values, training=False):
        if training:
            values = values + 0.1 * keras.random.normal(ops.shape(values), seed=self.noise)
            self.calls.assign_add(1)
            self.highest.assign(ops.maximum(self.highest, ops.max(values)))
        return self.last(self.first(values))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = ops.mean((y_pred - y) ** 2)
        self.tracker.update_state(loss)
        return loss

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return super().compute_metrics(x, y, y_pred, sample_weight) | {"largest": ops.max(y_pred)}


def trained_own_loss(strategy):
    model = OwnLoss()
    model.compile("adam")
    history = model.fit(X[:48], TARGETS[:48], batch_size=4, epochs=2, shuffle=False, verbose=0).history
    return bits_of(model), history, int(model.calls.value), int(model.noise.state.value[1])


def test_a_model_with_its_own_loss_metrics_and_state_has_the_same_bits(in_scopes):
    [alone] = in_scopes(1, trained_own_loss)
    assert in_scopes(2, trained_own_loss) == [alone] * 2
    _, history, calls, draws = alone
    assert set(history) == {"loss", "own", "largest"}
    assert history["own"] == history["loss"]
    assert calls == draws == 6


def test_each_replica_draws_its_own_new_random_numbers(alone):
    class Drawn(layers.Layer):
        def __init__(self):
            super().__init__()
            self.generator = keras.random.SeedGenerator(7)

        def call(self, values):
            return values + keras.random.uniform(ops.shape(values), seed=self.generator)

    def program(strategy):
        model = keras.Sequential([keras.Input((1,)), Drawn()])
        drawn = model.predict(np.zeros((40, 1), np.float32), batch_size=4, verbose=0)
        again = model.predict(np.zeros((40, 1), np.float32), batch_size=4, verbose=0)
        return drawn.ravel(), again.ravel()

    drawn, again = alone(program)
    assert len(set(drawn.tolist())) == 40
    np.testing.assert_array_equal(drawn, again)


@pytest.mark.parametrize("policy", first_of(["mixed_float16", "mixed_bfloat16"]))
def test_mixed_precision_has_the_same_bits(in_scopes, policy):
    def program(strategy):
        model = keras.Sequential([dense(5, 1, activation="relu", dtype=policy), dense(1, 2, dtype=policy)])
        optimizer = keras.optimizers.SGD(0.01)
        if policy == "mixed_float16":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0, dynamic_growth_steps=3)
        model.compile(optimizer, "mse")
        history = model.fit(X[:48], TARGETS[:48], batch_size=4, epochs=2, shuffle=False, verbose=0).history
        scale = getattr(optimizer, "dynamic_scale", None)
        return bits_of(model), history, None if scale is None else float(scale.value)

    [alone] = in_scopes(1, program)
    assert in_scopes(2, program) == [alone] * 2
    assert alone[2] == {"mixed_bfloat16": None, "mixed_float16": 32.0}[policy]
    assert alone[1]["loss"][1] < alone[1]["loss"][0]


def test_a_step_that_overflows_changes_nothing_but_the_scale(alone):
    def program(strategy):
        model = keras.Sequential([keras.Input((6,)), dense(1, 2, dtype="mixed_float16")])
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=2.0**24)
        model.compile(optimizer, "mse")
        before = model.get_weights()
        model.fit(X[:16], 1000 * TARGETS[:16], batch_size=4, verbose=0)
        same = all((a == b).all() for a, b in zip(before, model.get_weights(), strict=True))
        return same, float(optimizer.dynamic_scale.value), int(optimizer.iterations.value)

    assert alone(program) == (True, 2.0**23, 0)


def test_a_second_fit_continues_and_compiles_nothing(alone):
    def program(strategy):
        model = regression()
        losses = [model.fit(X, TARGETS, batch_size=4, verbose=0).history["loss"][0] for _ in range(2)]
        function = model.train_function
        weights = model.get_weights()
        model.fit(2 * X, TARGETS, batch_size=4, verbose=0)
        changed = [bool((a != b).any()) for a, b in zip(weights, model.get_weights(), strict=True)]
        return losses, function is model.train_function, changed, int(model.optimizer.iterations.value)

    losses, is_same, changed, iterations = alone(program)
    assert losses[1] < losses[0]
    assert is_same
    assert all(changed)
    assert iterations == 3 * 4


@pytest.mark.parametrize("who_changes", first_of([1, 0, None]))
def test_variables_travel_once_and_only_if_an_instance_changed_them(who_changes):
    """A change by an instance other than the first is overwritten."""
    notes = Notes()

    def travelled():
        return sum(label.startswith("broadcast '[") for label in notes.of_this_thread)

    def program(communicator):
        rank = communicator.rank
        strategy = ConnectedStrategy(Instance(rank, 2, 1, rank, 2, 0), communicator)
        with strategy.scope():
            model = classifier()
            model.fit(X, LABELS, batch_size=8, epochs=2, shuffle=False, verbose=0)
            assert travelled() == 0, "the instances have made the same model"
            if rank == who_changes:
                model.layers[0].kernel.assign(2 * model.layers[0].kernel)
            model.fit(X, LABELS, batch_size=8, epochs=2, shuffle=False, verbose=0)
            return bits_of(model), travelled(), len(VariableWatch(model).arrays())

    first, second = run_on_threads(2, program, collectives.Settings(progress=Instruments(notes)))
    assert first == second
    assert first[1] == (0 if who_changes is None else first[2])


class Notes:
    """An observer of collectives that keeps their names for each thread."""

    def __init__(self):
        self._labels = {}

    @property
    def of_this_thread(self):
        return self._labels.setdefault(threading.get_ident(), [])

    def operation_begins(self, number, call):
        self.of_this_thread.append(call.title)


def test_every_row_counts_once_in_evaluate_and_predict(in_scopes):
    """Batch sizes include one that divides nothing, and one that leaves replicas without rows."""
    stock = regression(metrics=["mae", keras.metrics.R2Score()])
    evaluated = stock.evaluate(X, TARGETS, verbose=0, return_dict=True)
    predicted = stock.predict(X, verbose=0)

    def program(strategy):
        model = regression(metrics=["mae", keras.metrics.R2Score()])
        given = [(5, ROWS), (32, ROWS), (3, 1)]
        return [
            (
                model.evaluate(X[:rows], TARGETS[:rows], batch_size=size, verbose=0, return_dict=True),
                model.predict(X[:rows], batch_size=size, verbose=0),
            )
            for size, rows in given
        ]

    for results in in_scopes(2, program):
        for found, outputs in results[:2]:
            assert found == pytest.approx(evaluated, rel=1e-5)
            np.testing.assert_allclose(outputs, predicted, atol=1e-6)
        assert results[2][1].shape == (1, 1)


def test_training_skips_only_rows_too_few_for_all_replicas(alone):
    """54 rows for 4 replicas make 3 steps of 16, one of 4, and 2 left over."""

    def program(strategy):
        model = regression()
        given, wanted = np.concatenate([X, X[:2]]), np.concatenate([TARGETS, TARGETS[:2]])
        history = model.fit(given, wanted, batch_size=4, verbose=0)
        return int(model.optimizer.iterations.value), history.params["steps"]

    assert alone(program) == (4, 4)


def test_single_batches_are_shared_by_all_replicas(in_scopes):
    stock = regression(metrics=["mae"])
    trained = stock.train_on_batch(X[:16], TARGETS[:16], return_dict=True)
    tested = stock.test_on_batch(X[:13], TARGETS[:13], return_dict=True)
    predicted = stock.predict_on_batch(X[:13])

    def program(strategy):
        model = regression(metrics=["mae"])
        with pytest.raises(ValueError, match="a batch of 15 rows cannot be split among 4 replicas x 1"):
            model.train_on_batch(X[:15], TARGETS[:15])
        return (
            model.train_on_batch(X[:16], TARGETS[:16], return_dict=True),
            model.test_on_batch(X[:13], TARGETS[:13], return_dict=True),
            model.predict_on_batch(X[:13]),
            bits_of(model),
        )

    results = in_scopes(2, program)
    assert results[0][3] == results[1][3]
    assert results[0][0] == pytest.approx(trained, rel=1e-5)
    assert results[0][1] == pytest.approx(tested, rel=1e-5)
    np.testing.assert_allclose(results[0][2], predicted, atol=1e-6)


def test_the_batch_size_can_be_that_of_all_replicas(alone):
    def program(strategy):
        found = []
        for size in ({"batch_size": 4}, {"global_batch_size": 16}):
            model = regression()
            model.fit(X, TARGETS, shuffle=False, verbose=0, **size)
            found.append(bits_of(model))
        with pytest.raises(ValueError, match="global_batch_size is 18.*use a multiple of 4"):
            model.fit(X, TARGETS, global_batch_size=18)
        with pytest.raises(ValueError, match="give one of them"):
            model.fit(X, TARGETS, 4, global_batch_size=16)
        return found

    one, other = alone(program)
    assert one == other


def test_frozen_layers_stay_unchanged_and_do_not_travel(alone):
    def program(strategy):
        model = regression()
        model.layers[0].trainable = False
        model.compile("sgd", "mse")
        frozen = model.layers[0].get_weights()
        model.fit(X, TARGETS, batch_size=4, verbose=0)
        words = model.train_function.function.reductions["variables"]
        return [bool((a == b).all()) for a, b in zip(frozen, model.layers[0].get_weights(), strict=True)], words

    assert alone(program) == ([True, True], ["constant", "constant"])


def test_constraints_and_decay_of_a_variable_hold_for_its_parts():
    """The kernel decays and stays nonnegative; the bias is excluded from both."""
    kernel, bias = (keras.Variable(np.ones(size, np.float32), name=name) for name, size in (("k", 4), ("b", 2)))
    kernel.constraint = keras.constraints.NonNeg()
    optimizer = keras.optimizers.SGD(0.5, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_list=[bias])
    optimizer.build([kernel, bias])
    state, parts = [variable.value for variable in optimizer.variables], [jnp.ones(2), jnp.ones(1)]
    gradients, known = [jnp.array([0.0, 4.0]), jnp.array([4.0])], StepFacts(jnp.float32(0), jnp.float32(0))
    new, _ = KerasOptimizer(optimizer).apply(gradients, state, parts, known, AS_WRITTEN)
    assert [each.tolist() for each in new] == [[0.75, 0.0], [-1.0]]
