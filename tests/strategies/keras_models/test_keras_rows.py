"""Tests of the original that no other file covers."""

import itertools
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers
from small_models import TARGETS, Batches, X, bits_of, dense, hooked, regression
from tiers import first_of


def functional(optimizer=None):
    given = keras.Input((6,))
    model = keras.Model(given, dense(1, 2)(dense(4, 1)(given)))
    model.compile(optimizer or keras.optimizers.SGD(0.05), "mse")
    return model


@pytest.mark.parametrize("make", [regression, functional])
@pytest.mark.parametrize("settings", [{"batch_size": 4}, {"batch_size": 4, "steps_per_epoch": 2}], ids=str)
def test_a_history_has_a_float_for_each_epoch(alone, make, settings):
    losses = alone(lambda strategy: make().fit(X, TARGETS, epochs=3, verbose=0, **settings).history)["loss"]
    assert [type(loss) for loss in losses] == [float] * 3
    assert len(set(losses)) == 3


def test_steps_per_epoch_leaves_the_order_of_each_epoch_unchanged(alone):
    """Keras begins with the data of an epoch at the end of the epoch before, but orders stay the same."""

    def program(strategy):
        models = []
        for said in ({}, {"steps_per_epoch": 3}):
            keras.utils.set_random_seed(7)
            models.append(regression())
            models[-1].fit(X[:48], TARGETS[:48], batch_size=4, epochs=4, verbose=0, **said)
        return [bits_of(model) for model in models]

    without, said = alone(program)
    assert said == without


class Endless(keras.utils.PyDataset):
    num_batches = None

    def __getitem__(self, number):
        assert number < 20, "it goes on for ever"
        return X[:4], TARGETS[:4]


def endless_grain():
    grain = pytest.importorskip("grain")
    return grain.MapDataset.range(48).map(lambda i: (X[i], TARGETS[i])).batch(4).repeat()


def endless_tensorflow():
    tensorflow = pytest.importorskip("tensorflow")
    return tensorflow.data.Dataset.from_tensor_slices((X, TARGETS)).batch(4).repeat()


def test_only_a_function_cardinality_tells_of_an_end(alone):
    """Other classes than `tf.data.Dataset` may have a number of this name."""
    torch = pytest.importorskip("torch")

    class Loader(torch.utils.data.DataLoader):
        cardinality = -1

    rows = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(TARGETS))
    history = alone(lambda strategy: regression().fit(Loader(rows, batch_size=4), verbose=0).history)
    assert len(history["loss"]) == 1


@pytest.mark.parametrize("make", [Endless, endless_grain, endless_tensorflow])
def test_endless_data_need_a_number_of_steps(alone, make):
    def program(strategy):
        for use in ("fit", "evaluate", "predict"):
            with pytest.raises(ValueError, match=r"is an infinite dataset, .*; give steps_per_epoch to fit"):
                getattr(regression(), use)(make(), verbose=0)
        model = regression()
        model.fit(make(), steps_per_epoch=2, epochs=2, verbose=0)
        return int(model.optimizer.iterations.value), model.predict(make(), steps=1, verbose=0).shape

    assert alone(program) == (4, (16, 1))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"x": X[:3], "y": TARGETS[:3]}, ValueError, "the data have 3 rows for 4 replicas x 1 micro-batches; give at"),
        ({"x": X[:0], "y": TARGETS[:0]}, ValueError, "the data have no rows"),
        ({"x": None}, ValueError, "x is None"),
        ({"x": X, "y": TARGETS, "batch_size": 0}, ValueError, "batch_size is 0; it must be at least 1"),
        ({"x": X, "y": TARGETS, "batch_size": 1.5}, TypeError, r"batch_size is 1\.5; an integer"),
        ({"x": X, "y": TARGETS[:7]}, ValueError, "same number of samples"),
    ],
)
def test_too_few_data_for_one_step_are_refused(alone, given, error, message):
    with pytest.raises(error, match=message):
        alone(lambda strategy: regression().fit(**given, verbose=0))


def test_batches_too_small_for_all_replicas_are_refused(alone):
    def program(strategy):
        with pytest.raises(ValueError, match="the data have 3 rows for 4 replicas"):
            regression().fit(Batches(1, 3), verbose=0)
        return regression().predict(Batches(1, 3), verbose=0).shape

    assert alone(program) == (3, 1)


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_a_training_ends_when_its_batches_run_out(alone):
    """Stock Keras warns and stops too; the original refuses data that it can count."""

    def program(strategy):
        model = regression()
        given = ((X[:4], TARGETS[:4]) for _ in range(12))
        model.fit(given, steps_per_epoch=2, epochs=3, verbose=0)
        return int(model.optimizer.iterations.value)

    assert alone(program) == 3


@pytest.mark.parametrize("dtype", first_of([np.float64, np.uint8]))
def test_data_of_other_dtypes_are_cast_as_in_stock_keras(alone, dtype):
    given, wanted = (10 * np.abs(X)).astype(dtype), TARGETS.astype(np.float64)

    def program(strategy=None):
        model = regression(keras.optimizers.SGD(1e-4))
        model.fit(given[:48], wanted[:48], batch_size=16 if strategy is None else 4, shuffle=False, verbose=0)
        predicted = model.predict(given, verbose=0)
        return predicted, model.evaluate(given, wanted, verbose=0)

    predicted, loss = program()
    ours, our_loss = alone(program)
    assert ours.dtype == predicted.dtype
    np.testing.assert_allclose(ours, predicted, rtol=1e-4, atol=1e-5)
    assert our_loss == pytest.approx(loss, rel=1e-5)


class WithWords(keras.Sequential):
    """A class of the user that saves more than variables."""

    words = ""

    def save_assets(self, folder):
        (Path(folder) / "words.txt").write_text(self.words)

    def load_assets(self, folder):
        self.words = (Path(folder) / "words.txt").read_text()


def test_files_keep_the_configuration_of_a_user_class_beside_the_options(alone, tmp_path):
    def program(strategy):
        model = WithWords([keras.Input((6,)), keras.layers.Dense(1)])
        model.words = "yes no"
        model.set_infeed_queue_options(prefetch_depth=5)
        model.save(tmp_path / "model.keras")
        with keras.saving.custom_object_scope({"WithWords": WithWords}):
            loaded = keras.models.load_model(tmp_path / "model.keras")
        return loaded.words, loaded.fit.__self__.options.prefetch

    assert alone(program) == ("yes no", 5)


def test_options_survive_files_except_for_keyword_arguments(alone, tmp_path):
    def program(strategy):
        model = regression()
        model.set_infeed_queue_options(prefetch_depth=5)
        model.set_asynchronous_callbacks(True)
        model.set_gradient_accumulation_options(4, "running_mean", dtype="bfloat16")
        model.save(tmp_path / "model.keras")
        before, after = (one.fit.__self__.options for one in (model, keras.models.load_model(tmp_path / "model.keras")))
        kept = ("prefetch", "each_step", "accumulated", "reduction_method")
        return [(getattr(before, name), getattr(after, name)) for name in kept], before.step, after.step

    kept, step, loaded = alone(program)
    assert all(one == other for one, other in kept)
    assert kept[0] == (5, 5)
    assert (bool(step), loaded) == (True, {})


@pytest.mark.parametrize(
    "method", ["NONE", "SUM", *(pytest.param(name, marks=pytest.mark.complete) for name in ("LIST", "MEAN"))]
)
def test_metrics_cover_all_rows_with_every_reduction_method(alone, method):
    """In the original, NONE reports the last replica. Here y is 1 to 4 and the model outputs 0."""

    def program(strategy):
        model = keras.Sequential([keras.Input((6,)), layers.Dense(1, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae", "mse"], steps_per_execution=2)
        model.set_replication_options(method)
        wanted = np.arange(1, 5, dtype=np.float32).repeat(4)[:, None]
        history = model.fit(X[:16], wanted, batch_size=2, shuffle=False, verbose=0).history
        return {name: values[0] for name, values in history.items()}, model.evaluate(X[:16], wanted, verbose=0)

    history, evaluated = alone(program, replicas=2)
    assert history == {"loss": 7.5, "mae": 2.5, "mse": 7.5}
    assert evaluated == [7.5, 2.5, 7.5]


@pytest.mark.complete
def test_a_model_trained_by_stock_keras_loads_and_predicts_the_same(in_scopes, tmp_path):
    stock = functional(keras.optimizers.Adam(0.05))
    stock.fit(X, TARGETS, epochs=2, verbose=0)
    stock.save(tmp_path / "whole.keras")
    stock.save_weights(tmp_path / "its.weights.h5")
    expected = stock.predict(X, verbose=0)

    def program(strategy):
        of_weights = functional(keras.optimizers.Adam(0.05))
        of_weights.optimizer.build(of_weights.trainable_variables)
        of_weights.load_weights(tmp_path / "its.weights.h5")
        whole = keras.models.load_model(tmp_path / "whole.keras")
        assert int(whole.optimizer.iterations.value) == int(stock.optimizer.iterations.value)
        return [model.predict(X, batch_size=2, verbose=0) for model in (of_weights, whole)]

    for predicted in itertools.chain(*in_scopes(2, program, replicas=2)):
        np.testing.assert_allclose(predicted, expected, rtol=1e-5, atol=1e-6)


def test_a_wrong_number_of_inputs_is_refused(alone):
    def program(strategy):
        one, other = keras.Input((6,)), keras.Input((6,))
        model = keras.Model([one, other], dense(1, 1)(layers.Add()([one, other])))
        model.compile("sgd", "mse")
        model.fit(X, TARGETS, verbose=0)

    with pytest.raises(ValueError, match=r"expects 2 .*input\(s\)"):
        alone(program)


@pytest.mark.complete
def test_replicas_have_the_same_weights_after_every_update_in_16_bits(in_scopes):
    """An instance has one copy of the variables, so the copies of instances are compared."""

    def program(strategy):
        keras.utils.set_random_seed(2)
        model = keras.Sequential(
            [keras.Input((6,)), dense(4, 1, dtype="float16"), layers.Dropout(0.2, seed=1), dense(1, 2, dtype="float16")]
        )
        model.compile(keras.optimizers.SGD(0.01), "mse")
        seen = []

        def look(self, batch, logs=None):
            seen.append(self.model.get_weights())

        looks = hooked("on_train_batch_end", look)
        model.fit(X, TARGETS, batch_size=4, shuffle=False, verbose=0, callbacks=[looks])
        return seen

    one, other = in_scopes(2, program)
    assert len(one) == 4
    for mine, theirs in zip(one, other, strict=True):
        assert all(map(np.array_equal, mine, theirs))
    assert not np.array_equal(one[0][0], one[1][0])


def test_sums_of_large_metrics_do_not_overflow(alone):
    """The original can add metrics in 16 bits, which gives inf; here they are float32."""

    def program(strategy):
        model = keras.Sequential([keras.Input((6,)), dense(1, 1)])
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae", keras.metrics.RootMeanSquaredError()])
        model.set_gradient_accumulation_options(2)
        regression().set_pipelining_options(2, accumulate_outfeed=True, accumulate_outfeed_dtype="float16")
        return model.fit(X, TARGETS + 100000, batch_size=2, shuffle=False, verbose=0).history

    history = alone(program)
    assert all(np.isfinite(values).all() for values in history.values()), history
    assert abs(history["mae"][0] - 100000) < 10
    assert abs(history["root_mean_squared_error"][0] - 100000) < 10


def test_asynchronous_callbacks_see_each_step_and_change_no_bit(alone):
    def program(strategy, asynchronous):
        model = regression(steps_per_execution=4)
        model.set_gradient_accumulation_options(2)
        model.set_asynchronous_callbacks(asynchronous)
        begun, ended, evaluated = [], [], []
        told = keras.callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs: begun.append(batch),
            on_train_batch_end=lambda batch, logs: ended.append(batch),
            on_test_batch_end=lambda batch, logs: evaluated.append(batch),
        )
        model.fit(X, TARGETS, batch_size=2, epochs=2, shuffle=False, verbose=0, callbacks=[told])
        loss = model.evaluate(X[:48], TARGETS[:48], batch_size=4, verbose=0, callbacks=[told])
        return bits_of(model), loss, len(begun), len(ended), len(evaluated)

    bits, loss, *counts = alone(lambda strategy: program(strategy, True))
    assert counts == [6, 6, 3]  # updates of two micro-batches of two rows on four replicas
    assert alone(lambda strategy: program(strategy, False)) == (bits, loss, 4, 4, 1)


def test_constant_data_can_be_a_broadcast_array(alone):
    """The original's runtime makes synthetic data of zeros; here an array without memory replaces them."""

    def program(strategy):
        model = regression()
        zeros = np.broadcast_to(np.zeros((), np.float32), (64, 6))
        model.fit(zeros, zeros[:, :1], batch_size=4, verbose=0)
        return model.predict(zeros, verbose=0), model.evaluate(zeros, zeros[:, :1], verbose=0)

    outputs, loss = alone(program)
    assert outputs.shape == (64, 1)
    assert not outputs.any()
    assert loss == 0


def test_rows_of_several_outputs_keep_their_order(alone):
    def program(strategy):
        given = keras.Input((6,))
        model = keras.Model(given, [dense(1, 1, name="one")(given), dense(2, 2, name="two")(given)])
        model.compile("sgd", "mse")
        first, second = model.predict(np.repeat(X[:1], 30, axis=0), batch_size=2, verbose=0)
        return first, second

    first, second = alone(program)
    assert (first.shape, second.shape) == ((30, 1), (30, 2))
    assert (first == first[0]).all()
    assert (second == second[0]).all()
