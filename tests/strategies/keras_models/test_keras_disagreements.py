"""Differences between instances: the first hook or call that shows one refuses it by name."""

import re
from functools import partial

import keras
import numpy as np
import pytest
from keras.callbacks import CSVLogger, LambdaCallback, ModelCheckpoint
from small_models import LABELS, TARGETS, X, bits_of, classifier, dense, hooked, regression, values_of

import strategies
from strategies.errors import DisagreementError, StrategyError

SGD, SCHEDULE = keras.optimizers.SGD, keras.optimizers.schedules.CosineDecay(0.1, 9)
LATE = np.array([[1]] * 51 + [[2]], np.float32)  # the last row
FIT = {"batch_size": 4, "epochs": 3, "shuffle": False, "verbose": 0}


def fit(model, targets=TARGETS, **named):
    model.fit(X, targets, **{**FIT, **named})


def set_rate(model, rate):
    model.optimizer.learning_rate = rate


def double(model):
    model.layers[0].set_weights([2 * weight for weight in model.layers[0].get_weights()])


def freeze(model):
    model.layers[0].trainable = False


def freeze_all(model):
    model.trainable = False  # the order of variables stays


def with_hook(hook, change, wrapped=lambda callback: callback, changes_on=1):
    """Return a fit whose callback reads the model on both instances, and changes the model on one."""

    def program(number):
        model = regression()

        def called(place, logs=None):
            model.jax_state_sync()
            if number == changes_on:
                change(model)

        fit(model, callbacks=[wrapped(LambdaCallback(**{hook: called}))])

    return program


def only_on_one(callback):
    return lambda number: fit(regression(), callbacks=[callback] if number else [])


def with_argument(name, make, model=regression, targets=TARGETS):
    """Return a fit with an argument made from the number of the instance."""
    return lambda number: fit(model(), targets, **{name: make(number)})


def between(change):
    def program(number):
        model = regression()
        fit(model)
        if number:
            change(model)
        fit(model)

    return program


def used(name, *data):
    return lambda number: getattr(regression(), name)(*(rows[: 52 - 20 * number] for rows in data))


HALF = partial(set_rate, rate=0.5)
ON_CHIEF = strategies.keras.OnChief
CASES = {
    "a callback": (only_on_one(LambdaCallback(on_epoch_end=print)), r"1 has the list of .*_end\)\].* 0 .*\[\]"),
    "a callback for batches": (only_on_one(LambdaCallback(on_train_batch_end=print)), "list of callbacks"),
    "early stopping": (only_on_one(keras.callbacks.EarlyStopping("loss")), "EarlyStopping"),
    "a rate in an epoch": (with_hook("on_epoch_end", HALF), "learning_rate after on_epoch_end, 0.5"),
    "a rate at its begin": (with_hook("on_epoch_begin", HALF), "learning_rate after on_epoch_begin, 0.5"),
    "a rate before a step": (with_hook("on_train_batch_begin", HALF), "learning_rate after on_train_batch_end, 0.5"),
    "a rate behind a step": (with_hook("on_train_batch_end", HALF), "learning_rate after on_train_batch_end, 0.5"),
    "weights": (with_hook("on_epoch_begin", double), r"kernel \(0\) after on_epoch_begin, \(6, 4\)"),
    "weights in a step": (with_hook("on_train_batch_end", double), r"kernel \(0\) after on_train_batch_end"),
    "weights on the chief": (with_hook("on_epoch_end", double, ON_CHIEF, 0), r"kernel \(0\) after on_epoch_end"),
    "a flag in fit": (with_hook("on_epoch_end", freeze), r"trainable of variable 0 \(kernel\) False"),
    "all flags in fit": (with_hook("on_epoch_end", freeze_all), r"trainable of variable 0 \(kernel\) False"),
    "a flag before fit": (between(lambda model: (freeze(model), model.compile("sgd"))), r"trainable of variable 0"),
    "a schedule": (between(partial(set_rate, rate=SCHEDULE)), "CosineDecay"),
    "a compilation": (between(lambda model: model.compile(SGD(0.05), "mse")), "1 has compile, or new .*True"),
    "a loss": (lambda number: fit(regression(loss=("mse", "mae")[number])), "computes the loss function"),
    "an optimizer": (between(lambda model: model.compile("adam")), "optimizer Adam, instance 0 optimizer SGD"),
    "clipping": (lambda number: fit(regression(SGD(0.05, clipnorm=1 + number))), "clipnorm 2"),
    "classes": (with_argument("class_weight", lambda number: {0: 1, 1: number}, classifier, LABELS), "class_weight"),
    "weights of rows": (with_argument("sample_weight", lambda number: LATE**number), "different rows or weights"),
    "rows of validation": (
        with_argument("validation_data", lambda number: (X * LATE**number, TARGETS)),
        "different rows",
    ),
    "validation": (
        with_argument("validation_data", lambda number: [None, (X, TARGETS)][number]),
        "validation_data true",
    ),
    "epochs": (with_argument("epochs", lambda number: 2 + number), "epochs 3"),
    "the first epoch": (with_argument("initial_epoch", lambda number: number), "initial_epoch 1"),
    "steps": (with_argument("steps_per_epoch", lambda number: 1 + number), "steps_per_epoch 2"),
    "shuffling": (with_argument("shuffle", bool), "shuffle true"),
    "rows of an evaluation": (used("evaluate", X, TARGETS), "different rows"),
    "rows of a prediction": (used("predict", X), "different rows"),
    "a batch": (lambda number: regression().train_on_batch(X[:8] * (1 + number), TARGETS[:8]), "different rows"),
}


@pytest.mark.parametrize("name", CASES)
def test_differences_between_instances_are_refused_by_name(in_scopes, name):
    program, message = CASES[name]
    with pytest.raises(DisagreementError) as raised:
        in_scopes(2, lambda strategy: program(strategy.instance_index))
    assert re.search(message, str(raised.value)), str(raised.value)


def test_callbacks_that_only_write_can_be_on_the_chief_alone(in_scopes, tmp_path):
    def program(strategy):
        model = regression(keras.optimizers.Adam(0.01))
        model.set_gradient_accumulation_options(1, replicated_optimizer_state_sharding=True)
        written = [CSVLogger(tmp_path / "log.csv"), ModelCheckpoint(tmp_path / "2.keras", save_freq=2)]
        written.append(strategies.keras.OnChief(LambdaCallback(on_train_batch_end=lambda batch, logs: None)))
        fit(model, callbacks=written if strategy.is_chief else [], epochs=1, steps_per_epoch=2)
        return bits_of(model)

    one, other = in_scopes(2, program)
    assert one == other
    assert bits_of(keras.models.load_model(tmp_path / "2.keras")) == one


@pytest.mark.parametrize("hook", ["on_epoch_begin", "on_epoch_end", "on_train_batch_begin", "on_train_batch_end"])
def test_equal_changes_by_callbacks_take_effect_on_all_instances(in_scopes, hook):
    def program(strategy):
        model = regression()

        def halve(self, place, logs=None):
            self.model.optimizer.learning_rate = 0.5 * float(self.model.optimizer.learning_rate)
            self.model.layers[0].set_weights([0.9 * weight for weight in self.model.layers[0].get_weights()])

        fit(model, callbacks=[hooked(hook, halve)], validation_data=(X, TARGETS))
        return bits_of(model)

    [alone] = in_scopes(1, program)
    assert in_scopes(2, program) == [alone] * 2


def test_batches_begin_with_the_rate_of_instance_0(in_scopes):
    def program(strategy):
        model = regression()
        for _ in range(3):
            if strategy.instance_index:
                set_rate(model, 0.5)
            model.train_on_batch(X[:8], TARGETS[:8])
        return bits_of(model)

    one, other = in_scopes(2, program)
    assert one == other == in_scopes(1, program)[0]


def test_all_instances_stop_if_the_first_hook_of_one_stops(in_scopes):
    def program(strategy):
        model = regression()

        def stop(epoch, logs):
            model.stop_training = strategy.instance_index == 1

        fit(model, callbacks=[LambdaCallback(on_epoch_begin=stop)])
        return values_of(model)[0].tolist(), int(model.optimizer.iterations.value)

    one, other = in_scopes(2, program)
    assert one == other
    assert one[1] == 1


def test_a_model_that_a_callback_compiles_is_refused(alone):
    def program(strategy):
        model = regression()
        fit(model, callbacks=[LambdaCallback(on_epoch_end=lambda epoch, logs: model.compile("sgd", "mse"))])

    with pytest.raises(StrategyError, match="a callback has compiled model .* after on_epoch_end"):
        alone(program)


@pytest.mark.parametrize("hook", ["on_epoch_begin", "on_epoch_end"])
def test_a_callback_that_freezes_a_layer_is_refused(alone, hook):
    """Keras would give the values of each layer to the next one, silently if these have the same shape."""

    def program(strategy):
        model = keras.Sequential([keras.Input((6,)), dense(6, 1), dense(6, 2), dense(1, 3)])
        model.compile("sgd", "mse")

        def freeze(epoch, logs):
            model.layers[0].trainable = False

        fit(model, callbacks=[LambdaCallback(**{hook: freeze})])

    with pytest.raises(StrategyError, match=f"changed trainable of layers, in fit .seen after {hook}"):
        alone(program)
