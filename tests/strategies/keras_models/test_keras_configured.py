"""Models of Keras on the replicas of an `IPUConfig`: the original's quick start, plain and in stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras", reason="pip install -e '.[keras]'")

import strategies  # noqa: E402

X = np.random.default_rng(0).standard_normal((64, 6)).astype(np.float32)


@pytest.fixture
def four_ipus() -> Iterator[None]:
    config = strategies.config.IPUConfig()
    config.auto_select_ipus = 4
    config.configure_ipu_system()
    yield
    strategies.config.reset_ipu_configuration()


def fitted(strategy: strategies.Strategy, stages: list[int] | None) -> Any:
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(2)])
        model.compile("adam", "mse", steps_per_execution=8)
        if stages is not None:
            model.set_pipeline_stage_assignment(stages)
            model.set_pipelining_options(4, gradient_accumulation_reduction_method="mean")
        model.fit(X, X[:, :2], batch_size=4, epochs=2, shuffle=False, verbose=0)
    return [np.asarray(variable) for variable in model.variables], int(model.optimizer.iterations)


@pytest.mark.complete
@pytest.mark.usefixtures("four_ipus")
@pytest.mark.parametrize(("stages", "named", "updates"), [(None, (4, 1), 8), ([0, 1], (2, 2), 4)], ids=str)
def test_replicas_are_ipus_by_the_stages_of_the_model(
    stages: list[int] | None, named: tuple[int, int], updates: int
) -> None:
    found, made = fitted(strategies.IPUStrategy(), stages)
    expected, _ = fitted(strategies.IPUStrategy(*named), stages)
    assert made == updates
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
