"""Marks of values, which tell later whether a value is still the same. They do not keep large values alive."""

from __future__ import annotations

import hashlib
import random
import types
import weakref
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
