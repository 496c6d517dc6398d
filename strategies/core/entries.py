"""The entries of the journal as bytes: a description in JSON, then the bytes of each array.

Entries come from other processes. Reading one runs no code of the sender, and takes memory in proportion to its size.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import ml_dtypes
import numpy as np

from collectives.arrays import MOVABLE
from collectives.calls import MOST_OF_PEERS, foreign
from popdist.standby import joined, separated
from strategies.errors import SpareError
from strategies.typing import Tree

DEEPEST = 64
"""The most levels of lists, dictionaries and other nodes in a value."""

_NARROW = [kind for kind in vars(ml_dtypes).values() if isinstance(kind, type) and issubclass(kind, np.generic)]
_NAMES = {dtype: dtype.name for dtype in map(np.dtype, (*MOVABLE, np.complex64, np.complex128, *_NARROW))}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_WRITE = json.JSONEncoder(check_circular=False, allow_nan=False, separators=(",", ":")).encode
_FLOAT = struct.Struct(">d")


class Nodes(Protocol):
    """The values of other classes, such as nodes of pytrees, which travel as a name and parts."""

    def apart(self, value: Tree) -> tuple[str, Sequence[Tree]] | None:
        """Return a name for the class of a value, and its parts; None if the value cannot be taken apart."""

    def together(self, name: str, parts: Sequence[Tree]) -> Tree:
        """Return the value with the name and parts of `apart`. Both come from another process.

        Raises:
            ValueError: There is no such class, or the parts do not fit it.
        """


@dataclass(frozen=True)
class Entry:
    """An entry of the journal.

    Attributes:
        kind: The kind of the operation.
        done: `InstanceProgress.done` after it.
        passes: `InstanceProgress.passes` after it.
        value: The result: None, a bool, a number, a text, an array or a scalar of NumPy, or a list, a tuple, a
            dictionary or a node of these.
        obstacle: The reason why the operation cannot be replayed, or "".
    """

    kind: str
    done: int
    passes: int
    value: Tree = None
    obstacle: str = ""

    def encode(self, nodes: Nodes) -> bytes:
        """Encode the entry.

        Raises:
            TypeError: The value has a part of another class.
            ValueError: An integer has too many digits.
        """
        arrays: list[bytes] = []
        head = [self.kind, self.done, self.passes, self.obstacle, _described(self.value, arrays, nodes, 0)]
        return joined([_WRITE(head).encode(), *arrays])

    @classmethod
    def decode(cls, data: bytes, nodes: Nodes) -> Entry:
        """Decode an entry that another process has sent. Arrays, numbers and classes are those that were encoded.

        Raises:
            SpareError: The entry is damaged.
        """
        try:
            return _decoded(memoryview(data), nodes)
        except (ValueError, TypeError, RecursionError, struct.error) as error:
            raise SpareError(
                f"an entry of the journal is damaged: {foreign(str(error), MOST_OF_PEERS)}. The job goes on without "
                "this spare; give all instances the same versions of their packages, and check the network"
            ) from error


# ---- writing


def _described(value: Tree, arrays: list[bytes], nodes: Nodes, depth: int) -> object:
    """Return a description of a value for JSON, and append the bytes of its arrays."""
    kind = type(value)
    if value is None or kind is str or kind is int or kind is bool:
        return value
    if kind is float:
        return value if math.isfinite(value) else ["float", _FLOAT.pack(value).hex()]
    if kind is np.ndarray or isinstance(value, np.generic):
        return _described_array(value, "array" if kind is np.ndarray else "scalar", arrays)
    if depth == DEEPEST:
        raise TypeError(f"it has more than {DEEPEST} levels (DEEPEST)")
    head: list[str]
    parts: Sequence[Tree]
    if kind is dict:
        head, parts = ["dict"], [part for item in value.items() for part in item]
    elif kind is tuple or kind is list:
        head, parts = [kind.__name__], value
    elif (found := nodes.apart(value)) is not None:
        head, parts = ["node", found[0]], found[1]
    else:
        raise TypeError(
            f"a value of {kind.__module__}.{kind.__qualname__} cannot be sent; use numbers, arrays, or a node of "
            "pytrees whose class has a name in its module"
        )
    return [*head, *[_described(part, arrays, nodes, depth + 1) for part in parts]]


def _described_array(array: np.ndarray | np.generic, tag: str, arrays: list[bytes]) -> object:
    is_turned = array.flags.fnc  # sums over it have the bits of its order in memory
    described = [tag, _name_of(array.dtype), list(array.shape), is_turned]
    arrays.append(array.tobytes("F" if is_turned else "C"))
    return described


def _name_of(dtype: np.dtype) -> str:
    if dtype not in _NAMES:
        raise TypeError(f"an array of {dtype} cannot be sent; use an array of numbers")
    return _NAMES[dtype]


# ---- reading


def _decoded(data: memoryview, nodes: Nodes) -> Entry:
    head, *arrays = separated(data)
    remaining = iter(arrays)
    match json.loads(head.tobytes()):
        case [str(kind), int(done), int(passes), str(obstacle), described]:
            value = _value_of(described, remaining, nodes, 0)
        case _:
            raise ValueError("its description is not [kind, done, passes, obstacle, value]")
    if next(remaining, None) is not None:
        raise ValueError("it has more arrays than its description")
    return Entry(kind, done, passes, value, foreign(obstacle, MOST_OF_PEERS))


def _value_of(described: object, arrays: Iterator[memoryview], nodes: Nodes, depth: int) -> Tree:
    if described is None or isinstance(described, str | int | float):  # True and False are integers
        return described
    if depth > DEEPEST:
        raise ValueError(f"its value has more than {DEEPEST} levels (DEEPEST)")
    match described:
        case ["float", str(bits)]:
            return _FLOAT.unpack(bytes.fromhex(bits))[0]
        case ["array" | "scalar" as tag, str(dtype), list(shape), bool(is_turned)]:
            array = _array_of(_dtype_of(dtype), _shape_of(shape), is_turned, next(arrays, memoryview(b"")))
            return array if tag == "array" else array[()]
        case ["node", str(name), *parts]:
            return nodes.together(name, [_value_of(part, arrays, nodes, depth + 1) for part in parts])
        case ["list" | "tuple" | "dict" as tag, *parts]:
            values = [_value_of(part, arrays, nodes, depth + 1) for part in parts]
            if tag == "dict":
                return dict(zip(values[::2], values[1::2], strict=True))
            return values if tag == "list" else tuple(values)
        case [str(tag), *_]:
            raise ValueError(f"its value has a part of the unknown form {tag!r}")
    raise ValueError(f"its value has a part without a form, a {type(described).__name__}")


def _dtype_of(name: str) -> np.dtype:
    if name not in _DTYPES:
        raise ValueError(f"an array has the dtype {name!r}, which no entry has")
    return _DTYPES[name]


def _shape_of(given: Sequence[object]) -> tuple[int, ...]:
    shape = tuple(length for length in given if type(length) is int and length >= 0)
    if len(shape) != len(given):
        raise ValueError(f"an array has the shape {given!r}, which is not of lengths")
    return shape


def _array_of(dtype: np.dtype, shape: tuple[int, ...], is_turned: bool, data: memoryview) -> np.ndarray:
    """Return a new array of these bytes; its size is checked before it is allocated."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes != data.nbytes:
        raise ValueError(f"an array of {dtype}{list(shape)} has {data.nbytes} bytes")
    return np.ndarray(shape, dtype, data, order="F" if is_turned else "C").copy("K")
