"""`BackupAndRestore` under a strategy: weights, epoch and seeds stay consistent at whatever moment a process dies."""

import logging
import shutil
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from small_models import TARGETS, X, bits_of

from strategies.errors import StrategyError
from strategies.keras.checkpointing import with_whole_backups

EPOCHS = 4
WRITES = {"_hl", Path(shutil.__file__).parent.name, "checkpoints", "keras"}


def compiled(*hidden):
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), *hidden, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    return model


def model_with_seeds():
    return compiled(keras.layers.Dropout(0.3, seed=1))


def fit(folder, *callbacks):
    model, backup = model_with_seeds(), keras.callbacks.BackupAndRestore(folder)
    history = model.fit(
        X, TARGETS, batch_size=4, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[backup, *callbacks]
    )
    return bits_of(model), history.epoch


class Copies(keras.callbacks.Callback):
    """A callback that copies the folder of backups and keeps the bits at the end of each epoch."""

    def __init__(self, folder, copies):
        super().__init__()
        self.folder, self.copies, self.bits = folder, copies, {0: None}

    def on_train_begin(self, logs=None):
        self.bits[0] = bits_of(self.model)

    def on_epoch_end(self, epoch, logs=None):
        shutil.copytree(self.folder, self.copies / str(epoch + 1))
        self.bits[epoch + 1] = bits_of(self.model)


@pytest.fixture
def trained(alone, tmp_path):
    """Provide the bits at the end, the bits of each epoch, and the folder with a copy of the backups per epoch."""

    def program(strategy):
        copies = Copies(tmp_path / "backups", tmp_path / "copies")
        return fit(tmp_path / "backups", copies)[0], copies.bits, copies.copies

    return alone(program)


def restored(folder, model):
    """Return the epoch and the bits with which a training begins."""
    backup = with_whole_backups(keras.callbacks.BackupAndRestore(folder))
    model.optimizer.build(model.trainable_variables)
    for variable in [*model.variables, *model.optimizer.variables]:
        variable.assign(np.zeros(variable.shape))
    model._initial_epoch = 0
    backup.set_model(model)
    backup.on_train_begin()
    return model._initial_epoch, bits_of(model)


def snapshots_of(call, folder, into):
    """Copy a folder in each state during a call, as a process killed then would leave it."""
    seen, copies = set(), []

    def look(frame, event, argument):
        if event != "c_return" or Path(frame.f_code.co_filename).parent.name not in WRITES:
            return
        sys.setprofile(None)
        state = tuple(sorted((str(path), path.stat().st_size) for path in folder.rglob("*")))
        if state not in seen:
            seen.add(state)
            copies.append(into / str(len(copies)))
            shutil.copytree(folder, copies[-1])
        sys.setprofile(look)

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return copies


def test_backups_are_whole_at_every_moment_of_writing(alone, trained, tmp_path):
    _, bits, copies = trained
    folder = copies / "2"
    assert restored(folder, model_with_seeds()) == (2, bits[2])

    def program(strategy):
        model, backup = model_with_seeds(), with_whole_backups(keras.callbacks.BackupAndRestore(folder))
        backup.set_model(model)
        backup.on_train_begin()
        model.optimizer.learning_rate = 0.5
        backup._current_epoch = 3
        taken = snapshots_of(backup._save_model, folder, tmp_path / "taken")
        return taken, {(2, bits[2]), (3, bits_of(model))}

    taken, known = alone(program)
    model = model_with_seeds()
    found = [restored(copy, model) for copy in taken]
    assert len(found) > 10
    assert set(found) == known


@pytest.mark.parametrize("instances", [1, 2])
def test_a_training_killed_in_an_epoch_ends_with_the_bits_of_an_unbroken_one(in_scopes, trained, tmp_path, instances):
    whole, _, copies = trained
    shutil.copytree(copies / "3", tmp_path / "0")

    def program(strategy):
        return fit(tmp_path / str(strategy.instance_index))

    assert in_scopes(instances, program) == [(whole, [3])] * instances


def test_callbacks_continue_everywhere_from_the_state_that_the_chief_restored(in_scopes, tmp_path):
    def program(strategy, copies):
        rates = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
        own = tmp_path / str(strategy.instance_index)  # only the chief has files
        return fit(own, rates, *copies)

    copies = Copies(tmp_path / "0", tmp_path / "copies")
    [(whole, _)] = in_scopes(1, lambda strategy: program(strategy, [copies]))
    shutil.copytree(copies.copies / "2", tmp_path / "0")
    assert in_scopes(2, lambda strategy: program(strategy, [])) == [(whole, [2, 3])] * 2


@pytest.mark.parametrize("name", ["latest.weights.h5", "training.json", "SHA256SUMS"])
def test_the_backup_before_replaces_a_damaged_newest_one(alone, trained, caplog, name):
    whole, _, copies = trained
    damaged = copies / "3" / "backup_00000003"
    text = (damaged / name).read_bytes()
    (damaged / name).write_bytes(text[: len(text) // 2])
    with caplog.at_level(logging.WARNING, "strategies.keras"):
        assert alone(lambda strategy: fit(copies / "3")) == (whole, [2, 3])
    assert "backup_00000003 is damaged" in caplog.text


def test_training_begins_anew_if_no_backup_is_whole(alone, trained, caplog):
    whole, _, copies = trained
    for file in copies.glob("3/*/training.json"):
        file.write_text("{}")
    assert alone(lambda strategy: fit(copies / "3")) == (whole, [0, 1, 2, 3])
    assert "no backup in" in caplog.text


def test_two_backups_are_kept_until_the_training_ends(trained, tmp_path):
    copies = trained[-1]
    assert sorted(path.name for path in (copies / "4").iterdir()) == ["backup_00000003", "backup_00000004"]
    assert not (tmp_path / "backups").exists()


def test_backups_of_stock_keras_and_of_another_model_are_refused(trained, tmp_path):
    copies = trained[-1]
    (tmp_path / "keras").mkdir()
    (tmp_path / "keras/latest.weights.h5").write_bytes(b"")
    with pytest.raises(StrategyError, match="that Keras wrote outside of a strategy"):
        restored(tmp_path / "keras", model_with_seeds())
    model = compiled(keras.layers.Lambda(abs))
    backup = with_whole_backups(keras.callbacks.BackupAndRestore(copies / "2"))
    backup.set_model(model)
    with pytest.raises(StrategyError, match="by a model with 1 seed generators"):
        backup.on_train_begin()
    backup.backup_dir = "gs://bucket/folder"
    with pytest.raises(StrategyError, match="use a local folder"):
        with_whole_backups(backup)


def test_a_backup_inside_an_epoch_warns_that_the_epoch_is_repeated(caplog, tmp_path):
    with_whole_backups(keras.callbacks.BackupAndRestore(tmp_path, save_freq=3))
    assert "strategies.keras.Checkpoints(every=3) resumes after the step" in caplog.text
