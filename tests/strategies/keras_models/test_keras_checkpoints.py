"""Checkpoints of a strategy under `fit`: resumed on other numbers of instances, the bits of an unbroken training."""

import keras
import pytest
from keras import layers
from small_models import TARGETS, Reordered, X, bits_of, dense, regression
from tiers import first_of

import strategies

SETTINGS = {"batch_size": 4, "epochs": 3, "verbose": 0}  # 4 replicas, 52 rows: four steps an epoch
pytest.importorskip("orbax.checkpoint")


def with_dropout(mixed=False):
    """Make a model with random states, moving statistics, a metric, and a learning rate that a callback changes."""
    model = keras.Sequential(
        [keras.Input((6,)), dense(4, 1), layers.BatchNormalization(), layers.Dropout(0.3, seed=3), dense(1, 2)]
    )
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0) if mixed else optimizer
    model.compile(optimizer, "mse", metrics=["mae"], steps_per_execution=3)
    return model


class Interrupts(keras.callbacks.Callback):
    """A callback that ends a training after an execution inside the second epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.epoch == 1:
            raise InterruptedError


def fitted(model, *callbacks):
    """Return the bits of the model after a training, and its metrics."""
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
    history = model.fit(X, TARGETS, **SETTINGS, callbacks=[schedule, *callbacks])
    return bits_of(model), history.history


@pytest.mark.parametrize("mixed", first_of([False, True]), ids=["", "loss scaling"])
def test_a_training_resumed_on_other_instances_has_the_bits_of_one_that_never_stopped(in_scopes, tmp_path, mixed):
    def whole(strategy):
        return fitted(with_dropout(mixed), strategies.keras.Checkpoints(tmp_path / "whole", every=100))

    def interrupted(strategy):
        saved = strategies.keras.Checkpoints(tmp_path / "folder", every=6)
        with pytest.raises(InterruptedError):
            fitted(with_dropout(mixed), saved, Interrupts())

    def resumed(strategy):
        again = fitted(with_dropout(mixed), strategies.keras.Checkpoints(tmp_path / "folder", every=6))
        done = fitted(with_dropout(mixed), strategies.keras.Checkpoints(tmp_path / "folder", every=6))
        return again, done[0]

    [(bits, history)] = in_scopes(1, whole)
    in_scopes(1, interrupted)
    for (found, told), done in in_scopes(2, resumed):
        assert found == done == bits
        assert told == {name: values[1:] for name, values in history.items()}


def shuffled_loader():
    torch = pytest.importorskip("torch")
    rows = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(TARGETS))
    return torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("make", [Reordered, shuffled_loader])
def test_data_whose_order_changes_with_each_epoch_go_on_with_the_order_of_the_resumed_epoch(in_scopes, tmp_path, make):
    def trained(folder, epochs):
        model = regression()
        saved = strategies.keras.Checkpoints(tmp_path / folder)
        model.fit(make(), epochs=epochs, verbose=0, shuffle=False, callbacks=[saved])
        return bits_of(model)

    [bits] = in_scopes(1, lambda strategy: trained("whole", 3))
    in_scopes(1, lambda strategy: trained("folder", 2))
    assert in_scopes(2, lambda strategy: trained("folder", 3)) == [bits] * 2


def test_a_later_training_begins_with_its_own_first_epoch(alone, tmp_path):
    """Although the one before it was resumed at its end."""

    def program(strategy):
        model, epochs = with_dropout(), []
        fitted(model, strategies.keras.Checkpoints(tmp_path / "first", every=6))
        counts = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: epochs.append(epoch))
        fitted(model, strategies.keras.Checkpoints(tmp_path / str(len(runs)), every=100), counts)
        return epochs, bits_of(model)

    runs = []
    for _ in range(2):
        runs.append(alone(program))
    assert runs == [([0, 1, 2], runs[0][1])] * 2


def test_the_position_in_an_epoch_needs_whole_epochs(alone, tmp_path):
    def program(strategy):
        with_dropout().fit(
            X, TARGETS, steps_per_epoch=2, callbacks=[strategies.keras.Checkpoints(tmp_path)], batch_size=4
        )

    with pytest.raises(ValueError, match="leave steps_per_epoch out"):
        alone(program)
