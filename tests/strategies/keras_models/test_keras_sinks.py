"""Metrics of `fit` and `evaluate` in sinks."""

import keras
import pytest
from kept_rows import KeptRows
from small_models import TARGETS, X, bits_of, regression

import strategies


@pytest.mark.parametrize("instances", [1, 2])
def test_sinks_get_every_step_epoch_and_evaluation(in_scopes, instances):
    kept = [KeptRows() for _ in range(instances)]

    def program(strategy):
        model = regression(metrics=["mae"])
        data = {"validation_data": (X[:16], TARGETS[:16]), "batch_size": 4, "verbose": 0, "epochs": 2}
        with strategies.metrics.open(kept[strategy.instance_index]):
            history = model.fit(X[:48], TARGETS[:48], **data).history
            found = model.evaluate(X, TARGETS, batch_size=4, verbose=0, return_dict=True)
        return history, found, bits_of(model)

    (history, found, _), *others = in_scopes(instances, program)
    rows, *empty = [[(row.step, row.values) for row in each.rows] for each in kept]
    assert not any(empty)
    steps = [row for row in rows if "loss" in row[1]]
    each = len(steps) // 2
    assert [step for step, _ in steps] == list(range(1, 2 * each + 1))
    epochs = [row for row in rows if any(name.startswith("epoch/") for name in row[1])]
    assert epochs == [
        (each * (number + 1), {f"epoch/{name}": values[number] for name, values in history.items()})
        for number in range(2)
    ]
    assert set(history) == {"loss", "mae", "val_loss", "val_mae"}
    assert rows[-1] == (2 * each, {f"evaluation/{name}": value for name, value in found.items()})
    assert len(rows) == len(steps) + 3


def test_sinks_change_no_bits(alone):
    def program(strategy):
        model = regression()
        model.fit(X, TARGETS, batch_size=4, epochs=2, shuffle=False, verbose=0)
        return bits_of(model)

    def observed(strategy):
        with strategies.metrics.open(KeptRows()):
            return program(strategy)

    assert alone(program) == alone(observed)


@pytest.mark.parametrize("instances", [1, 2])
def test_norms_have_the_names_of_keras_and_the_same_bits_for_every_number_of_instances(instances, in_scopes, alone):
    """The learning rate of a schedule is among the metrics, and one that a callback sets."""

    def program(strategy):
        kept, model = KeptRows(), regression()
        model.optimizer.learning_rate = 0.25
        halving = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2 if epoch else rate)
        with strategies.metrics.open(kept, norms_every=1, histograms_every=4):
            model.fit(X[:48], TARGETS[:48], batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=[halving])
        return [values for values in kept.values if "loss" in values], [each.path for each in model.trainable_variables]

    (rows, names), *others = in_scopes(instances, program)
    assert not any(of_other for of_other, _ in others)
    expected, _ = alone(program)
    assert rows == expected
    each = len(rows) // 2
    assert [row["learning_rate"] for row in rows] == [0.25] * each + [0.125] * each
    norms = {name for name in rows[0] if name.startswith("gradient_norm/")}
    assert norms == {f"gradient_norm/{name}" for name in names}


def test_sinks_get_the_rate_of_a_schedule_and_the_loss_without_the_factor_of_the_optimizer(alone):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, decay_steps=1, decay_rate=0.5)

    def program(strategy):
        kept, model = KeptRows(), regression()
        model.compile(optimizer=keras.optimizers.SGD(schedule, loss_scale_factor=64.0), loss="mse")
        with strategies.metrics.open(kept):
            [mean] = model.fit(X[:48], TARGETS[:48], batch_size=4, verbose=0).history["loss"]
        return mean, [(row["learning_rate"], row["loss"]) for row in kept.values if "loss" in row]

    mean, rows = alone(program)
    found, losses = zip(*rows, strict=True)
    assert sum(losses) / len(losses) == pytest.approx(mean, rel=1e-5)
    assert list(found) == [0.5**number for number in range(1, 1 + len(found))]
    assert len(found) > 1
