"""Types of public signatures, which must not be a bare `Any`."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

OURS = ("collectives", "popdist", "strategies")
OF_EVERY_CLASS = {"__init__", "__call__", "__iter__", "__next__", "__getitem__"}


def public_values(package: str) -> Iterator[tuple[str, Any]]:
    """Yield the exported values of a package, and the functions of exported modules."""
    module = importlib.import_module(package)
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            for each, function in inspect.getmembers(value, inspect.isfunction):
                if function.__module__ == value.__name__ and not each.startswith("_"):
                    yield f"{name}.{each}", function
        else:
            yield name, value


def signatures(value: Any) -> Iterator[tuple[str, ast.expr]]:
    """Yield each type in the public signatures of a function, or a class with its bases, with its owner's name."""
    for part in inspect.getmro(value) if inspect.isclass(value) else [value]:
        if (inspect.isclass(part) or inspect.isfunction(part)) and part.__module__.split(".")[0] in OURS:
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
            yield from types_of(definition)


def types_of(definition: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(definition, ast.FunctionDef):
        of_arguments = definition.args
        extra = [one for one in (of_arguments.vararg, of_arguments.kwarg) if one is not None]
        for argument in (*of_arguments.posonlyargs, *of_arguments.args, *of_arguments.kwonlyargs, *extra):
            if argument.annotation is not None:
                yield f"{definition.name}({argument.arg})", argument.annotation
        if definition.returns is not None:
            yield f"{definition.name}()", definition.returns
    if isinstance(definition, ast.ClassDef):
        for inner in definition.body:
            if isinstance(inner, ast.FunctionDef) and (not inner.name.startswith("_") or inner.name in OF_EVERY_CLASS):
                yield from types_of(inner)
            elif isinstance(inner, ast.AnnAssign) and not (name := ast.unparse(inner.target)).startswith("_"):
                yield name, inner.annotation


@pytest.mark.parametrize("package", OURS)
def test_no_public_signature_contains_any(package: str) -> None:
    found = {
        f"{name}: {where}: {ast.unparse(annotation)}"
        for name, value in public_values(package)
        for where, annotation in signatures(value)
        if any(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(annotation))
    }
    assert found == set()


def test_types_are_found_at_every_place_of_a_signature() -> None:
    source = (
        "class A:\n field: Any\n def f(self, a: Any, *b: int, c: str, **d: list[Any]) -> Any: ...\n def _g(x: Any): ..."
    )
    (definition,) = ast.parse(source).body
    assert [(where, ast.unparse(kind)) for where, kind in types_of(definition)] == [
        ("field", "Any"),
        ("f(a)", "Any"),
        ("f(c)", "str"),
        ("f(b)", "int"),
        ("f(d)", "list[Any]"),
        ("f()", "Any"),
    ]
