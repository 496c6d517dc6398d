"""Extensions of Keras models by the original: accumulation and options of feeds, which files preserve."""

import keras
import numpy as np
import pytest
from small_models import (
    TARGETS,
    Batches,
    X,
    bits_of,
    dense,
    hooked,
    largest_difference,
    regression,
    values_of,
)
from tiers import first_of, only

import strategies
from strategies.core.options import GradientAccumulationReductionMethod


@pytest.mark.parametrize("method", first_of(["MEAN", "RUNNING_MEAN"]))
def test_accumulated_gradients_match_the_whole_batch(in_scopes, method):
    stock = regression()
    stock.fit(X[:48], TARGETS[:48], batch_size=24, epochs=2, shuffle=False, verbose=0)

    def program(strategy):
        model = regression()
        model.set_gradient_accumulation_options(3, method)
        history = model.fit(X[:48], TARGETS[:48], batch_size=2, epochs=2, shuffle=False, verbose=0)
        return values_of(model), bits_of(model), history.params["steps"], history.history["loss"]

    results = in_scopes(2, program)
    assert largest_difference(results[0][0], values_of(stock)) < 1e-6
    assert results[0][1:] == results[1][1:]
    assert results[0][2] == 2


@pytest.mark.complete
def test_sums_of_gradients_are_the_default(alone):
    def program(strategy):
        found = []
        for options, rate in (((2,), 0.02), ((2, GradientAccumulationReductionMethod.MEAN), 0.04)):
            model = regression(keras.optimizers.SGD(rate))
            model.set_gradient_accumulation_options(*options)
            model.fit(X[:48], TARGETS[:48], batch_size=2, shuffle=False, verbose=0)
            found.append(values_of(model))
        return found

    summed, mean = alone(program)
    assert largest_difference(summed, mean) < 1e-6


def test_an_execution_has_whole_updates(alone):
    def program(strategy):
        calls = []
        counts = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: calls.append(batch))
        model = regression(steps_per_execution=8)
        model.set_gradient_accumulation_options(3)
        with pytest.raises(RuntimeError, match="3 steps per replica, but steps_per_execution is 8"):
            model.fit(X, TARGETS, batch_size=1, verbose=0)
        model.compile("sgd", "mse", steps_per_execution=6)
        model.fit(X[:48], TARGETS[:48], batch_size=1, verbose=0, callbacks=[counts])
        return calls

    assert alone(program) == [1, 3]


def test_gradients_are_not_accumulated_twice(alone):
    def program(strategy):
        model = regression(keras.optimizers.SGD(gradient_accumulation_steps=2))
        model.fit(X, TARGETS, batch_size=4, verbose=0)
        own = int(model.optimizer.iterations)
        model.set_gradient_accumulation_options(2)
        with pytest.raises(ValueError, match="gradient_accumulation_steps=2, but the model accumulates"):
            model.fit(X, TARGETS, batch_size=4, verbose=0)
        return own

    assert alone(program) == 2


class Minimizes(keras.optimizers.SGD):
    def minimize(self):
        """Minimize, as optimizers of TensorFlow did."""


@pytest.mark.parametrize("option", ["set_gradient_accumulation_options", "set_pipelining_options"])
def test_an_optimizer_that_overrides_minimize_is_refused(alone, option):
    def program(strategy):
        model = regression(Minimizes())
        getattr(model, option)(2)
        model.fit(X, TARGETS, batch_size=4, verbose=0)

    with pytest.raises(ValueError, match=r"must not override OptimizerV2\.minimize"):
        alone(program)


@pytest.mark.parametrize(
    ("option", "arguments", "error", "message"),
    [
        ("set_gradient_accumulation_options", {"gradient_accumulation_steps_per_replica": 0}, ValueError, "is 0"),
        ("set_gradient_accumulation_options", {"gradient_accumulation_steps_per_replica": 1.5}, TypeError, "1.5"),
        (
            "set_gradient_accumulation_options",
            {"gradient_accumulation_reduction_method": "x"},
            ValueError,
            "Cannot parse",
        ),
        ("set_gradient_accumulation_options", {"opt": 1}, TypeError, "'opt', which is not known; known are dtype"),
        ("set_pipelining_options", {"gradient_accumulation_count": 2}, ValueError, "set_pipelining_options arguments"),
        ("set_pipelining_options", {"infeed_queue": 2}, ValueError, "automatically set by Keras"),
        ("set_pipelining_options", {"outfeed_mask": 2}, ValueError, "not compatible with Keras"),
        ("set_pipelining_options", {"device_mapping": 1.0}, TypeError, "list of devices"),
        ("set_pipelining_options", {"accumulate_outfeed": 1}, TypeError, "accumulate_outfeed is 1"),
        ("set_infeed_queue_options", {"dataset": 1}, ValueError, "dataset: leave them out: Keras has its own"),
        ("set_pipelining_options", {"offload_activations": "yes"}, TypeError, "offload_activations is 'yes'"),
        ("set_pipelining_options", {"offload_weight_update_variables": 1}, TypeError, "offload_optimizer_state is 1"),
        ("set_pipelining_options", {"no_such_option": None}, TypeError, "'no_such_option', which is not known"),
        (
            "set_gradient_accumulation_options",
            {"use_v2_gradient_accumulation_optimizer": "no"},
            TypeError,
            "use_v2_gradient_accumulation_optimizer is 'no'",
        ),
        ("set_infeed_queue_options", {"prefetch_depth": 0}, ValueError, "prefetch_depth is 0"),
        ("set_infeed_queue_options", {"prefetch_depth": 256}, ValueError, "it must be less than 256"),
        ("set_infeed_queue_options", {"prefetch_dept": 2}, TypeError, "'prefetch_dept', which is not known; known are"),
        ("set_outfeed_queue_options", {"outfeed_mode": 1}, ValueError, "outfeed_mode"),
        ("set_outfeed_queue_options", {"depth": 2}, TypeError, "'depth', which is not known; known are buffer_depth"),
        ("set_replication_options", {"replicated_metric_reduction_method": "MAX"}, ValueError, "NONE, LIST, SUM, MEAN"),
        ("set_asynchronous_callbacks", {"asynchronous": 1}, TypeError, "it is True or False"),
    ],
)
def test_invalid_options_are_refused(alone, option, arguments, error, message):
    def program(strategy):
        getattr(regression(), option)(**arguments)

    with pytest.raises(error, match=message):
        alone(program)


def test_options_of_feeds_are_accepted(alone):
    def program(strategy):
        model = regression()
        model.set_infeed_queue_options(prefetch_depth=3)
        model.set_outfeed_queue_options(buffer_depth=3)
        model.set_replication_options("MEAN")
        return model.predict(X, batch_size=4, verbose=0).shape

    assert alone(program) == (len(X), 1)


class OwnModel(keras.Model):
    """A model registered under a name of its own."""

    def __init__(self, units=2, **named):
        super().__init__(**named)
        self.units = units
        self.layer = dense(units, 1)

    def call(self, values):
        return self.layer(values)

    def get_config(self):
        return {"units": self.units}


keras.saving.register_keras_serializable("small")(OwnModel)


def functional():
    given = keras.Input((6,))
    return keras.Model(given, dense(2, 1)(given))


MODELS = {
    "sequential": lambda: keras.Sequential([keras.Input((6,)), dense(2, 1)]),
    "functional": functional,
    "subclass": OwnModel,
    "nested": lambda: keras.Sequential(
        [keras.Input((6,)), keras.Sequential([keras.Input((6,)), dense(3, 1)]), dense(2, 2)]
    ),
}


@pytest.mark.parametrize("kind", only(["subclass"], MODELS))
def test_files_have_the_format_of_stock_models_and_keep_options(alone, kind, tmp_path):
    file = tmp_path / "model.keras"

    def save(strategy):
        model = MODELS[kind]()
        model.compile("adam", "mse")
        model.set_gradient_accumulation_options(2, "MEAN")
        model.fit(X, X[:, :2], batch_size=2, shuffle=False, verbose=0)
        model.save(file)
        return bits_of(model), model.predict(X, verbose=0)

    bits, predicted = alone(save)
    stock = keras.models.load_model(file)
    assert type(stock) in (keras.Sequential, type(functional()), OwnModel)
    np.testing.assert_allclose(stock.predict(X, verbose=0), predicted, atol=1e-6)
    stock.fit(X, X[:, :2], verbose=0)

    def load(strategy):
        model = keras.models.load_model(file)
        before = bits_of(model)
        history = model.fit(X, X[:, :2], batch_size=2, verbose=0)
        return before, history.params["steps"], type(model).__name__

    assert alone(load) == (bits, 3, type(stock).__name__)


def test_models_that_are_cloned_or_pickled_in_a_scope_belong_to_it(alone):
    import pickle

    def program(strategy):
        model = regression()
        copies = [keras.models.clone_model(model), pickle.loads(pickle.dumps(model))]
        for copy in copies:
            copy.compile("sgd", "mse")
            copy.fit(X, TARGETS, batch_size=4, verbose=0)
        return [copy.predict(X, verbose=0).shape for copy in copies]

    assert alone(program) == [(len(X), 1)] * 2


def optimizers():
    return {
        "adam": lambda: keras.optimizers.AdamW(0.01, clipvalue=0.5, use_ema=True),
        "momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True),
        "across elements": lambda: keras.optimizers.SGD(0.01, momentum=0.9, global_clipnorm=0.5),
        "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=8.0),
    }


@pytest.mark.parametrize("kind", only(["momentum"], optimizers()))
def test_sharding_the_optimizer_state_changes_no_bit(in_scopes, kind):
    """A learning rate set by a callback holds for the next step; at the end Keras has the whole state."""

    def program(strategy, options):
        model = keras.Sequential([keras.Input((6,)), dense(7, 1), dense(1, 2)])  # 42 elements are cut, 7 are not
        model.compile(optimizers()[kind](), "mse")
        model.set_gradient_accumulation_options(1, **options)
        rate = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
        model.fit(X, TARGETS, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=[rate])
        model.train_on_batch(X[:16], TARGETS[:16])
        is_sharded = model.train_function.function.trainer.is_sharded
        model.fit(X, TARGETS, batch_size=4, shuffle=False, verbose=0)
        return bits_of(model), is_sharded

    [whole] = in_scopes(1, lambda strategy: program(strategy, {}))
    options = {"replicated_optimizer_state_sharding": True, "offload_weight_update_variables": True}
    for instances in (1, 2) if kind == "momentum" else (2,):
        sharded = in_scopes(instances, lambda strategy: program(strategy, options))
        assert sharded == [(whole[0], True)] * instances
    assert whole[1] is False


class FailsOnce(keras.utils.PyDataset):
    """Batches of which one in the middle cannot be read at first."""

    def __init__(self):
        super().__init__()
        self.has_failed = False

    def __len__(self):
        return 24

    def __getitem__(self, number):
        if number == 15 and not self.has_failed:
            raise InterruptedError
        return X[2 * number :][:2], TARGETS[2 * number :][:2]


def test_an_error_in_a_training_keeps_the_sharded_state_of_the_optimizer(in_scopes):
    def program(strategy, options):
        model, data = keras.Sequential([keras.Input((6,)), dense(7, 1), dense(1, 2)]), FailsOnce()
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        model.set_gradient_accumulation_options(1, **options)
        with pytest.raises(InterruptedError):
            model.fit(data, shuffle=False, verbose=0)
        data.has_failed = True
        model.fit(data, shuffle=False, verbose=0)
        return bits_of(model)

    options = {"replicated_optimizer_state_sharding": True, "offload_weight_update_variables": True}
    assert in_scopes(1, lambda strategy: program(strategy, options)) == in_scopes(
        1, lambda strategy: program(strategy, {})
    )


SHARDED = {"replicated_optimizer_state_sharding": True, "offload_weight_update_variables": True}


def small_with(optimizer, options):
    model = keras.Sequential([keras.Input((6,)), dense(7, 1), dense(1, 2)])
    model.compile(optimizer, "mse")
    model.set_gradient_accumulation_options(1, **options)
    return model


@pytest.mark.parametrize("hook", ["on_epoch_begin", "on_epoch_end", "on_train_batch_end"])
def test_a_change_of_a_sharded_optimizer_by_a_callback_counts(in_scopes, hook):
    """Changes of a whole optimizer count, too, also between calls of `train_on_batch`."""

    def program(strategy, options):
        model = small_with(keras.optimizers.SGD(0.05, momentum=0.9), options)

        def forget(callback=None, number=0, logs=None):
            model.jax_state_sync()  # without it, Keras does not look at changes within an epoch
            for variable in model.optimizer.variables[2:]:
                variable.assign(np.full(variable.shape, 0.5, np.float32))

        found = []
        data = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
        model.fit(X, TARGETS, **data, callbacks=[hooked(hook, forget)])
        for _ in range(2):
            found.append(bits_of(model))
            forget()
            model.train_on_batch(X[:16], TARGETS[:16])
        return found, bits_of(model)

    [whole] = in_scopes(1, lambda strategy: program(strategy, {}))
    assert in_scopes(2, lambda strategy: program(strategy, SHARDED)) == [whole] * 2


def test_an_error_leaves_the_weights_of_a_sharded_optimizer_with_means_as_they_are(alone):
    """Keras replaces them by the means after an error, too, but has only zeros there."""

    def program(strategy):
        model, data = small_with(keras.optimizers.SGD(0.05, use_ema=True), SHARDED), FailsOnce()
        with pytest.raises(InterruptedError):
            model.fit(data, shuffle=False, verbose=0)
        return [float(np.abs(np.asarray(kernel)).sum()) for kernel in model.trainable_variables[::2]]

    assert min(alone(program)) > 0


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_data_that_fail_at_once_leave_the_model_as_it_was(alone, call):
    class Fails(Batches):
        def __getitem__(self, number):
            if number == 1:
                raise InterruptedError
            return super().__getitem__(number)

    def program(strategy):
        model = regression(keras.optimizers.Adam(0.01))
        before = strategies.fingerprint(values_of(model))
        with pytest.raises(InterruptedError):
            getattr(model, call)(Fails(count=4), verbose=0)
        kept = strategies.fingerprint(values_of(model))
        model.fit(X, TARGETS, verbose=0)
        return before, kept

    before, after = alone(program)
    assert before == after


def test_means_of_weights_in_a_sharded_optimizer_are_validated(in_scopes):
    def program(strategy, options):
        model = keras.Sequential([keras.Input((6,)), dense(7, 1), dense(1, 2)])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True), "mse")
        model.set_gradient_accumulation_options(1, **options)
        data = {"validation_data": (X[:20], TARGETS[:20]), "batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
        return model.fit(X, TARGETS, **data, callbacks=[keras.callbacks.SwapEMAWeights()]).history, bits_of(model)

    options = {"replicated_optimizer_state_sharding": True, "offload_weight_update_variables": True}
    [whole] = in_scopes(1, lambda strategy: program(strategy, {}))
    assert in_scopes(2, lambda strategy: program(strategy, options)) == [whole] * 2


@pytest.mark.complete
def test_accumulators_can_have_another_dtype(in_scopes):
    def program(strategy):
        model = regression()
        model.set_gradient_accumulation_options(2, "mean", dtype="bfloat16")
        model.fit(X[:48], TARGETS[:48], batch_size=2, shuffle=False, verbose=0)
        return bits_of(model)

    [alone] = in_scopes(1, program)
    assert in_scopes(2, program) == [alone] * 2


def test_map_gradient_clips_the_gradients_of_each_micro_batch(alone):
    """Each replica clips two gradients one by one, not their sum."""

    def program(strategy):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(1.0), "mse")
        model.set_gradient_accumulation_options(2, map_gradient=lambda gradient, variable: gradient.clip(-1, 1))
        targets = np.float32([[1], [5]] * 4)
        model.fit(np.ones((8, 1), np.float32), targets, batch_size=1, shuffle=False, verbose=0)
        return values_of(model)

    assert np.asarray(alone(program)).tolist() == [[[2.0]]]
