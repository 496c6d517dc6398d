"""A pass through a module that leaves no trace: its changes to Python objects are undone."""

from __future__ import annotations

import dis
import random
from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSequence, MutableSet
from contextlib import contextmanager
from functools import partial
from operator import is_
from types import CodeType, FunctionType, MethodType

import numpy as np
import torch

from strategies.torch.tensors import have_same_bits

MOST_BYTES, MOST_OBJECTS = 64 << 20, 200_000
"""Limits of a search: the bytes of copied arrays outside of the module, and the number of objects."""

_LIBRARIES = {"torch", "strategies", "collectives", "popdist", "poprun", "jax", "numpy", "builtins"}

Container = MutableMapping[object, object] | MutableSequence[object] | MutableSet[object]

Restore = Callable[[], object]


class CannotBeUndoneError(Exception):
    """A pass may change something that cannot be undone; the message names it."""


@contextmanager
def undone(
    module: torch.nn.Module, function: Callable[..., object], other: Callable[..., object] | None = None
) -> Iterator[None]:
    """Undo, at the end of the context, changes to a module and to objects that a function reaches.

    The context undoes changes to parameters, gradients, buffers, attributes, tensors and arrays. It also undoes changes
    to elements of lists, dictionaries and sets, and to random generators, including Python's and NumPy's. The search
    covers the module, its hooks, the closure of the function and its global variables, and objects of the program's
    classes.

    Args:
        module: The program's module.
        function: The program's function, which is called with the module.
        other: One more function of the program; None without one.

    Raises:
        CannotBeUndoneError: Before the context begins, if the search finds an iterator, or too many objects or bytes.
    """
    search = _Search(_root_of(function))
    hooks = []
    for one in module.parameters():
        hooks.append(one._backward_hooks)
        search.restores.append(partial(setattr, one, "grad", one.grad))
        search.keep(one)
    for buffer in module.buffers():
        search.keep(buffer)
    search.own_bytes = 0
    search.look([module, function, hooks, other])
    state, legacy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(legacy)
        for restore in reversed(search.restores):
            restore()


class _Search:
    """A search for objects that can change, and for ways to undo changes.

    Args:
        program: The package whose classes are the program's own.

    Attributes:
        restores: Functions that undo changes; to be called in reverse order.
        own_bytes: The bytes of the arrays that were copied.
    """

    def __init__(self, program: str) -> None:
        self._program = "" if program in _LIBRARIES else program
        self._seen: dict[int, object] = {}
        self.restores: list[Restore] = []
        self.own_bytes = 0

    def look(self, found: Iterable[object]) -> None:
        """Search objects, and all objects that they reach."""
        waiting = list(found)
        while waiting:
            one = waiting.pop()
            if id(one) in self._seen or isinstance(one, str | bytes | int | float | type | None):
                continue
            self._seen[id(one)] = one
            waiting.extend(self._reached(one))
            if len(self._seen) + len(waiting) > MOST_OBJECTS or self.own_bytes > MOST_BYTES:
                raise CannotBeUndoneError("the loss function refers to more objects or bytes than may be copied")

    def keep(self, one: torch.Tensor) -> None:
        """Record how to restore the contents of a tensor."""
        self._seen[id(one)] = one
        self.own_bytes += one.nbytes
        memory, saved = one.detach(), one.detach().clone()

        def restore() -> None:
            if one.data_ptr() != memory.data_ptr() or one.shape != memory.shape:
                one.data = memory
            if not have_same_bits(memory, saved):  # versions do not show it: batch norm does not count its writes
                memory.copy_(saved)

        self.restores.append(restore)

    def _reached(self, one: object) -> Iterable[object]:
        """Record how to restore an object, and return the objects that it reaches."""
        if isinstance(one, torch.Tensor):
            if one.layout is torch.strided and one.device.type != "meta":
                self.keep(one)
        elif isinstance(one, np.ndarray):
            if one.flags.writeable and not one.dtype.hasobject:
                self.own_bytes += one.nbytes
                self.restores.append(partial(np.copyto, one, one.copy()))
        elif isinstance(one, torch.Generator):
            self.restores.append(partial(one.set_state, one.get_state()))
        elif isinstance(one, random.Random):
            self.restores.append(partial(one.setstate, one.getstate()))
        elif isinstance(one, np.random.Generator):
            self.restores.append(partial(setattr, one.bit_generator, "state", one.bit_generator.state))
        elif isinstance(one, Iterator):
            raise CannotBeUndoneError(f"the loss function may advance a {type(one).__name__}, which cannot be undone")
        elif isinstance(one, MutableMapping | MutableSequence | MutableSet):
            self.restores.append(_elements_of(one))
            return list(one.values()) if isinstance(one, MutableMapping) else list(one)
        elif isinstance(one, tuple | frozenset):
            return one
        elif isinstance(one, partial):
            return [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, MethodType):
            return [one.__self__, one.__func__]
        elif isinstance(one, FunctionType):
            return self._of_function(one)
        elif isinstance(one, torch.nn.Module) or _root_of(type(one)) == self._program:
            return [getattr(one, "__dict__", None)]
        return []

    def _of_function(self, function: FunctionType) -> Iterable[object]:
        found = [function.__defaults__, function.__kwdefaults__]
        for cell in function.__closure__ or ():
            try:
                found.append(cell.cell_contents)
            except ValueError:  # the cell is still empty
                continue
            self.restores.append(partial(setattr, cell, "cell_contents", cell.cell_contents))
        if _root_of(function) in _LIBRARIES:
            return found
        names = function.__globals__
        loaded, stored = _names_in(function.__code__, "LOAD_"), _names_in(function.__code__, "STORE_GLOBAL")
        self.restores += [partial(names.__setitem__, name, names[name]) for name in stored & names.keys()]
        return found + [names[name] for name in loaded & names.keys()]


def _root_of(one: object) -> str:
    """Return the package of a function or class, or of an object's class."""
    name = getattr(one, "__module__", None) or type(one).__module__
    return str(name).partition(".")[0]


def _names_in(code: CodeType, operation: str) -> set[str]:
    """Return the names that a function and its inner functions use in bytecode operations of one kind."""
    own = {str(one.argval) for one in dis.get_instructions(code) if one.opname.startswith(operation)}
    return own.union(*(_names_in(one, operation) for one in code.co_consts if isinstance(one, CodeType)))


def _elements_of(container: Container) -> Restore:
    if isinstance(container, MutableMapping):
        saved = dict(container)

        def restore_mapping() -> None:
            if list(container) != list(saved) or any(container[key] is not value for key, value in saved.items()):
                container.clear()
                container.update(saved)

        return restore_mapping
    elements = list(container)

    def restore() -> None:
        now = list(container)
        if len(now) == len(elements) and all(map(is_, now, elements)):
            return
        container.clear()
        put = container.append if isinstance(container, MutableSequence) else container.add
        for element in elements:
            put(element)

    return restore
