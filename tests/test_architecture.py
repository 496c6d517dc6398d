"""The rooms of the packages, compared with architecture.md."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import draw_rooms
import numpy as np
import optax
import pytest
from pages import page_text

import strategies

ROOT = Path(__file__).parents[1]
PACKAGES = [package for column in draw_rooms.COLUMNS for package in column]


def file_of(frame: FrameType) -> str:
    """Return the file of the project that a frame belongs to, or "" if there is none."""
    path = Path(frame.f_code.co_filename)
    is_ours = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES
    return str(path.relative_to(ROOT)) if is_ours else ""


def files_to(frame: FrameType | None) -> tuple[str, ...]:
    """Return the files of the project that are entered on the way to a frame, in order."""
    files: list[str] = []
    while frame is not None:
        if (file := file_of(frame)) and files[-1:] != [file]:
            files.append(file)
        frame = frame.f_back
    return tuple(reversed(files))


@pytest.mark.parametrize("package", PACKAGES)
def test_rooms_import_only_from_rooms_below(package: str) -> None:
    """The sorter raises CycleError for rooms that need each other, and names them."""
    levels = draw_rooms.levels_of(draw_rooms.rooms_of(package))
    assert draw_rooms.USED_BY_ALL in levels[-1]
    folders = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")} - {"examples"}
    assert {room for level in levels for room in level} == folders | {package, draw_rooms.USED_BY_ALL}


def test_the_picture_shows_the_existing_rooms() -> None:
    assert draw_rooms.PICTURE.read_text(encoding="utf-8") == draw_rooms.draw(), "run python docs/draw_rooms.py"


def jax_step():
    """Return a function that makes a step of two replicas on JAX, after a first step."""
    strategy = strategies.IPUStrategy(2)
    trainer = strategies.Trainer(strategy, lambda variables, batch, key: (variables * batch).mean(), optax.sgd(0.1))
    batch = np.ones((4, 3), np.float32)
    state, _ = trainer.step(trainer.init(np.ones(3, np.float32)), batch)
    return lambda: trainer.step(state, batch)


def torch_step():
    """Return a function that makes a step of two replicas on PyTorch, after a first step."""
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    trainer = pytest.importorskip("strategies.torch").Trainer(
        strategies.IPUStrategy(2), module, lambda own, x: own(x).mean(), optimizer
    )
    batch = np.ones((4, 3), np.float32)
    trainer.step(batch)
    return lambda: trainer.step(batch)


WAYS = {"JAX": (jax_step, draw_rooms.GRADIENT), "PyTorch": (torch_step, draw_rooms.TORCH_GRADIENT)}


@pytest.mark.parametrize("framework", WAYS)
def test_a_gradient_passes_through_the_documented_files_in_order(framework: str) -> None:
    """One instance does alone what several do in `collectives/shared_memory/transport.py`.

    No other file is entered between these files, and none is entered twice.
    """
    prepare, way = WAYS[framework]
    make_step = prepare()
    entered: dict[str, None] = {}
    between: set[tuple[str, ...]] = set()

    def note(frame, event, _):
        if event == "call" and way.get(file_of(frame)) == frame.f_code.co_name:
            entered[file_of(frame)] = None
            between.add(files_to(frame))

    sys.setprofile(note)
    try:
        make_step()
    finally:
        sys.setprofile(None)
    expected = [file for file in way if file != "collectives/shared_memory/transport.py"]
    assert list(entered) == expected
    for files in between:
        assert files == tuple(sorted(set(files), key=expected.index)), "a file is entered twice, or not in order"


def test_the_architecture_page_names_the_same_files() -> None:
    text = page_text("architecture.md")
    named = re.findall(r"^\d+\. `([^`]+)`", text, flags=re.MULTILINE)
    assert named == [*draw_rooms.GRADIENT, *draw_rooms.TORCH_GRADIENT]
