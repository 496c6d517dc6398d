"""The programs of from_keras.md, run by stock Keras and in the scope of a strategy."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from pages import page_programs, page_text

BEFORE, AFTER = page_programs("from_keras.md")
[CLOSE] = map(float, re.findall(r"each weight differs by less\s+than (1e-\d+)", page_text("from_keras.md")))


def weights_of(program: str, **names: Any) -> np.ndarray:
    """Run a program, and return the weights of its model as one array."""
    exec(program, names)
    return np.concatenate([weight.ravel() for weight in names["model"].get_weights()])


def after(replicas: int) -> str:
    """Return the program after the migration, with all replicas in this process."""
    changed = AFTER.replace("strategies.PopDistStrategy()", f"strategies.LocalStrategy({replicas})")
    assert changed != AFTER
    return changed


@pytest.fixture(scope="module")
def before() -> np.ndarray:
    """Provide the weights that stock Keras trains without a shuffle."""
    return weights_of(in_order(BEFORE))


def in_order(program: str) -> str:
    assert "shuffle=True" in program
    return program.replace("shuffle=True", "shuffle=False")


@pytest.mark.parametrize("replicas", [1, 2])
def test_weights_are_those_of_stock_keras_up_to_rounding_without_a_shuffle(before: np.ndarray, replicas: int) -> None:
    now = weights_of(in_order(after(replicas)))
    assert np.abs(now - before).max() < CLOSE


def test_rows_come_in_another_order_than_in_stock_keras_with_a_shuffle(before: np.ndarray) -> None:
    stock, ours = weights_of(BEFORE), weights_of(after(1))
    assert min(np.abs(one - other).max() for one, other in [(stock, before), (ours, before), (stock, ours)]) > 1e-3
