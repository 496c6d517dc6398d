"""The outside values that a function reads while it is traced, and checks for changes of these values.

A traced function becomes a program, and a value that it read in Python is a constant there. Such values are numbers,
arrays, attributes, globals, the next element of an iterator, and the time. So the code of the function, and of the
user's functions that it calls, is searched for such reads. Code of libraries is not searched.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import inspect
import io
import itertools
import logging
import random
import sys
import sysconfig
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

MOST_READS = 4000
"""The most reads that are compared. A function with more has closed over a model, whose JAX arrays do not change."""
MOST_REMEMBERED = 100_000
"""The most places whose last values are kept."""
TRACES_APART = 200
"""A function is traced again after this many times the seconds that a trace takes, so this costs 0.5 % at most."""
MANY_CHANGES = 20
"""The number of changes without an effect after which later ones are compared less and less often. JAX keeps about
0.3 MB of each trace."""

_OPAQUE = ("jax", "jaxlib", "numpy", "optax", "flax", "strategies", "popdist", "collectives", "ml_dtypes")
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_RANDOM = (random.Random, np.random.Generator, np.random.RandomState)
_last_traced: dict[tuple[int, str], object] = {}

_anew = jax.make_user_context(None)
"""A context; with another value JAX uses no earlier trace, also of functions that the user has jitted."""
_values = itertools.count()

logger = logging.getLogger("strategies.jax.programs")


# ---- marks of values

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


# ---- the user's code

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


# ---- reads


@dataclass(frozen=True)
class _CapturedValue:
    """A value that a function reads.

    Attributes:
        name: Name for messages.
        get: Function that returns the present value.
        seen: Mark of the value at tracing, see `remembered`.
        may_grow: Whether the value is a tuple of the items of a container, and a traced function may add to the
            container.
        grows: Whether the function has added to the container, as to a cache; other functions may add to it too.
        is_of_array: Whether the value stands for the elements of an array.
    """

    name: str
    get: Callable[[], object]
    seen: object
    may_grow: bool = False
    grows: bool = False
    is_of_array: bool = False

    @property
    def is_same(self) -> bool:
        now = self.get()
        return is_what(self.seen, now) or (self.grows and is_more(self.seen, now))


class CapturedValues:
    """The present values that functions may read.

    Args:
        functions: Functions that will be traced.
        follows_keras: Whether variables of Keras are arguments of the program, and not constants.

    Attributes:
        of_keras: Models, layers, optimizers, metrics and variables of Keras that it may read.

    Raises:
        RuntimeError: A function reads a value that differs each time: the next element of an iterator, a clock, random
            numbers of Python.
    """

    def __init__(self, *functions: Callable[..., object], follows_keras: bool = False) -> None:
        self.name = " or ".join(
            dict.fromkeys(getattr(one, "__qualname__", type(one).__qualname__) for one in functions)
        )
        walk = _CaptureSearch(follows_keras)
        for one in functions:
            walk.follow(one, "")
        if walk.is_stale:  # JAX caches traces of loop bodies, branches and jitted functions
            logger.info("%s reads values that have changed; JAX's caches are cleared", self.name)
            jax.clear_caches()
        self._reads = walk.reads
        self.of_keras: Sequence[object] = walk.of_keras
        self._draws = [(name, one, state_of(one)) for name, one in walk.generators]

    def settle(self) -> None:
        """Accept changes that the functions made while they were traced, such as items added to a list.

        Raises:
            RuntimeError: Tracing has changed a value that is read, or drawn random numbers: once, and not in each run.
        """
        for name, generator, state in self._draws:
            if state_of(generator) != state:
                raise RuntimeError(self._would_be_once(f"has drawn from {name}", "jax.random with a key"))
        kept = []
        for read in self._reads:
            if read.is_same:
                kept.append(read)
            elif read.may_grow and is_more(read.seen, read.get()):
                kept.append(replace(read, seen=remembered(read.get()), grows=True))
            elif read.seen != (None,):
                raise RuntimeError(self._would_be_once(f"has changed {read.name}", "arguments and results for it"))
        self._reads = kept

    def _would_be_once(self, what: str, instead: str) -> str:
        return f"{self.name} {what} while it was compiled, and would do so once and not in each run; use {instead}"

    @property
    def changed(self) -> str | None:
        """The name of a value that has changed, or None."""
        for read in self._reads:  # every step asks, so the usual values are compared here
            seen, now = read.seen, read.get()
            is_usual = seen() is now if type(seen) is weakref.ref else type(seen) is tuple and seen[0] is now
            if not (is_usual or read.is_same):
                return read.name
        return None

    def is_same(self) -> bool:
        """Return whether all values are unchanged."""
        return self.changed is None

    @property
    def has_written_arrays(self) -> bool:
        """Whether elements of arrays have changed."""
        return any(read.is_of_array and not read.is_same for read in self._reads)

    def accept(self) -> None:
        """Take the present values as unchanged: the program with them is the same."""
        self._reads = [read if read.is_same else replace(read, seen=remembered(read.get())) for read in self._reads]

    def insist(self, instead: str) -> None:
        """Raise if a constant of the program has changed outside of it.

        Args:
            instead: Way to hand the value over, for the message.

        Raises:
            RuntimeError: A value has changed.
        """
        changed = self.changed
        if changed is not None:
            raise RuntimeError(
                f"{self.name} reads {changed}, which is a constant of the compiled function but has changed since; "
                f"hand it over {instead}"
            )


class RepeatedTrace:
    """A check that functions traced anew are the program that is in use.

    `CapturedValues` sees at once which of the values that it finds in the code has changed, though the program may not
    depend on it. A trace sees all values: also environment variables, attributes with computed names, and what
    libraries read.

    Args:
        reads: Values that the functions read.
        before: Lines of the program in use, see `lines_of`.
        trace: Traces the functions, and returns the lines of their program; None if a trace would have effects.
        trace_s: Seconds that the first trace took.

    Attributes:
        trace: As the argument; None where a changed value is an error although the program may not depend on it.
        doublings: How often the number of steps had doubled when a trace was due last.
    """

    def __init__(
        self, reads: CapturedValues, before: Sequence[str], trace: Callable[[], Sequence[str]] | None, trace_s: float
    ) -> None:
        self._reads, self._before, self.trace, self.doublings = reads, before, trace, 0
        self._traced_s, self._wait_s = time.perf_counter(), TRACES_APART * trace_s
        self._changes = 0  # changes without an effect so far

    def is_cheap(self, waits: int = 1) -> bool:
        """Return whether the last trace is so long ago, or several times as long, that another one costs little.

        Instances may differ.
        """
        return time.perf_counter() - self._traced_s >= waits * self._wait_s

    def insist(self, instead: str, agree: Callable[[Sequence[str]], object] | None) -> None:
        """Raise if the functions would be compiled to another program.

        Args:
            instead: Way to hand a value over, for the message.
            agree: Function that compares the lines of the present program between instances, if a trace is due. If
                not, the functions are traced only if a value has changed.

        Raises:
            RuntimeError: The program would be another one.
        """
        changed = self._reads.changed
        if changed is None and agree is None:
            return
        if self.trace is None or self._reads.has_written_arrays:  # the program in use may share their memory
            self._reads.insist(instead)
            return
        if agree is None and not self.is_cheap(max(0, self._changes + 1 - MANY_CHANGES)):
            return
        begun_s = time.perf_counter()
        with _anew(next(_values)):
            now = self.trace()
        self._traced_s = time.perf_counter()
        self._wait_s = TRACES_APART * (self._traced_s - begun_s)
        if agree is not None:
            agree(now)
        if now != self._before:
            self._reads.insist(instead)
            old, new = next(pair for pair in itertools.zip_longest(self._before, now) if pair[0] != pair[1])
            raise RuntimeError(
                f"{self._reads.name} reads a value that has changed since it was compiled, or that differs each time: "
                f"{old!r} would now be {new!r}; hand the value over {instead}"
            )
        self._reads.accept()
        self._changes += changed is not None
        if changed is not None and self._changes == MANY_CHANGES:
            logger.warning(
                "%s reads %s, which changes again and again; each change costs a trace, so later ones are checked less "
                "often: hand it over %s",
                *(self._reads.name, changed, instead),
            )


class _CaptureSearch:
    """A search of a function, and of the user's functions that it calls, for values that they may read.

    Attributes:
        reads: Reads that were found.
        generators: Generators of random numbers, with their names.
        of_keras: Objects of Keras, see `CapturedValues`.
        is_stale: Whether a value has changed since any function that reads it was traced.
    """

    def __init__(self, follows_keras: bool) -> None:
        self.is_stale = False
        self.of_keras: list[object] = []
        self._follows_keras = follows_keras
        self.reads: list[_CapturedValue] = []
        self.generators: list[tuple[str, object]] = []
        self._handed: set[str] = set()  # names of possible callbacks of JAX
        self._grown: set[str] = set()  # names of containers to which functions add
        self._others: set[str] = set()  # names with other uses
        self._passed: dict[int, object] = {}
        self._seen: dict[int, object] = {}  # keeps the objects alive, so that no other gets the same id
        self._names = {"__call__"}  # code that calls an object does not mention this name
        self._objects: list[tuple[str, object, set[str]]] = []

    def follow(self, function: object, name: str) -> None:
        self._value(function, name)
        if not isinstance(function, types.FunctionType | types.MethodType | functools.partial | type):
            self._method(function, "__call__", name)
        while self._look_at_attributes():
            pass

    # ---- functions

    def _function(self, function: object, name: str) -> None:
        if not isinstance(function, types.FunctionType):
            return
        if not is_of_user(function):
            self._wrapped(function, name)
            return
        instructions = list(instructions_of(function.__code__))
        self._names.update(
            one.argval for one in instructions if one.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")
        )
        self._names |= asked_by_name(function.__code__)
        self._handed |= handed_over(instructions)
        grown, others = only_grown(instructions)
        self._grown |= grown
        self._others |= others
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._value(value, f"a default of {function.__qualname__}")
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        keys = keys_of(instructions)
        for each, cell in cells.items():
            self._bound(each, functools.partial(contents_of, cell), id(cell), keys.get(each))
        spaces = function.__globals__
        loaded = {one.argval for one in instructions if one.opname == "LOAD_GLOBAL"}
        for each in sorted(loaded & spaces.keys()):  # in the same order on all instances
            self._bound(each, functools.partial(spaces.get, each, GONE), id(spaces), keys.get(each))
        for each in sorted({one.argval for one in instructions if one.opname == "IMPORT_NAME"}):
            if is_users_module(sys.modules.get(each)):
                self._value(sys.modules[each], each)
        check_no_clocks(function, instructions, cells)

    def _wrapped(self, function: types.FunctionType, name: str) -> None:
        """Follow the user's functions that a function of a library was given, such as an optimizer's schedule."""
        if id(function) in self._passed:
            return
        self._passed[id(function)] = function
        for value in map(contents_of, function.__closure__ or ()):
            for one in value if isinstance(value, tuple | list) else (value,):
                if isinstance(one, _FUNCTIONS):
                    self._value(one, name)
                for each in one if isinstance(one, tuple) else ():  # such as a gradient transformation
                    if isinstance(each, types.FunctionType):
                        self._value(each, name)

    def _bound(self, name: str, get: Callable[[], object], place: int, keys: Sequence[object] | None = None) -> None:
        """Read the value of a name; if it is a dictionary of which only `keys` are used, read only their values."""
        value = get()
        if value is GONE or isinstance(value, types.ModuleType) and not is_users_module(value):
            return
        last = name.rpartition(".")[2]
        is_log = last in self._grown - self._others and isinstance(value, list | set | deque)
        if is_log or (last in self._handed and isinstance(value, _FUNCTIONS)):
            return
        self._read(name, get, place)
        if keys is None or type(value) is not dict:
            self._value(value, name)
            return
        for key in dict.fromkeys(keys):
            self._bound(f"{name}[{key!r}]", functools.partial(value.get, key, GONE), id(value))

    def _elements(self, name: str, get: Callable[[], object], array: object) -> None:
        self._read(f"the elements of {name}", get, id(array), is_of_array=True)

    def _read(
        self,
        name: str,
        get: Callable[[], object],
        place: int,
        may_grow: bool = False,
        is_of_array: bool = False,
    ) -> None:
        """Note a read; `place` is the identity of the object that holds the value."""
        if len(self.reads) >= MOST_READS:
            return
        now = get()
        self.reads.append(_CapturedValue(name, get, remembered(now), may_grow, is_of_array=is_of_array))
        key = place, name.rpartition(".")[2]
        before = _last_traced.get(key, GONE)
        self.is_stale |= before is not GONE and not is_what(before, now) and not (may_grow and is_more(before, now))
        if len(_last_traced) >= MOST_REMEMBERED:
            _last_traced.clear()
            self.is_stale = True
        _last_traced[key] = remembered(now, keeps=False)

    # ---- values

    def _value(self, value: object, name: str) -> None:
        if isinstance(value, SCALARS) or id(value) in self._seen or len(self.reads) >= MOST_READS:
            return
        self._seen[id(value)] = value
        if isinstance(value, np.ndarray):
            self._elements(name, functools.partial(digest, value), value)
        elif isinstance(value, Iterator) and not isinstance(value, io.IOBase) and not _is_opaque(type(value)):
            raise RuntimeError(
                f"{name} is an iterator, a {type(value).__name__}, whose next element would be taken once, while the "
                "function is compiled, and not in each run; pass it among the arguments of strategy.run, or give a "
                "loop an InfeedQueue"
            )
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._value(part, name)
        elif isinstance(value, types.MethodType):
            self._value(value.__self__, _name_of_self(value))
            self._function(value.__func__, name)
        elif isinstance(value, types.FunctionType):
            self._function(value, name)
        elif isinstance(value, _RANDOM):
            self.generators.append((name, value))
        elif isinstance(value, dict | list | tuple | set | frozenset | deque):
            self._container(value, name)
        elif type(value).__module__.split(".")[0] == "torch" and hasattr(value, "_version"):
            self._elements(name, functools.partial(getattr, value, "_version"), value)
        elif _is_of_keras(value):
            self._of_keras(value, name)
        elif _is_opaque(type(value)) and hasattr(value, "assign"):  # a variable of this package
            self._read(name, functools.partial(getattr, value, "_value", None), id(value))
        elif isinstance(value, types.ModuleType | type) or not _is_opaque(type(value)):
            self._objects.append((name, value, set()))
        inner = getattr(value, "__wrapped__", None)  # set by decorators and by jax.jit
        if inner is not None and not isinstance(value, type):
            self._value(inner, name)

    def _container(self, value: dict[Any, Any] | Collection[Any], name: str) -> None:
        if isinstance(value, dict):
            self._read(f"what is in {name}", lambda: tuple(value.items()), id(value), may_grow=True)
            pairs = [(f"{name}[{key!r}]", one) for key, one in list(value.items())]
        else:
            if not isinstance(value, tuple | frozenset):
                self._read(f"what is in {name}", lambda: tuple(value), id(value), may_grow=True)
            pairs = [(f"{name}[{place}]", one) for place, one in enumerate(value)]
        for each, one in pairs[:MOST_READS]:
            self._value(one, each)

    def _of_keras(self, value: object, name: str) -> None:
        """Collect the Keras variables of an object."""
        self.of_keras.append(value)
        self._value(getattr(value, "optimizer", None), f"{name}.optimizer")
        if self._follows_keras:
            return
        for variable in getattr(value, "variables", None) or [value]:
            if hasattr(variable, "_value"):
                self._read(
                    f"{name}, variable {variable.path}", functools.partial(getattr, variable, "_value"), id(variable)
                )

    def _look_at_attributes(self) -> bool:
        """Read attributes whose names appear in the code so far; return whether there were new ones."""
        found = False
        for name, one, done in list(self._objects):
            for attribute in sorted(self._names - done):
                done.add(attribute)
                found = True
                self._attribute(one, attribute, name)
        return found

    def _attribute(self, one: object, attribute: str, name: str) -> None:
        space = getattr(one, "__dict__", {})
        if isinstance(one, type):
            space = next((vars(kind) for kind in one.__mro__ if attribute in vars(kind)), {})
        if isinstance(one, types.ModuleType | type) and not is_users_module(sys.modules.get(_module(one))):
            return
        if isinstance(space, Mapping) and attribute in space:
            self._bound(f"{name}.{attribute}", functools.partial(space.get, attribute, GONE), id(one))
        else:
            self._method(one, attribute, name)

    def _method(self, one: object, attribute: str, name: str) -> None:
        if attribute in self._handed:
            return
        kind = one if isinstance(one, type) else type(one)
        found = inspect.getattr_static(kind, attribute, None)
        if isinstance(found, types.MemberDescriptorType) and not isinstance(one, type):  # from __slots__
            self._bound(f"{name}.{attribute}", functools.partial(getattr, one, attribute, GONE), id(one))
        for function in (found, getattr(found, "fget", None), getattr(found, "__func__", None)):
            self._function(function, f"{name}.{attribute}")


def _name_of_self(method: types.MethodType) -> str:
    names = method.__func__.__code__.co_varnames if isinstance(method.__func__, types.FunctionType) else ()
    return names[0] if names else "self"


def _is_of_keras(value: object) -> bool:
    keras: Any = sys.modules.get("keras")
    if keras is None or isinstance(value, type):
        return False
    kinds = (keras.Layer, keras.optimizers.Optimizer, keras.Variable, keras.metrics.Metric)
    return isinstance(value, kinds)


def _module(one: object) -> str:
    return str(one.__name__ if isinstance(one, types.ModuleType) else one.__module__)


def _is_opaque(kind: type) -> bool:
    return kind.__module__.split(".")[0] in _OPAQUE
