"""Patches of Keras for the whole process: one file contains them all, and documents them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import keras
import pytest
from small_models import TARGETS, X

import strategies.keras

ROOM = Path(strategies.keras.__file__).parent
OTHERS = [path for path in sorted(ROOM.glob("*.py")) if path.name != "patches.py"]


def imports_of(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the modules that a file imports, each with its local name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name if isinstance(node, ast.Import) else str(node.module) for alias in node.names]
            names = [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
            yield from zip(modules, names, strict=True)


def written_in(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield the targets of all assignments and deletions."""
    stored = (ast.Attribute, ast.Subscript)
    yield from (node for node in ast.walk(tree) if isinstance(node, stored) and not isinstance(node.ctx, ast.Load))


def reaches(target: ast.expr, of_keras: set[str]) -> bool:
    """Return whether the target is private, in the namespace of another object, or an attribute of Keras."""
    owner = ast.unparse(target.value)
    if isinstance(target, ast.Subscript):
        return owner.startswith("vars(") or owner.endswith("__dict__")
    is_private = target.attr.startswith("_") and target.attr != "__doc__"
    return (is_private and owner != "self") or owner.partition(".")[0] in of_keras


def inside_keras(source: str) -> Iterator[str]:
    """Yield the expressions of a file that only patches.py may contain."""
    tree = ast.parse(source)
    imported = list(imports_of(tree))
    yield from (module for module, _ in imported if module.startswith(("keras.src", "keras._")))
    of_keras = {name for module, name in imported if module.partition(".")[0] == "keras"}
    yield from (ast.unparse(target) for target in written_in(tree) if reaches(target, of_keras))
    own = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    calls = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    allowed = tuple(f"setattr({name}, " for name in own)
    yield from (call for call in calls if "setattr" in call.partition("(")[0] and not call.startswith(allowed))
    yield from (call for call in calls if "__setattr__" in call.partition("(")[0] or call.startswith("delattr"))


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.stem)
def test_only_one_file_uses_private_parts_of_keras(path: Path) -> None:
    assert list(inside_keras(path.read_text(encoding="utf-8"))) == [], "it belongs into strategies/keras/patches.py"


@pytest.mark.parametrize(
    "source",
    [
        "from keras.src.ops import node",
        "import keras.src.ops.node as node",
        "import keras\nkeras.Model.fit = None",
        "from keras import Model\nModel.fit = None",
        "setattr(model, 'fit', None)",
        "object.__setattr__(model, '__class__', None)",
        "model.__class__ = None",
        "variable._value = None",
        "one, model._lock = 1, 2",
        "vars(optimizer)['apply'] = None",
        "del optimizer.__dict__['apply']",
    ],
)
def test_uses_of_private_parts_are_found(source: str) -> None:
    assert list(inside_keras(source))


CHANGES = """
import sys, keras, numpy as np, strategies
from keras.src import api_export
from keras.src.saving import object_registration
import strategies.keras

def found():
    classes = {one for name, module in list(sys.modules.items()) if name.split(".")[0] == "keras"
               for one in vars(module).values() if isinstance(one, type) and one.__module__.startswith("keras.")}
    values = {(one.__module__, one.__qualname__, name): value for one in classes for name, value in vars(one).items()}
    registries = api_export.REGISTERED_OBJS_TO_NAMES, object_registration.GLOBAL_CUSTOM_NAMES
    return values, [dict(one) for one in registries]

before, registered = found()
with strategies.IPUStrategy(2).scope():
    with strategies.keras.PipelineStage(0):
        keras.layers.Dense(1)(keras.Input((2,)))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.ones((8, 2), np.float32), np.ones((8, 1), np.float32), verbose=0)
    model.evaluate(np.ones((8, 2), np.float32), np.ones((8, 1), np.float32), verbose=0)
after, registered_then = found()
assert registered == registered_then
assert type(model) is keras.Sequential
for key in sorted({*before, *after}):
    if before.get(key) is not after.get(key):
        print(*key[1:])
"""


def test_six_methods_of_keras_are_patched(in_new_process) -> None:
    """No registry is changed, and the class of no model."""
    functions = [f"Model make_{loop}_function" for loop in ("predict", "test", "train")]
    added = in_new_process(CHANGES, KERAS_BACKEND="jax").splitlines()
    assert added == ["Model __init__", *functions, "Node __init__", "SeedGenerator next"]


class Functional(keras.Model):
    """A functional model of the user's own class."""


def test_a_functional_model_of_a_class_of_the_users_is_trained(alone) -> None:
    def program(strategy):
        inputs = keras.Input((6,))
        model = Functional(inputs, keras.layers.Dense(1)(inputs))
        model.compile("sgd", "mse")
        losses = model.fit(X, TARGETS, epochs=2, verbose=0).history["loss"]
        return type(model) is Functional, losses[1] < losses[0]

    assert alone(program) == (True, True)
