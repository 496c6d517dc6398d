"""Class structure: classes are abstract or final, so no subclass overrides a method of a concrete class."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import pytest
from draw_rooms import EXAMPLES, modules_of

import strategies
from collectives.errors import MissingBackendError
from strategies.jax.replicas.processes import Membership

ROOT = Path(__file__).parents[2]
PACKAGES = ("collectives", "popdist", "strategies", "poprun")
COMMANDS = {"poprun.__main__", "strategies.dataset_benchmark"}
"""Modules that start a command when they are imported."""
NEEDS = {"horovod", "pytorch_lightning", "torch"}
"""Libraries of one transport or room, which are not installed everywhere."""


@functools.cache
def classes_of(package: str) -> tuple[type, ...]:
    """Return all classes of the modules of a package, nested ones included."""
    return tuple(_classes_of(package))


def _classes_of(package: str) -> Iterator[type]:
    root = importlib.import_module(package)
    found = [each.name for each in pkgutil.walk_packages(root.__path__, f"{package}.")]
    names = [name for name in found if not name.startswith(EXAMPLES.replace("/", "."))]  # importing a program starts it
    for name in [package, *names]:
        if name in COMMANDS:
            continue
        try:
            module = importlib.import_module(name)
        except (ModuleNotFoundError, MissingBackendError) as error:
            missing = error.__cause__ if isinstance(error, MissingBackendError) else error
            if not isinstance(missing, ModuleNotFoundError) or missing.name not in NEEDS:
                raise
        else:
            yield from defined_in(module, name)


def defined_in(owner: object, module: str) -> Iterator[type]:
    for value in list(vars(owner).values()):
        if inspect.isclass(value) and value.__module__ == module:
            yield value
            yield from defined_in(value, module)


MIRRORED = "strategies.compat.poptorch"
"""The package of PopTorch's interface, whose classes programs may subclass as in PopTorch."""


def concrete_above(cls: type, packages: tuple[str, ...] = PACKAGES) -> list[str]:
    """Return the base classes in the packages that are instantiated too."""
    return [
        f"{cls.__module__}.{cls.__qualname__} is a {base.__qualname__}"
        for base in cls.__mro__[1:]
        if base.__module__.partition(".")[0] in packages
        and not base.__module__.startswith(MIRRORED)
        and not is_abstract(base)
        and not issubclass(base, BaseException)
    ]


def is_abstract(cls: type) -> bool:
    return inspect.isabstract(cls) or getattr(cls, "_is_protocol", False)


def raised_bare_in(source: str) -> set[str]:
    """Return the names of the exceptions that a source raises without a message."""
    raised = [node.exc for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise)]
    bare = [each.func if isinstance(each, ast.Call) and not each.args else each for each in raised]
    return {each.id for each in bare if isinstance(each, ast.Name)}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_class_is_made_from_a_concrete_one(package: str) -> None:
    """Exceptions are exempt, since callers catch them by their bases."""
    classes = classes_of(package)
    assert len(classes) > 10
    assert [found for cls in classes for found in concrete_above(cls)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_only_abstract_methods_are_left_to_subclasses(package: str) -> None:
    """An unsupported method raises an error that says so."""
    modules = modules_of(package)
    assert modules
    found = [
        str(path.relative_to(ROOT))
        for path in modules
        if "NotImplementedError" in (source := path.read_text(encoding="utf-8"))
        and "NotImplementedError" in raised_bare_in(source)
    ]
    assert found == []


@pytest.mark.parametrize("base", [strategies.Strategy, Membership], ids=lambda each: each.__name__)
def test_a_strategy_and_a_membership_have_four_finals(base: type) -> None:
    assert is_abstract(base)
    below = {cls for cls in classes_of("strategies") if base in cls.__mro__[1:] and not is_abstract(cls)}
    assert len(below) == 4
    assert [cls.__name__ for cls in below if not getattr(cls, "__final__", False)] == []
    assert [cls.__name__ for cls in below if not is_abstract(cls.__mro__[1])] == []


def test_a_strategy_only_chooses_a_membership() -> None:
    """The strategy of one process chooses another membership if a model turns out to have stages."""
    for cls, chooses in (
        (strategies.LocalStrategy, {"__init__", "for_stages"}),
        (strategies.PopDistStrategy, {"__init__"}),
        (strategies.IPUMultiWorkerStrategy, {"__init__"}),
        (strategies.IPUHorovodStrategy, {"__init__"}),
    ):
        own = {name for name, value in vars(cls).items() if isinstance(value, FunctionType | property)}
        assert own == chooses, cls


@functools.cache
def names_of_classes(package: str) -> dict[str, set[str]]:
    """Return, for each name of a class of a package, the files that define it."""
    found: dict[str, set[str]] = {}
    for path in modules_of(package):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).add(str(path.relative_to(ROOT)))
    return found


IN_TWO_FILES = {
    "ReplicaGroups",
    "Trainer",
}
"""Names of classes that two files of one package define. New ones get a name of their own."""
MOST_NAMES_IN_TWO_FILES = 4
"""Limit for all packages together."""


def test_a_name_of_a_class_stands_in_one_file_of_its_package() -> None:
    found = {name for package in PACKAGES for name, files in names_of_classes(package).items() if len(files) > 1}
    assert found - IN_TWO_FILES == set(), "one word, one thing"
    assert IN_TWO_FILES - found == set(), "take it from the list"


def test_few_names_of_classes_stand_in_two_files_of_the_product() -> None:
    counts = Counter[str]()
    for package in PACKAGES:
        counts.update({name: len(files) for name, files in names_of_classes(package).items()})
    found = sorted(name for name, count in counts.items() if count > 1)
    assert len(found) <= MOST_NAMES_IN_TWO_FILES, found


class TestTheWalk:
    """Walks over classes and exceptions."""

    class Abstract(ABC):
        @abstractmethod
        def left(self) -> None: ...

    class Concrete(Abstract):
        def left(self) -> None: ...

    class Worse(Concrete):
        pass

    @pytest.mark.parametrize(("name", "found"), [("Concrete", []), ("Worse", ["Concrete"])])
    def test_the_walk_names_subclasses_of_a_concrete_class(self, name: str, found: list[str]) -> None:
        said = concrete_above(getattr(self, name), (__name__.partition(".")[0],))
        assert [line.rpartition(".")[2] for line in said] == found

    @pytest.mark.parametrize(
        ("source", "is_found"),
        [
            ("raise NotImplementedError", True),
            ("def f():\n raise NotImplementedError()", True),
            ("raise NotImplementedError from error", True),
            ("raise NotImplementedError('this way out')", False),
            ("raise", False),
        ],
    )
    def test_the_walk_finds_exceptions_without_a_message(self, source: str, is_found: bool) -> None:
        assert raised_bare_in(source) == ({"NotImplementedError"} if is_found else set())
