"""A search for the networks that functions of a program reach outside of a module."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import TypeVar, cast

import torch

from strategies.jax.programs.users_code import contents_of, is_of_user, is_users_module

_Element = TypeVar("_Element")
_MOST_OBJECTS, _MOST_ELEMENTS = 20_000, 500
"""Limits of the search: objects in all, and elements of one container."""
_LIBRARIES = {"builtins", "collectives", "jax", "logging", "numpy", "popdist", "poprun", "strategies", "torch"}
_PLAIN = (str, bytes, int, float, complex, type(None), torch.Tensor)
_CONTAINERS = (list, tuple, set, frozenset, deque)
_OF_PYTORCH = frozenset(vars(torch.nn.Module()))
_HOOKS = tuple(sorted(name for name in _OF_PYTORCH if name.endswith("_hooks")))


def networks_outside(
    modules: Sequence[torch.nn.Module], functions: Mapping[str, object]
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the networks outside of a module to which functions, or the module's functions and hooks, refer.

    The search covers closures, default arguments, and the global variables of functions of the program; and objects,
    classes and containers that these reach. It calls no function of the program.

    Args:
        modules: The module, and copies of it, which are not searched.
        functions: The functions, by the names of the arguments that they were given as.

    Yields:
        The name of each network in the program, and the network.
    """
    home = {_root_of(one) for one in functions.values()} - _LIBRARIES
    parts = [part for one in modules for part in one.modules()]
    seen: dict[int, object] = {id(one): one for one in parts}  # kept, so that no address comes twice
    waiting: deque[tuple[str, object]] = deque(functions.items())
    for one in modules[0].modules():  # its copies have the same functions
        waiting += [("", type(one)), *(("", value) for hooks in _HOOKS for value in getattr(one, hooks, {}).values())]
    searched = 0
    while waiting and searched < _MOST_OBJECTS:
        path, found = waiting.popleft()
        if issubclass(type(found), _PLAIN) or id(found) in seen:
            continue
        seen[id(found)] = found
        searched += 1
        if issubclass(type(found), torch.nn.Module):
            network = cast(torch.nn.Module, found)
            yield path, network
            seen.update((id(one), one) for one in network.modules())
            for one in network.modules():
                waiting += _of_module(path, one)
        else:
            waiting += _of_object(path, found, home)


def _of_module(path: str, module: torch.nn.Module) -> Iterator[tuple[str, object]]:
    """Yield the objects that a network refers to outside of its parts."""
    yield path, type(module)
    for name, value in vars(module).items():
        if name not in _OF_PYTORCH:
            yield _joined(path, name), value
        elif name in _HOOKS:
            yield from ((path, hook) for hook in value.values())


def _of_object(path: str, found: object, home: set[str]) -> Iterable[tuple[str, object]]:
    """Return the objects that an object refers to, each with its name in the program."""
    kind = type(found)
    if issubclass(kind, FunctionType):
        return _of_function(path, cast(FunctionType, found), home)
    if issubclass(kind, MethodType):
        method = cast(MethodType, found)
        return [("self", method.__self__), (path, method.__func__)]
    if issubclass(kind, functools.partial):
        partial = cast("functools.partial[object]", found)
        return [(path, one) for one in (partial.func, *partial.args)] + list(partial.keywords.items())
    if issubclass(kind, dict):
        return [(f"{path}[{_shown(key)}]", one) for key, one in _first(cast("dict[object, object]", found).items())]
    if issubclass(kind, _CONTAINERS):
        return [(f"{path}[{place}]", one) for place, one in enumerate(_first(cast("Iterable[object]", found)))]
    if issubclass(kind, weakref.ref):
        return [(path, cast("weakref.ref[object]", found)())]
    if issubclass(kind, type):
        return _of_class(path, cast(type, found), home)
    if issubclass(kind, ModuleType) or _root_of(kind) in _LIBRARIES:
        return []
    return chain([(path, kind)], ((_joined(path, name), value) for name, value in _attributes_of(found)))


def _of_function(path: str, function: FunctionType, home: set[str]) -> Iterator[tuple[str, object]]:
    """Yield the objects in a function's closure and default arguments; of the program's functions also in globals."""
    code = function.__code__
    yield from zip(code.co_freevars, map(contents_of, function.__closure__ or ()), strict=False)
    arguments = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    yield from ((path, value) for value in vars(function).values())  # __wrapped__
    if not _is_of_program(function, home):
        return
    known, names = function.__globals__, set(_names_in(code))
    for name in sorted(names & known.keys()):
        value = known[name]
        yield name, value
        if type(value) is ModuleType and (is_users_module(value) or value.__name__.partition(".")[0] in home):
            inside = vars(value)
            yield from ((f"{name}.{inner}", inside[inner]) for inner in sorted(names & inside.keys()))


def _of_class(path: str, kind: type, home: set[str]) -> Iterator[tuple[str, object]]:
    """Yield the functions and attributes of a class of the program."""
    for base in kind.__mro__:
        if _root_of(base) in _LIBRARIES:
            continue
        for name, value in vars(base).items():
            inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
            if not issubclass(type(inner), FunctionType) or _is_of_program(inner, home):
                yield (path if inner is not value else _joined(path, name)), inner


def _attributes_of(found: object) -> Iterator[tuple[str, object]]:
    """Yield an object's attributes, without calling functions of the program."""
    with suppress(AttributeError):
        yield from _first(object.__getattribute__(found, "__dict__").items())
    for base in type(found).__mro__:
        slots = [one for one in vars(base).values() if type(one) is MemberDescriptorType]
        for slot in slots if "__slots__" in vars(base) else ():
            with suppress(AttributeError):  # it may have no value yet
                yield slot.__name__, slot.__get__(found)


def _first(elements: Iterable[_Element]) -> list[_Element]:
    """Return the first elements, in a list that other threads do not change."""
    return list(islice(elements, _MOST_ELEMENTS))


def _shown(key: object) -> str:
    return repr(key) if type(key) in (str, int) else "..."


def _is_of_program(function: FunctionType, home: set[str]) -> bool:
    root = _root_of(function)
    return root in home or (root not in _LIBRARIES and is_of_user(function))


def _root_of(one: object) -> str:
    """Return the package of a function or class, or of an object's class."""
    name = getattr(one, "__module__", None) or type(one).__module__
    return str(name).partition(".")[0]


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes that a function uses, and functions inside of it."""
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _names_in(one)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
