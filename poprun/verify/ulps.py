"""The distance of two arrays in units in the last place. Pure; NumPy is not poprun's to import."""

from __future__ import annotations

import itertools
from array import array
from dataclasses import dataclass

_BLOCK_BYTES = 1 << 12


@dataclass(frozen=True)
class _Format:
    """A format of floating-point numbers.

    Attributes:
        code: of the signed integer of as many bits, for `array`.
        infinity: its bits; what is above that is no number.
    """

    code: str
    infinity: int


_FORMATS = {
    "float16": _Format("h", 0x7C00),
    "bfloat16": _Format("h", 0x7F80),
    "float32": _Format("i", 0x7F80_0000),
    "float64": _Format("q", 0x7FF0_0000_0000_0000),
}
_PARTS_OF_COMPLEX = {"complex64": "float32", "complex128": "float64"}
_BYTES = {1: "b", 2: "h", 4: "i", 8: "q"}


@dataclass(frozen=True)
class Distance:
    """Between two arrays.

    Attributes:
        differing: how many elements differ.
        elements: how many there are.
        ulps: the largest difference in units in the last place; None: they are no floating-point numbers, or one is NaN
            and the other is not.
    """

    differing: int
    elements: int
    ulps: int | None


def distance(dtype: str, one: bytes, other: bytes) -> Distance | None:
    """Return the distance of two arrays; None where they have different sizes.

    Between two numbers lie as many units as there are numbers of that format from one to the other, so 0.0 and -0.0 are
    0 apart, although they are not the same.

    Args:
        dtype: NumPy's name of it.
        one: the bytes of an array, in this machine's order.
        other: those of the other one.
    """
    if len(one) != len(other):
        return None
    number_format = _FORMATS.get(_PARTS_OF_COMPLEX.get(dtype, dtype))
    size = _size_of(dtype)
    code = number_format.code if number_format else _BYTES.get(size, "b")
    width = array(code).itemsize
    differing, furthest, is_number = 0, 0, number_format is not None
    for start in range(0, len(one), _BLOCK_BYTES):
        mine, theirs = one[start : start + _BLOCK_BYTES], other[start : start + _BLOCK_BYTES]
        if mine == theirs:
            continue
        pairs = zip(array(code, mine), array(code, theirs), strict=True)
        unequal = [(number, a, b) for number, (a, b) in enumerate(pairs) if a != b]
        differing += len({number * width // size for number, _, _ in unequal})
        if number_format is not None:
            least = -(1 << (8 * width - 1))
            for _, a, b in unequal:
                x, y = a if a >= 0 else least - a, b if b >= 0 else least - b
                is_number &= abs(x) <= number_format.infinity and abs(y) <= number_format.infinity
                furthest = max(furthest, abs(x - y))
    return Distance(differing, len(one) // size, furthest if is_number else None)


def _size_of(dtype: str) -> int:
    """Bytes of an element."""
    if dtype in ("bool", "int4", "uint4"):
        return 1
    digits = "".join(itertools.takewhile(str.isdigit, dtype.lstrip("abcdefghijklmnopqrstuvwxyz_")))
    return int(digits) // 8 if digits.isdigit() and int(digits) % 8 == 0 and int(digits) >= 8 else 1
