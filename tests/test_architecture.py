"""The rooms of the packages, as docs/architecture.md shows them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import draw_rooms
import numpy as np
import optax
import pytest

import strategies

ROOT = Path(__file__).parents[1]
PACKAGES = [package for column in draw_rooms.COLUMNS for package in column]


@pytest.mark.parametrize("package", PACKAGES)
def test_rooms_import_only_from_those_below(package: str) -> None:
    """Rooms of which each needs the other have no order: the sorter raises CycleError, and names them."""
    levels = draw_rooms.levels_of(draw_rooms.rooms_of(package))
    assert draw_rooms.USED_BY_ALL in levels[-1]
    folders = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    assert {room for level in levels for room in level} == folders | {package, draw_rooms.USED_BY_ALL}


def test_the_picture_shows_the_rooms_that_there_are() -> None:
    assert draw_rooms.PICTURE.read_text(encoding="utf-8") == draw_rooms.draw(), "run python docs/draw_rooms.py"


def test_a_gradient_goes_through_the_files_that_are_named_in_their_order() -> None:
    """On one instance: what several do in `collectives/window/transport.py`, one does alone."""
    strategy = strategies.IPUStrategy(2)
    trainer = strategies.Trainer(strategy, lambda variables, batch, key: (variables * batch).mean(), optax.sgd(0.1))
    state, _ = trainer.step(trainer.init(np.ones(3, np.float32)), np.ones((4, 3), np.float32))  # compiled before
    batch = np.ones((4, 3), np.float32)
    entered: dict[str, None] = {}

    def note(frame, event, _):
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        if event == "call" and path.is_relative_to(ROOT):
            file = str(path.relative_to(ROOT))
            if draw_rooms.GRADIENT.get(file) == name:
                entered[file] = None

    sys.setprofile(note)
    try:
        trainer.step(state, batch)
    finally:
        sys.setprofile(None)
    expected = [file for file in draw_rooms.GRADIENT if file != "collectives/window/transport.py"]
    assert list(entered) == expected


def test_the_page_names_the_same_files() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert re.findall(r"^\d+\. `([^`]+)`", text, flags=re.MULTILINE) == list(draw_rooms.GRADIENT)
