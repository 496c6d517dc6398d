"""The first difference between two runs, and distances in ulps. Pure; without NumPy, which poprun does not import."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from poprun.verify.records import (
    BATCH,
    FINGERPRINT,
    GRADIENTS,
    METRICS,
    START,
    UPDATE,
    Record,
    RecordedStep,
    StepPlace,
)

COMPARED = (START, BATCH, GRADIENTS, UPDATE, FINGERPRINT)
"""The parts that must be the same, in the order of their computation; metrics may differ."""
STEPS = "steps"
"""The part of a difference in the number of steps: one run has made the step, the other has not."""

_BLOCK_BYTES = 1 << 12

_PARTS_OF_COMPLEX = {"complex64": "float32", "complex128": "float64"}
_BYTES = {1: "b", 2: "h", 4: "i", 8: "q"}


@dataclass(frozen=True)
class RunDifference:
    """The first difference between two runs, or between the instances of one run.

    Attributes:
        place: The training and the step.
        part: One of `records.PARTS`, or STEPS.
        names: The names of the differing values, in order.
        instances: An instance of the first run and one of the second run with the differing values.
        is_inside: Whether both instances belong to the same run.
    """

    place: StepPlace
    part: str
    names: tuple[str, ...] = ()
    instances: tuple[int, int] = (0, 0)
    is_inside: bool = False


def first_difference(one: Record, other: Record, parts: Sequence[str] = COMPARED) -> RunDifference | None:
    """Return the first difference between two runs, or inside the second one; None if all is equal."""
    for place in {**one.steps, **other.steps}:
        mine, theirs = one.steps.get(place), other.steps.get(place)
        if mine is None or theirs is None:
            return RunDifference(place, STEPS)
        for part in parts:
            found = _inside(theirs, place, part) or _between(mine, theirs, place, part)
            if found is not None:
                return found
    return None


def earliest(first: Record, differences: Sequence[RunDifference | None]) -> int | None:
    """Return the index of the earliest difference; None if there is none."""
    places = list(first.steps)

    def order(number: int) -> tuple[int, int]:
        found = differences[number]
        assert found is not None
        when = places.index(found.place) if found.place in first.steps else len(places)
        return when, COMPARED.index(found.part) if found.part in COMPARED else -1

    return min((number for number, found in enumerate(differences) if found is not None), key=order, default=None)


def first_inside(record: Record, parts: Sequence[str] = COMPARED) -> RunDifference | None:
    """Return the first difference between the instances of a run; None if they are equal."""
    for place, step in record.steps.items():
        for part in parts:
            found = _inside(step, place, part)
            if found is not None:
                return found
    return None


def first_of_metrics(one: Record, other: Record) -> RunDifference | None:
    """Return the first difference in metrics between two runs, or inside the second one; None if there is none."""
    made = Record(steps={place: other.steps[place] for place in one.steps if place in other.steps})
    found = first_difference(Record(steps={place: one.steps[place] for place in made.steps}), made, (METRICS,))
    return found or first_inside(other, (METRICS,))


def are_same(one: Record, other: Record, until: StepPlace) -> bool:
    """Return whether two runs of one kind had the same digests up to a step, no matter which instance had which."""

    def digests(record: Record) -> dict[tuple[StepPlace, str, str], list[str]]:
        return {
            (place, part, name): sorted(found)
            for place, step in itertools.islice(record.steps.items(), record.steps_until(until))
            for part in COMPARED
            if part != START
            for name, found in step.parts.get(part, {}).items()
        }

    return digests(one) == digests(other)


def _inside(step: RecordedStep, place: StepPlace, part: str) -> RunDifference | None:
    digests = step.parts.get(part, {})
    names = tuple(name for name, found in digests.items() if len(found) > 1)
    if not names:
        return None
    first, second = list(digests[names[0]].values())[:2]
    return RunDifference(place, part, names, (first[0], second[0]), is_inside=True)


def _between(one: RecordedStep, other: RecordedStep, place: StepPlace, part: str) -> RunDifference | None:
    mine, theirs = one.parts.get(part, {}), other.parts.get(part, {})
    if not mine or not theirs:  # the first step after a restart lacks values from the step before
        return None
    names = tuple(name for name in {**mine, **theirs} if mine.get(name, {}).keys() != theirs.get(name, {}).keys())
    if not names:
        return None
    sides = [next(iter(side.get(names[0], {"": (0,)}).values()))[0] for side in (mine, theirs)]
    return RunDifference(place, part, names, (sides[0], sides[1]))


@dataclass(frozen=True)
class _Format:
    """A format of floating-point numbers.

    Attributes:
        code: The type code of the signed integer of the same size, for `array`.
        infinity: The bits of infinity; larger ones are NaN.
    """

    code: str
    infinity: int


_FORMATS = {
    "float16": _Format("h", 0x7C00),
    "bfloat16": _Format("h", 0x7F80),
    "float32": _Format("i", 0x7F80_0000),
    "float64": _Format("q", 0x7FF0_0000_0000_0000),
}


@dataclass(frozen=True)
class Distance:
    """The distance between two arrays.

    Attributes:
        differing: The number of elements that differ.
        elements: The number of all elements.
        ulps: The largest difference in units in the last place; None if the elements are no floating-point numbers, or
            if one element is NaN and its counterpart is not.
    """

    differing: int
    elements: int
    ulps: int | None


def distance(dtype: str, one: bytes, other: bytes) -> Distance | None:
    """Return the distance of two arrays; None if they have different sizes.

    The distance of two numbers is the number of steps from one to the other through all numbers of the format. So 0.0
    and -0.0 are 0 apart, although they differ.

    Args:
        dtype: NumPy's name of the dtype.
        one: The bytes of one array, in this machine's byte order.
        other: The bytes of the other array.
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
    """Return the number of bytes of an element."""
    if dtype in ("bool", "int4", "uint4"):
        return 1
    digits = "".join(itertools.takewhile(str.isdigit, dtype.lstrip("abcdefghijklmnopqrstuvwxyz_")))
    return int(digits) // 8 if digits.isdigit() and int(digits) % 8 == 0 and int(digits) >= 8 else 1
