"""The entries of the journal as bytes: a description in JSON, then the bytes of each array.

Entries come from other processes. Reading one runs no code of the sender, and takes memory in proportion to its size.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

import strategies.trees as trees
from collectives.arrays import MOVABLE
from collectives.calls import MOST_OF_PEERS, foreign
from popdist.standby import joined, separated
from strategies.errors import SpareError
from strategies.late_jax import is_jax_array, jnp
from strategies.trees import ShapeOfArray
from strategies.typing import Tree

DEEPEST = 64
"""The most levels of lists, dictionaries and other nodes in a value."""

_NARROW = [kind for kind in vars(ml_dtypes).values() if isinstance(kind, type) and issubclass(kind, np.generic)]
_DTYPES = {dtype.name: dtype for dtype in map(np.dtype, (*MOVABLE, np.complex64, np.complex128, *_NARROW))}
_WRITE = json.JSONEncoder(check_circular=False, allow_nan=False, separators=(",", ":")).encode
_FLOAT = struct.Struct(">d")


@dataclass(frozen=True)
class Entry:
    """An entry of the journal.

    Attributes:
        kind: The kind of the operation.
        done: `InstanceProgress.done` after it.
        passes: `InstanceProgress.passes` after it.
        value: The result: None, a bool, a number, a text, an array of NumPy or JAX, a `ShapeOfArray`, or a node of
            pytrees or a dictionary of these. The class of a node has a name in a module.
        obstacle: The reason why the operation cannot be replayed, or "".
    """

    kind: str
    done: int
    passes: int
    value: Tree = None
    obstacle: str = ""

    def encode(self) -> bytes:
        """Encode the entry.

        Raises:
            TypeError: The value has a part of another class.
            ValueError: An integer has too many digits.
        """
        arrays: list[bytes] = []
        head = [self.kind, self.done, self.passes, self.obstacle, _described(self.value, arrays, 0)]
        return joined([_WRITE(head).encode(), *arrays])

    @classmethod
    def decode(cls, data: bytes) -> Entry:
        """Decode an entry that another process has sent. Arrays, numbers and classes are those that were encoded.

        Raises:
            SpareError: The entry is damaged.
        """
        try:
            return _decoded(memoryview(data))
        except (ValueError, TypeError, RecursionError, struct.error) as error:
            raise SpareError(
                f"an entry of the journal is damaged: {foreign(str(error), MOST_OF_PEERS)}. The job goes on without "
                "this spare; give all instances the same versions of their packages, and check the network"
            ) from error


# ---- writing


def _described(value: Tree, arrays: list[bytes], depth: int) -> object:
    """Return a description of a value for JSON, and append the bytes of its arrays."""
    kind = type(value)
    if value is None or kind is str or kind is int or kind is bool:
        return value
    if kind is float:
        return value if math.isfinite(value) else ["float", _FLOAT.pack(value).hex()]
    if kind is np.ndarray or isinstance(value, np.generic):
        return _described_array(value, "array" if kind is np.ndarray else "scalar", arrays)
    if kind is ShapeOfArray:
        return ["shape", _name_of(value.dtype), list(value.shape)]
    if is_jax_array(value):
        if value.weak_type:
            raise TypeError("a weakly typed array of JAX cannot be sent; give it a dtype")
        return _described_array(np.asarray(value), "jax", arrays)
    if depth == DEEPEST:
        raise TypeError(f"it has more than {DEEPEST} levels (DEEPEST)")
    if kind is dict:
        return ["dict", *[_described(part, arrays, depth + 1) for item in value.items() for part in item]]
    if kind is tuple or kind is list:
        return [kind.__name__, *[_described(part, arrays, depth + 1) for part in value]]
    node = trees.node_of(value)
    name = f"{kind.__module__}:{kind.__qualname__}"
    if node is None or _class_of(name) is not kind:
        raise TypeError(f"a value of {name} cannot be sent; use numbers, arrays, or a node of pytrees of a module")
    meta, children = node
    return ["node", name, *[_described(part, arrays, depth + 1) for part in (meta, *children)]]


def _described_array(array: np.ndarray | np.generic, tag: str, arrays: list[bytes]) -> object:
    is_turned = array.flags.fnc  # sums over it have the bits of its order in memory
    described = [tag, _name_of(array.dtype), list(array.shape), is_turned]
    arrays.append(array.tobytes("F" if is_turned else "C"))
    return described


def _name_of(dtype: np.dtype) -> str:
    name = str(dtype)
    if _DTYPES.get(name) != dtype:
        raise TypeError(f"an array of {name} cannot be sent; use an array of numbers")
    return name


# ---- reading


def _decoded(data: memoryview) -> Entry:
    head, *arrays = separated(data)
    described = json.loads(head.tobytes())
    match described:
        case [str(kind), int(done), int(passes), str(obstacle), value]:
            remaining = iter(arrays)
            entry = Entry(kind, done, passes, _value_of(value, remaining, 0), foreign(obstacle, MOST_OF_PEERS))
        case _:
            raise ValueError("its description is not [kind, done, passes, obstacle, value]")
    if next(remaining, None) is not None:
        raise ValueError("it has more arrays than its description")
    return entry


def _value_of(described: object, arrays: Iterator[memoryview], depth: int) -> Tree:
    if described is None or isinstance(described, str | int | float):  # True and False are integers
        return described
    if depth > DEEPEST:
        raise ValueError(f"its value has more than {DEEPEST} levels (DEEPEST)")
    match described:
        case ["float", str(bits)]:
            return _FLOAT.unpack(bytes.fromhex(bits))[0]
        case ["shape", str(dtype), list(shape)]:
            return ShapeOfArray(_shape_of(shape), _dtype_of(dtype))
        case ["array" | "scalar" | "jax" as tag, str(dtype), list(shape), bool(is_turned)]:
            array = _array_of(_dtype_of(dtype), _shape_of(shape), is_turned, next(arrays, memoryview(b"")))
            return jnp.asarray(array) if tag == "jax" else array if tag == "array" else array[()]
        case ["list" | "tuple" | "dict" as tag, *parts]:
            values = [_value_of(part, arrays, depth + 1) for part in parts]
            if tag == "dict":
                return dict(zip(values[::2], values[1::2], strict=True))
            return values if tag == "list" else tuple(values)
        case ["node", str(name), *parts]:
            kind = _class_of(name)
            if kind is None:
                raise ValueError(f"this program has no class {name}")
            meta, *children = [_value_of(part, arrays, depth + 1) for part in parts]
            return trees.node_from(kind, meta, children)
        case [str(tag), *_]:
            raise ValueError(f"its value has a part of the unknown form {tag!r}")
    raise ValueError(f"its value has a part without a form, a {type(described).__name__}")


def _class_of(name: str) -> type | None:
    """Return the class of a name such as `strategies.jax.evaluation.mean:Mean`; nothing is imported for it."""
    module, _, path = name.partition(":")
    found: object = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, "__dict__", {}).get(part)  # attributes of lazy modules would import others
    return found if isinstance(found, type) else None


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
