"""Examples of `keras_gallery`: equal bits on one, two and four instances, stock Keras's numbers, and files of models.

A training has twenty steps of 32 rows each, which four replicas share. If a model draws random numbers or takes
statistics of a batch, each replica does so by itself; then one replica is compared with stock Keras.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import pytest

keras = pytest.importorskip("keras", reason="pip install -e '.[keras]'")

from keras_gallery.models import GALLERY, ROWS, Example  # noqa: E402
from small_models import bits_of  # noqa: E402

import strategies  # noqa: E402

pytestmark = [
    pytest.mark.complete,
    pytest.mark.long,
    # NumPy 2 warns when Keras saves its variables.
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"),
]

REPLICAS, EPOCHS, BATCH = 4, 4, 32
STEPS = EPOCHS * ROWS // BATCH
CLOSE = 1e-5
SAVED = ("residual_net", "text_classification", "sequence_to_sequence", "siamese", "autoencoder", "tabular")
"""Statistics of batches, layers and a model of their own, recurrence, a shared tower, several inputs and outputs."""
_one_builds = threading.Lock()
"""Names and first weights follow from random states that all threads of a process share."""


@pytest.fixture(scope="module", params=GALLERY)
def example(request):
    return GALLERY[request.param]()


def made(example: Example) -> Any:
    """Return the compiled model of an example, always with the same weights."""
    with _one_builds:
        keras.utils.set_random_seed(0)
        model = example.build()
        model.compile(**example.compile())
        return model


def fitted(model: Any, example: Example, rows: int, epochs: int = EPOCHS, begin: int = 0) -> Any:
    """Return the history of a training in the order of the rows."""
    how = {"batch_size": rows, "epochs": epochs, "initial_epoch": begin, "shuffle": False, "verbose": 0}
    return model.fit(example.x, example.y, **how).history


def saved_bits(model: Any) -> str:
    """Return the bits of all variables except the states of seed generators, which files do not have."""
    others = [variable for variable in model.variables if "seed_generator" not in variable.path]
    return strategies.fingerprint([np.asarray(variable) for variable in [*others, *model.optimizer.variables]])


@dataclass(frozen=True)
class Trained:
    """The results of an instance after a training.

    Attributes:
        bits: The bits of all variables.
        history: The metrics that `fit` reported for each epoch.
        evaluated: The metrics of all rows.
        predicted: The predictions for all rows.
        model: The trained model, which is not compared.
    """

    bits: str
    history: Any
    evaluated: Any
    predicted: list[bytes]
    model: Any = field(compare=False)


def train(strategy: strategies.Strategy, example: Example) -> Trained:
    rows = BATCH // strategy.num_replicas_in_sync
    with strategy.scope():
        model = made(example)
        history = fitted(model, example, rows)
        evaluated = model.evaluate(example.x, example.y, batch_size=rows, verbose=0, return_dict=True)
        predicted = jax.tree.leaves(model.predict(example.x, batch_size=rows, verbose=0))
    return Trained(bits_of(model), history, evaluated, [leaf.tobytes() for leaf in predicted], model)


@pytest.fixture(scope="module")
def alone(example: Example) -> Trained:
    """Provide the results of one instance that drives all replicas."""
    return train(strategies.IPUStrategy(REPLICAS), example)


def assert_evaluated_alike(strategy: strategies.Strategy, model: Any, stock: Any, example: Example) -> None:
    """Assert that every row counts once, with a short last batch."""
    x, y = jax.tree.map(lambda rows: rows[: ROWS - 11], (example.x, example.y))
    with strategy.scope():
        found = model.evaluate(x, y, batch_size=BATCH // REPLICAS, verbose=0, return_dict=True)
    expected = stock.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
    assert found == pytest.approx(expected, rel=CLOSE, abs=CLOSE)


def test_the_bits_are_the_same_on_one_two_and_four_instances(
    example: Example, alone: Trained, request: pytest.FixtureRequest, on_instances: Callable[..., list[Any]]
) -> None:
    """Cases take turns on two and four instances."""
    instances = 2 + 2 * (list(GALLERY).index(request.node.callspec.params["example"]) % 2)
    assert on_instances(instances, REPLICAS, lambda strategy: train(strategy, example)) == [alone] * instances


def test_the_numbers_match_stock_keras(example: Example, alone: Trained) -> None:
    stock = made(example)
    expected = fitted(stock, example, BATCH)
    if example.is_alike_in_parts:
        model, found = alone.model, alone.history
    else:
        with strategies.IPUStrategy(1).scope():
            model = made(example)
            found = fitted(model, example, BATCH)
    assert int(model.optimizer.iterations) == STEPS
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=CLOSE, atol=CLOSE, err_msg=name)
    for ours, theirs in zip(model.variables, stock.variables, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=CLOSE, atol=CLOSE, err_msg=theirs.path)


@pytest.mark.parametrize("example", SAVED, indirect=True)
def test_a_model_saved_and_loaded_by_stock_keras_continues_in_a_scope(example: Example, tmp_path: Any) -> None:
    """A seed generator restarts in a loaded model, also in stock Keras."""
    file, rows = tmp_path / "model.keras", BATCH // REPLICAS
    strategy = strategies.IPUStrategy(REPLICAS)
    with strategy.scope():
        model = made(example)
        fitted(model, example, rows, EPOCHS // 2)
        model.save(file)
        again = keras.models.load_model(file)
    stock = keras.models.load_model(file)
    assert type(stock) is type(example.build())
    for loaded in (again, stock):
        assert saved_bits(loaded) == saved_bits(model)
    if not example.draws:
        assert_evaluated_alike(strategy, model, stock, example)
        with strategy.scope():
            for one in (model, again):
                fitted(one, example, rows, EPOCHS, begin=EPOCHS // 2)
        assert saved_bits(again) == saved_bits(model)
