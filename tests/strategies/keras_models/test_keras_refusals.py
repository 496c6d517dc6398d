"""Refusals of models on replicas, with one sentence that names the way out."""

import sys
import threading
import types

import keras
import pytest
from small_models import TARGETS, X, regression

import strategies
from strategies.errors import DisagreementError, StrategyError
from strategies.keras import hook


def test_a_model_is_used_in_the_scope_that_made_it(alone):
    outside = regression()
    with strategies.IPUStrategy(2).scope():
        for use in (outside.fit, outside.evaluate):
            with pytest.raises(StrategyError, match=r"made outside of strategy\.scope\(\) and is used inside"):
                use(X, TARGETS, verbose=0)
        with pytest.raises(StrategyError, match="made outside"):
            outside.predict(X, verbose=0)
        inside = regression()
    for use in ("fit", "evaluate", "predict", "train_on_batch"):
        with pytest.raises(StrategyError, match=rf"inside the scope of a LocalStrategy, but {use} is called outside"):
            getattr(inside, use)(X)
    with strategies.IPUStrategy(2).scope(), pytest.raises(StrategyError, match="outside of it"):
        inside.fit(X, TARGETS)
    outside.fit(X, TARGETS, verbose=0)


LATE = """
import contextvars, importlib.util, sys, threading, strategies

def refusal(name):
    try:
        __import__(name)
    except ImportError as error:
        return str(error)

def in_thread(name):
    thread = threading.Thread(target=lambda: told.append(refusal(name)))
    thread.start()
    thread.join()

told = []
with strategies.IPUStrategy().scope():
    assert importlib.util.find_spec("keras") is not None
    told += [refusal(name) for name in ("keras", "keras.layers", "strategies.keras")]
    with strategies.IPUStrategy().scope():
        pass
    in_thread("keras")
    copied = contextvars.copy_context()
told.append(copied.run(refusal, "keras"))
assert "keras" not in sys.modules
print(set(told))
import keras
outside = keras.Sequential()
with strategies.IPUStrategy().scope():
    print(hasattr(keras.Sequential(), "set_infeed_queue_options"), hasattr(outside, "set_infeed_queue_options"))
"""


def test_the_first_import_of_keras_inside_of_a_scope_is_refused(in_new_process):
    """All threads are covered: each instance would train models alone. After the scope the import works."""
    refused, known = in_new_process(LATE, KERAS_BACKEND="jax").splitlines()
    assert "keras is imported for the first time inside strategy.scope()" in refused
    assert refused.count("import keras before you enter the scope") == 1
    assert known == "True False"


ABSENT = """
import contextlib, importlib.util, sys, strategies

scope = strategies.IPUStrategy().scope()
sys.path[:] = [folder for folder in sys.path if not importlib.machinery.PathFinder.find_spec("keras", [folder])]
with scope:
    print(importlib.util.find_spec("keras"))
    try:
        import keras
    except ModuleNotFoundError as error:
        print(error)
"""


def test_missing_keras_raises_the_same_error_in_a_scope_as_elsewhere(tmp_path, in_new_process):
    """Everything but Keras is loaded before its folder is hidden."""
    assert in_new_process(ABSENT).splitlines() == ["None", "No module named 'keras'"]


def test_a_model_made_outside_the_scope_of_another_thread_is_a_warning(alone, caplog):
    with strategies.IPUStrategy(2).scope():
        thread = threading.Thread(target=regression)
        thread.start()
        thread.join()
    said = {each for each in caplog.messages if "a thread without an open scope" in each}
    assert len(said) == 1  # a Sequential makes a Functional


def test_keras_that_is_imported_a_second_time_is_refused(alone, monkeypatch):
    monkeypatch.setitem(sys.modules, "keras", types.ModuleType("keras"))
    with pytest.raises(StrategyError, match="imported a second time"), strategies.IPUStrategy(2).scope():
        pass


class OwnStep(keras.Sequential):
    def test_step(self, state, data):
        return super().test_step(state, data)


class OwnFunction(keras.Sequential):
    def make_predict_function(self, force=False):
        return super().make_predict_function(force)


class OwnFit(keras.Sequential):
    def fit(self, data):
        return super().fit(data)

    def predict(self, data):
        return super().predict(data)


def own(kind):
    model = kind([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def own_attribute(name):
    model = regression()
    setattr(model, name, lambda *arguments, **named: pytest.fail(f"{name} was called"))
    return model


def recurrent(wrap=lambda layer: layer):
    layers = [keras.Input(batch_shape=(4, 3, 2)), wrap(keras.layers.SimpleRNN(1, stateful=True))]
    keras.Sequential(layers).predict(X.reshape(-1, 3, 2), verbose=0)


OF_ROWS = "is stateful and keeps a state for each row .* stateful=False"
REFUSED = {
    "an own test_step": (lambda: own(OwnStep).evaluate(X), "overrides test_step.*override compute_loss"),
    "an own test_step, in fit": (
        lambda: own(OwnStep).fit(X, validation_data=X),
        "overrides test_step.*override compute_loss",
    ),
    "an own test_step, in a part of fit": (
        lambda: own(OwnStep).fit(X, validation_split=0.5),
        "overrides test_step.*override compute_loss",
    ),
    "a train_step of one model": (
        lambda: own_attribute("train_step").fit(X),
        "model '.*' overrides train_step.*give a class of models its own",
    ),
    "a test_step of one model": (lambda: own_attribute("test_step").evaluate(X), "model '.*' overrides test_step"),
    "an own fit": (lambda: own(OwnFit).fit(X), "OwnFit overrides fit, .*give the method another name"),
    "an own predict": (lambda: own(OwnFit).predict(X), "OwnFit overrides predict, .*give the method another name"),
    "an own function, in fit": (lambda: own(OwnFunction).fit(X), "overrides make_predict_fun.*override compute_loss"),
    "an own function, in predict": (lambda: own(OwnFunction).predict(X), "overrides make.*override compute_loss"),
    "eagerly": (lambda: regression(run_eagerly=True).fit(X, TARGETS), "run_eagerly is True"),
    "states of rows": (recurrent, OF_ROWS),
    "states of rows in both directions": (lambda: recurrent(keras.layers.Bidirectional), OF_ROWS),
}


@pytest.mark.parametrize("name", REFUSED)
def test_features_without_a_meaning_for_replicas_are_refused(alone, name):
    use, message = REFUSED[name]
    with pytest.raises((RuntimeError, StrategyError), match=message):
        alone(lambda strategy: use())


def test_a_model_with_its_own_test_step_can_predict(alone):
    assert alone(lambda strategy: own(OwnStep).predict(X, verbose=0).shape) == (len(X), 1)


def test_a_distribution_of_keras_is_refused_beside_the_strategy(alone):
    def program(strategy):
        model = regression()
        with keras.distribution.DataParallel(devices=keras.distribution.list_devices()[:2]).scope():
            for use in (model.fit, model.evaluate, model.predict):
                with pytest.raises(StrategyError, match=r"a DataParallel, .*; call keras\.distribution\.set_dist"):
                    use(X, verbose=0)
        return model.predict(X, verbose=0).shape

    assert alone(program) == (len(X), 1)


def test_models_that_were_not_compiled_or_without_an_optimizer_are_refused(alone):
    def program(strategy):
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        with pytest.raises(ValueError, match=r"call `compile\(\)` before"):
            model.fit(X, TARGETS)
        model.compile(None, "mse")
        with pytest.raises(ValueError, match="optimizer=None"):
            model.fit(X, TARGETS, verbose=0)
        return model.evaluate(X, TARGETS, verbose=0) > 0

    assert alone(program)


def test_instances_that_see_different_data_are_refused(in_scopes):
    def program(strategy):
        regression().fit(X + strategy.instance_index, TARGETS, verbose=0)

    with pytest.raises(DisagreementError, match="different rows or weights of rows"):
        in_scopes(2, program)


def test_other_versions_and_backends_are_refused(monkeypatch):
    monkeypatch.setattr(keras, "__version__", "3.99.0")
    with pytest.raises(StrategyError, match=r"this is Keras 3\.99\.0, .* tried with 3\.15"):
        hook.check_keras_version()
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    with pytest.raises(StrategyError, match="Keras runs on torch.*KERAS_BACKEND=jax"):
        hook.check_keras_version()


@pytest.mark.complete
def test_layers_frozen_after_compile_need_another_compile_before_training(alone):
    """Evaluation and prediction need no compile, also with random states among the variables."""

    def program(strategy):
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse")
        model.fit(X, TARGETS, batch_size=4, verbose=0)
        before = model.evaluate(X, TARGETS, verbose=0), model.predict(X, verbose=0).tolist()
        model.layers[0].trainable = False
        for use in (model.fit, model.train_on_batch):
            with pytest.raises(ValueError, match="built for 4 variables, .* now has others to train, 2; call compile"):
                use(X, TARGETS)
        after = model.evaluate(X, TARGETS, verbose=0), model.predict(X, verbose=0).tolist()
        kernel = model.layers[0].get_weights()
        model.compile("sgd", "mse")
        model.fit(X, TARGETS, batch_size=4, verbose=0)
        return (
            before,
            after,
            [(one == other).all() for one, other in zip(kernel, model.layers[0].get_weights(), strict=True)],
        )

    before, after, is_same = alone(program)
    assert before == after
    assert all(is_same)
