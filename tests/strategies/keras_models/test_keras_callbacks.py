"""Callbacks: one instance writes files, and a decision of one instance reaches all."""

import csv
import threading
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import keras
import pytest
from keras.src.callbacks import CallbackList
from small_models import TARGETS, X, bits_of, hooked, regression
from surviving_instances import run_instances
from tiers import first_of

import strategies
from strategies.errors import StrategyError


class Counts(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.calls = {"train": [], "test": [], "predict": []}

    def on_train_batch_end(self, batch, logs=None):
        self.calls["train"].append((batch, sorted(logs)))

    def on_test_batch_end(self, batch, logs=None):
        self.calls["test"].append((batch, sorted(logs)))

    def on_predict_batch_end(self, batch, logs=None):
        self.calls["predict"].append((batch, sorted(logs)))


@pytest.mark.parametrize("instances", first_of([2, 1]))
def test_callbacks_are_called_once_for_each_execution(in_scopes, instances):
    def program(strategy):
        model, counts = regression(metrics=["mae"], steps_per_execution=2), Counts()
        model.fit(X[:48], TARGETS[:48], batch_size=4, verbose=0, callbacks=[counts])
        model.evaluate(X, TARGETS, batch_size=4, verbose=0, callbacks=[counts])
        model.predict(X, batch_size=4, verbose=0, callbacks=[counts])
        return counts.calls

    for calls in in_scopes(instances, program):
        assert calls["train"] == [(1, ["loss", "mae"]), (3, ["loss", "mae"])]
        assert calls["test"] == [(1, ["loss", "mae"]), (3, ["loss", "mae"])]
        assert calls["predict"] == [(1, ["outputs"]), (3, ["outputs"])]


class Late(keras.callbacks.Callback):
    """A callback that gets its hook for batches after `fit` has begun, and notes the threads of Keras."""

    def __init__(self, is_late):
        super().__init__()
        self.is_late = is_late
        self.batches = []
        self.threads = set()

    def on_epoch_begin(self, epoch, logs=None):
        if self.is_late and epoch:
            self.on_train_batch_end = lambda batch, logs=None: self.batches.append((epoch, batch))

    def on_epoch_end(self, epoch, logs=None):
        self.threads |= {thread for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")}


def test_no_thread_is_woken_for_batches_that_no_callback_sees(alone):
    def program(strategy):
        before, late = set(threading.enumerate()), Late(is_late=False)
        history = regression(metrics=["mae"]).fit(X, TARGETS, batch_size=4, epochs=2, verbose=0, callbacks=[late])
        return late.threads - before, sorted(history.history), len(history.history["mae"])

    assert alone(program) == (set(), ["loss", "mae"], 2)


def test_a_hook_for_batches_that_comes_later_is_called(alone):
    def program(strategy):
        late = Late(is_late=True)
        regression().fit(X[:32], TARGETS[:32], batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=[late])
        return sorted(late.batches)

    assert alone(program) == [(1, 0), (1, 1)]


def test_steps_of_an_execution_change_no_bit(alone):
    def program(strategy):
        found = []
        for steps in (1, 2, 3):
            model = regression(steps_per_execution=steps)
            model.fit(X, TARGETS, batch_size=4, epochs=2, shuffle=False, verbose=0)
            found.append(bits_of(model))
        return found

    assert len(set(alone(program))) == 1


def test_files_are_written_once_by_the_chief(in_scopes, tmp_path):
    def program(strategy):
        model = regression()
        folder = tmp_path / str(strategy.instance_index)  # shows the writing instance
        folder.mkdir()
        best = keras.callbacks.ModelCheckpoint(folder / "best.keras", monitor="loss", save_best_only=True)
        written = [best, keras.callbacks.CSVLogger(folder / "log.csv")]
        model.fit(X, TARGETS, batch_size=4, epochs=2, verbose=0, callbacks=written)
        return best.best, bits_of(model)

    results = in_scopes(2, program)
    assert results[0] == results[1]
    assert sorted(path.name for path in (tmp_path / "0").iterdir()) == ["best.keras", "log.csv"]
    assert list((tmp_path / "1").iterdir()) == []
    with (tmp_path / "0/log.csv").open() as file:
        assert [float(row["loss"]) for row in csv.DictReader(file)][-1] == pytest.approx(results[0][0])


def test_tensorboard_writes_on_the_chief_if_tensorflow_is_installed(in_scopes, tmp_path):
    """Without TensorFlow, every instance raises before anything is trained."""

    def program(strategy):
        folder = tmp_path / str(strategy.instance_index)
        regression().fit(X, TARGETS, batch_size=4, verbose=0, callbacks=[keras.callbacks.TensorBoard(folder)])
        return folder.exists()

    if find_spec("tensorflow") is not None:
        assert in_scopes(2, program) == [True, False]
        return

    def refused(strategy):
        with pytest.raises(StrategyError, match="TensorFlow, which is not installed; .* poprun --metrics tensorboard"):
            program(strategy)
        return strategy.instance_index

    assert in_scopes(2, refused) == [0, 1]


def test_a_callback_list_whose_tensorboard_already_has_the_model_is_refused(in_scopes, tmp_path):
    """Keras writes at that point on every instance; a single instance is the chief and may write."""

    def program(strategy):
        model = regression()
        board = keras.callbacks.TensorBoard(tmp_path / "logs", write_graph=False)
        with pytest.raises(StrategyError) as refused:
            model.fit(X, TARGETS, batch_size=4, verbose=0, callbacks=CallbackList([board], model=model))
        return str(refused.value)

    for message in in_scopes(2, program):
        assert "TensorBoard that already knows the model and writes on every instance; give fit a plain" in message
    if find_spec("tensorflow") is None:
        assert "TensorFlow, which is not installed" in in_scopes(1, program)[0]


class WritesOfTheModel(keras.callbacks.CSVLogger):
    """A callback that writes in `set_model`, like `TensorBoard`."""

    def set_model(self, model):
        super().set_model(model)
        Path(self.filename + ".txt").write_text(model.name)


def test_callbacks_that_write_in_set_model_do_so_on_the_chief(in_scopes, tmp_path):
    def program(strategy):
        written = WritesOfTheModel(tmp_path / f"{strategy.instance_index}.csv")
        regression().fit(X, TARGETS, batch_size=4, verbose=0, callbacks=[written])

    in_scopes(2, program)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.csv", "0.csv.txt"]


def test_a_later_chief_repeats_begin_hooks_and_continues_the_file(tmp_path):
    """Epochs of the chief before stay in the file, and an ended evaluation is not replayed to the later chief."""
    calls = []

    class Later(strategies.keras.OnChief):
        is_called = False

    class Seen(keras.callbacks.CSVLogger):
        def on_test_begin(self, logs=None):
            calls.append("evaluation")

    file = tmp_path / "log.csv"
    first, second = keras.callbacks.CSVLogger(file), Seen(file)
    later = Later(second)
    model = regression()
    for each in (first, later):
        each.set_model(model)
        each.on_train_begin()
        each.on_epoch_end(0, {"loss": 2.0})
    later.on_test_begin()
    later.on_test_end()
    first.csv_file.close()
    assert second.csv_file is None
    later.is_called = True
    later.on_epoch_end(1, {"loss": 1.0})
    later.on_train_end()
    assert file.read_text().split() == ["epoch,loss,val_loss", "0,2.0,NA", "1,1.0,NA"]
    assert second.model is model
    assert calls == []


def test_the_next_chief_continues_the_file_of_one_lost_in_fit(tmp_path):
    """The chief is lost in the second of three epochs of three steps each."""
    opened = []

    def program(strategy, file):
        log = keras.callbacks.CSVLogger(file)
        opened.append(log)
        with strategy.scope():
            model = regression()
            model.fit(X[:48], TARGETS[:48], batch_size=8, epochs=3, verbose=0, shuffle=False, callbacks=[log])
            return bits_of(model)

    [whole] = run_instances(1, 2, partial(program, file=tmp_path / "whole.csv"))
    survived = run_instances(2, 2, partial(program, file=tmp_path / "survived.csv"), ["kill:instance=0,step=4"])
    for log in opened:  # the file of the lost instance is still open
        log.csv_file.close()
    assert survived == [None, whole]
    assert (tmp_path / "survived.csv").read_text() == (tmp_path / "whole.csv").read_text()
    assert len((tmp_path / "whole.csv").read_text().split()) == 4


@pytest.mark.complete
@pytest.mark.parametrize("hook", ["on_epoch_end", "on_train_batch_end"])
def test_fit_continues_after_a_callback_that_evaluates_and_predicts(in_scopes, hook):
    """Instances may have parts of the optimizer state."""

    def program(strategy, calls):
        model, found = regression(keras.optimizers.Adam(0.01)), []
        model.set_gradient_accumulation_options(1, replicated_optimizer_state_sharding=True)

        def look(self, number, logs=None):
            found.append(self.model.evaluate(X, TARGETS, batch_size=4, verbose=0))
            found.append(self.model.predict(X[:5], verbose=0).tolist())
            found.append(self.model.test_on_batch(X[:7], TARGETS[:7]))

        looks = [hooked(hook, look)] if calls else []
        data = {"validation_data": (X[:20], TARGETS[:20]), "batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
        history = model.fit(X, TARGETS, **data, callbacks=looks).history
        return found, history if hook == "on_epoch_end" else history["val_loss"], bits_of(model)

    [(found, *alone)] = in_scopes(1, partial(program, calls=True))
    assert in_scopes(2, partial(program, calls=True)) == [(found, *alone)] * 2
    assert in_scopes(2, partial(program, calls=False)) == [([], *alone)] * 2
    assert len(found) == {"on_epoch_end": 6, "on_train_batch_end": 24}[hook]


def test_a_callback_of_the_user_can_write_on_the_chief_alone(in_scopes):
    def program(strategy):
        seen = []
        told = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(epoch))
        regression().fit(X, TARGETS, batch_size=4, verbose=0, callbacks=[strategies.keras.OnChief(told)])
        return seen

    assert in_scopes(2, program) == [[0], []]


@pytest.mark.parametrize("hook", first_of(["on_epoch_end", "on_train_batch_end"]))
def test_all_instances_stop_if_one_stops(in_scopes, hook):
    """A callback that looks at the clock decides like this."""

    def program(strategy):
        model = regression()

        def stop(self, number, logs=None):
            self.model.stop_training = number == 1 and strategy.instance_index == 1

        model.fit(X, TARGETS, batch_size=4, epochs=5, shuffle=False, verbose=0, callbacks=[hooked(hook, stop)])
        return bits_of(model), int(model.optimizer.iterations.value)

    one, other = in_scopes(2, program)
    assert one == other
    assert one[1] == {"on_epoch_end": 8, "on_train_batch_end": 2}[hook]


@pytest.mark.parametrize(("instances", "shuffle"), [(1, True), (2, False)])
def test_a_backed_up_training_continues_on_all_instances(in_scopes, tmp_path, instances, shuffle):
    """Only the chief has the files. NumPy's generator, which threads share, seeds the orders."""

    def interrupt(self, epoch, logs=None):
        if epoch == 1:
            raise InterruptedError

    def program(strategy, interrupts):
        def seeded():
            keras.utils.set_random_seed(7)
            return regression(keras.optimizers.SGD(0.05, momentum=0.9))

        model = seeded()
        folder = tmp_path / f"{interrupts}-{strategy.instance_index}"
        backup = keras.callbacks.BackupAndRestore(folder)
        settings = {"batch_size": 4, "epochs": 4, "steps_per_epoch": 4, "shuffle": shuffle, "verbose": 0}
        try:
            model.fit(
                X, TARGETS, **settings, callbacks=[backup, *([hooked("on_epoch_end", interrupt)] if interrupts else [])]
            )
        except InterruptedError:
            model = seeded()
            history = model.fit(X, TARGETS, **settings, callbacks=[keras.callbacks.BackupAndRestore(folder)])
            assert len(history.history["loss"]) == 2
        return bits_of(model)

    [whole] = in_scopes(1, lambda strategy: program(strategy, interrupts=False))
    assert in_scopes(instances, lambda strategy: program(strategy, interrupts=True)) == [whole] * instances


def test_only_the_chief_shows_a_progress_bar(in_scopes, capfd):
    def program(strategy):
        return regression().fit(X, TARGETS, batch_size=4, verbose=2).history

    one, other = in_scopes(2, program)
    assert one == other
    assert capfd.readouterr().out.count("4/4") == 1


def test_weights_that_a_callback_saves_in_an_epoch_are_the_current_ones(alone, tmp_path):
    def program(strategy):
        model = regression()
        saved = tmp_path / "{batch}.weights.h5"
        callback = keras.callbacks.ModelCheckpoint(saved, save_weights_only=True, save_freq=2)
        model.fit(X, TARGETS, batch_size=4, shuffle=False, verbose=0, callbacks=[callback])
        model.load_weights(tmp_path / "4.weights.h5")
        loaded = bits_of(model)
        other = regression()
        other.fit(X, TARGETS, batch_size=4, shuffle=False, verbose=0)
        return loaded, bits_of(other)

    loaded, trained = alone(program)
    assert loaded == trained
