"""The user's code, its reads of clocks and random numbers, and marks of the values that it reads."""

from __future__ import annotations

import dis
import functools
import hashlib
import itertools
import random
import sysconfig
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SCALARS = (int, float, complex, bool, str, bytes, type(None), type(Ellipsis), np.generic)
WHOLE_BYTES = 1 << 18
"""The most bytes of a NumPy array that are compared; of a larger array, a sample from all over it."""


def remembered(value: Any, keeps: bool = True) -> Any:
    """Return a mark that distinguishes a value from others, and keeps the value alive only if there is no other way.

    Args:
        value: Value of any kind.
        keeps: Whether a value that allows no weak reference is kept; otherwise only its identity is known.
    """
    if isinstance(value, tuple):
        return [remembered(one, keeps) for one in value]
    if isinstance(value, (*SCALARS, types.MethodType)):
        return (value,) if keeps or isinstance(value, SCALARS) else id(value.__func__)
    try:
        return weakref.ref(value)
    except TypeError:
        return (value,) if keeps else id(value)


def is_more(remembered: Any, value: Any) -> bool:
    """Return whether a tuple begins with the remembered items, and is longer."""
    return len(value) > len(remembered) and all(map(is_what, remembered, value))


def is_what(remembered: Any, value: Any) -> bool:
    """Return whether a value is the remembered one."""
    if isinstance(remembered, weakref.ref):
        return remembered() is value
    if isinstance(remembered, list):
        is_like = isinstance(value, tuple) and len(value) == len(remembered)
        return is_like and all(map(is_what, remembered, value))
    if isinstance(remembered, int):
        return remembered == id(getattr(value, "__func__", value))
    seen = remembered[0]
    if value is seen or type(value) is not type(seen):
        return value is seen
    if isinstance(value, types.MethodType):
        return value.__self__ is seen.__self__ and value.__func__ is seen.__func__
    return isinstance(value, SCALARS) and bool(value == seen or (value != value and seen != seen))


def digest(array: np.ndarray, most_bytes: int | None = WHOLE_BYTES) -> int:
    """Return 64 bits that distinguish an array's elements from others; 0 for objects.

    Args:
        array: Array of any dtype.
        most_bytes: Size above which only a sample of the elements counts; None to count all elements of any array.
    """
    if array.dtype.hasobject:
        return 0
    flat = array.reshape(-1) if array.flags.c_contiguous else array.ravel()
    if most_bytes is not None and flat.nbytes > most_bytes:
        flat = flat[:: -(-flat.nbytes // most_bytes)]
    octets = np.ascontiguousarray(flat).view(np.uint8).data
    return int.from_bytes(hashlib.sha1(octets, usedforsecurity=False).digest()[:8], "little")  # as fast as CRC-32


def state_of(generator: Any) -> Any:
    """Return the state of a generator of random numbers of Python or NumPy."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    bits = generator if isinstance(generator, np.random.RandomState) else generator.bit_generator
    return repr(bits.get_state() if isinstance(bits, np.random.RandomState) else bits.state)


GONE: object = object()
"""The stand-in for a value that does not exist any more."""

_LIBRARIES = tuple(
    {str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {str(Path(__file__).resolve().parents[1])}
)
_CALLBACKS = {"callback", "debug_callback", "io_callback", "pure_callback"}
_ADDING = {"add", "append", "extend"}
_COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}
_LOADS = {"LOAD_GLOBAL", "LOAD_DEREF", "LOAD_ATTR", "LOAD_METHOD"}
_CLOCKS = {"time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time"}
_BITS = (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
_GENERATORS = (np.random.default_rng, np.random.RandomState, np.random.SeedSequence, random.Random, *_BITS)
_BEFORE_CALLS = {"PRECALL", "PUSH_NULL", "KW_NAMES"}
_NOW = {("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today"), ("date", "today")}


def instructions_of(code: types.CodeType) -> Iterator[dis.Instruction]:
    """Yield the instructions of a function and of the functions inside of it.

    A callback of JAX runs while the program runs, so its reads are not constants. If a function mentions callbacks,
    the functions inside of it are left out.
    """
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType) and (
            constant.co_name in _COMPREHENSIONS or not _has_callbacks(list(dis.get_instructions(code)))
        ):
            yield from instructions_of(constant)


def handed_over(instructions: Sequence[dis.Instruction]) -> set[str]:
    """Return the names that a function with callbacks loads but does not call: one may be the callback."""
    if not _has_callbacks(instructions):
        return set()
    pairs = list(zip([None, *instructions], instructions, strict=False))
    loaded = {one.argval for _, one in pairs if one.opname in _LOADS}
    return loaded - {one.argval for before, one in pairs if one.opname in _LOADS and _is_called(before, one)}


def only_grown(instructions: Sequence[dis.Instruction]) -> tuple[set[str], set[str]]:
    """Return the names of containers that a function only adds to, and all other names in its code."""
    pairs = [(one, after) for one, after in itertools.pairwise(instructions) if one.opname in _LOADS]
    grown = {one.argval for one, after in pairs if after.opname in _LOADS and after.argval in _ADDING}
    others = {one.argval for one, after in pairs if not (after.opname in _LOADS and after.argval in _ADDING)}
    return grown - others, others


def keys_of(instructions: Sequence[dis.Instruction]) -> dict[str, list[object]]:
    """Return the constant keys for each name that a function only takes elements from, as in `config["rate"]`."""
    keys: dict[str, list[object]] = {}
    others = set()
    for place, one in enumerate(instructions):
        if one.opname in _LOADS or one.opname in ("LOAD_CLOSURE", "STORE_DEREF", "STORE_GLOBAL"):
            load, take = (*instructions[place + 1 : place + 3], None, None)[:2]
            if load is not None and take is not None and load.opname == "LOAD_CONST" and _takes_element(take):
                keys.setdefault(one.argval, []).append(load.argval)
            elif one.opname != "LOAD_CLOSURE":
                others.add(one.argval)
    return {name: found for name, found in keys.items() if name not in others}


def _takes_element(one: dis.Instruction) -> bool:
    return one.opname == "BINARY_SUBSCR" or (one.opname == "BINARY_OP" and one.argrepr == "[]")


def asked_by_name(code: types.CodeType) -> set[str]:
    """Return the names that a function may pass to `getattr`."""
    if "getattr" not in code.co_names:
        return set()
    return {one for one in code.co_consts if isinstance(one, str) and one.isidentifier()}


def _has_callbacks(instructions: Sequence[dis.Instruction]) -> bool:
    return any(one.opname in _LOADS and one.argval in _CALLBACKS for one in instructions)


def _is_called(before: dis.Instruction | None, one: dis.Instruction) -> bool:
    """Return whether an instruction loads a function to call it."""
    is_marked = one.opname in ("LOAD_GLOBAL", "LOAD_ATTR") and "NULL" in one.argrepr
    return one.opname == "LOAD_METHOD" or is_marked or (before is not None and before.opname == "PUSH_NULL")


def check_no_clocks(
    function: types.FunctionType, instructions: list[dis.Instruction], cells: Mapping[str, types.CellType]
) -> None:
    """Refuse calls of clocks, of the generators that all of Python shares, and of new generators without a seed.

    Raises:
        RuntimeError: The function calls one of them.
    """
    value, name = None, ""
    for place, one in enumerate(instructions):
        if one.opname == "LOAD_GLOBAL":
            value, name = function.__globals__.get(one.argval), one.argval
        elif one.opname == "LOAD_DEREF" and one.argval in cells:
            value, name = contents_of(cells[one.argval]), one.argval
        elif one.opname in ("LOAD_ATTR", "LOAD_METHOD") and value is not None:
            is_open = isinstance(value, types.ModuleType | type)
            value, name = (getattr(value, one.argval, None) if is_open else None), f"{name}.{one.argval}"
        else:
            value = None
        if value is not None and (what := _changing(value) or _unseeded(value, instructions[place + 1 : place + 6])):
            raise RuntimeError(
                f"{function.__qualname__} calls {name}, {what}, which would be read once, while the function is "
                "compiled, and not in each run; pass the value as an argument, use jax.random with a key, or take "
                "times for the log outside of the function"
            )


def _changing(value: object) -> str | None:
    """Describe the result of a callable that returns another value each time; return None for other callables."""
    owner, name = getattr(value, "__self__", None), getattr(value, "__name__", "")
    if isinstance(owner, random.Random | np.random.RandomState) and not isinstance(value, type):
        return "a random number of Python"
    is_clock = getattr(value, "__module__", None) == "time" and name in _CLOCKS
    is_now = (getattr(owner, "__name__", ""), name) in _NOW
    return "the time" if isinstance(value, types.BuiltinFunctionType) and (is_clock or is_now) else None


def _unseeded(value: object, after: Sequence[dis.Instruction]) -> str | None:
    """Describe a generator that is made without a seed; return None for everything else."""
    calls = [one for one in after if one.opname not in _BEFORE_CALLS]
    is_none = bool(calls) and calls[0].opname == "LOAD_CONST" and calls[0].argval is None
    call = next(iter(calls[is_none:]), None)
    is_made = call is not None and call.opname == "CALL" and call.arg == is_none
    return "a generator without a seed" if is_made and any(value is made for made in _GENERATORS) else None


def contents_of(cell: types.CellType) -> object:
    """Return the value in a cell of a closure, or `GONE`."""
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return GONE


def is_of_user(function: types.FunctionType) -> bool:
    """Return whether a function is the user's, and not part of an installed package."""
    return not _is_library(function.__code__.co_filename)


@functools.cache
def _is_library(file: str) -> bool:
    path = str(Path(file).resolve())
    is_installed = {"site-packages", "dist-packages"} & set(path.split("/"))
    return file.startswith("<frozen") or bool(is_installed) or any(path.startswith(f"{one}/") for one in _LIBRARIES)


def is_users_module(module: types.ModuleType | None) -> bool:
    """Return whether a module is the user's."""
    if module is None:
        return False
    file = getattr(module, "__file__", None)
    return module.__name__ == "__main__" or (file is not None and not _is_library(file))
