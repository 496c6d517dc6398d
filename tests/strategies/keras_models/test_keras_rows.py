"""Rows of the original's tests that are checked nowhere else."""

import keras
import numpy as np
from keras import layers
from small_models import TARGETS, X, bits_of, dense, regression


def test_kr_06_replicas_have_the_same_weights_after_every_update_in_16_bits(in_scopes):
    """There is one copy of variables on an instance, so those of instances are compared."""

    def program(strategy):
        keras.utils.set_random_seed(2)
        model = keras.Sequential(
            [keras.Input((6,)), dense(4, 1, dtype="float16"), layers.Dropout(0.2, seed=1), dense(1, 2, dtype="float16")]
        )
        model.compile(keras.optimizers.SGD(0.01), "mse")
        seen = []

        class Looks(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                seen.append(self.model.get_weights())

        model.fit(X, TARGETS, batch_size=4, shuffle=False, verbose=0, callbacks=[Looks()])
        return seen

    one, other = in_scopes(2, program)
    assert len(one) == 4
    for mine, theirs in zip(one, other, strict=True):
        assert all(map(np.array_equal, mine, theirs))
    assert not np.array_equal(one[0][0], one[1][0])


def test_kp_06_sums_of_large_numbers_do_not_overflow(alone):
    """The original adds metrics in 16 bits where it is told to, which gives inf; here they are float32."""

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


def test_ka_05_asynchronous_callbacks_are_told_of_each_step_and_change_no_bit(alone):
    def program(strategy, asynchronous):
        model = regression(steps_per_execution=4)
        model.set_gradient_accumulation_options(2)
        model.set_asynchronous_callbacks(asynchronous)
        begun, ended = [], []
        told = keras.callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs: begun.append(batch),
            on_train_batch_end=lambda batch, logs: ended.append(batch),
        )
        model.fit(X, TARGETS, batch_size=2, epochs=2, shuffle=False, verbose=0, callbacks=[told])
        return bits_of(model), model.evaluate(X, TARGETS, verbose=0), len(begun), len(ended)

    bits, loss, *counts = alone(lambda strategy: program(strategy, True))
    assert counts == [6, 6]  # updates of two micro-batches of two rows on four replicas
    assert alone(lambda strategy: program(strategy, False)) == (bits, loss, 4, 4)


def test_ka_06_data_that_are_the_same_each_time_need_no_files(alone):
    """The original's synthetic data are zeros that its runtime makes; here they are an array that takes no memory."""

    def program(strategy):
        model = regression()
        zeros = np.broadcast_to(np.zeros((), np.float32), (64, 6))
        model.fit(zeros, zeros[:, :1], batch_size=4, verbose=0)
        return model.predict(zeros, verbose=0), model.evaluate(zeros, zeros[:, :1], verbose=0)

    outputs, loss = alone(program)
    assert outputs.shape == (64, 1)
    assert not outputs.any()
    assert loss == 0


def test_kr_01_kr_02_rows_of_several_outputs_come_in_their_order(alone):
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
