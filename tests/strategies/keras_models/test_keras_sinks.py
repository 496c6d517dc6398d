"""Metrics of `fit` and `evaluate` in sinks."""

import pytest
from small_models import TARGETS, X, bits_of, regression

import strategies
from strategies.sinks.sink import Sink


class Kept(Sink):
    """A sink that keeps its rows."""

    name = "kept:here"

    def __init__(self):
        self.rows = []

    def open(self, goes_on):
        pass

    def write(self, rows):
        self.rows += [(row.step, dict(row.values)) for row in rows]

    def close(self):
        pass


@pytest.mark.parametrize("instances", [1, 2])
def test_sinks_get_every_step_epoch_and_evaluation(in_scopes, instances):
    kept = [Kept() for _ in range(instances)]

    def program(strategy):
        model = regression(metrics=["mae"])
        data = {"validation_data": (X[:16], TARGETS[:16]), "batch_size": 4, "verbose": 0, "epochs": 2}
        with strategies.metrics.open(kept[strategy.instance_index]):
            history = model.fit(X[:48], TARGETS[:48], **data).history
            found = model.evaluate(X, TARGETS, batch_size=4, verbose=0, return_dict=True)
        return history, found, bits_of(model)

    (history, found, _), *others = in_scopes(instances, program)
    rows, *empty = [each.rows for each in kept]
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
        with strategies.metrics.open(Kept()):
            return program(strategy)

    assert alone(program) == alone(observed)
