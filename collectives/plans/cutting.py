"""The positions of a plan's slices in an array, and the pieces into which a long array is cut first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from collectives.plans.plan import Plan

UNDER_WAY = 4
"""Maximum number of pieces of an array that go through a plan at once."""


@dataclass(frozen=True)
class Table:
    """The positions of the slices of one piece.

    Attributes:
        starts: First element of each slice, relative to the piece.
        lengths: Number of elements of each slice.
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    def runs(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield runs of slices that are adjacent in memory, as (first, stop), without empty ones."""
        begun = first
        for number in range(first + 1, stop + 1):
            if number == stop or self.starts[number] != self.starts[number - 1] + self.lengths[number - 1]:
                if self.elements(begun, number):
                    yield begun, number
                begun = number

    def elements(self, first: int, stop: int) -> int:
        """Return the number of elements in slices `first` to `stop` - 1."""
        return sum(self.lengths[first:stop])


@dataclass(frozen=True)
class Piece:
    """A part of an array that goes through a plan separately.

    Attributes:
        offset: First element of the piece.
        table: Positions of its slices, relative to `offset`.
    """

    offset: int
    table: Table


def pieces_of(plan: Plan, size: int, longest: int) -> list[Piece]:
    """Cut an array whose result goes to all ranks into pieces.

    Args:
        plan: Plan that defines the order of slices.
        size: Number of elements of the array.
        longest: Maximum number of elements in a piece.
    """
    pieces = []
    for offset in range(0, size, longest):
        length = min(longest, size - offset)
        bounds = [length * number // plan.slices for number in range(plan.slices + 1)]
        lengths = tuple(stop - start for start, stop in zip(bounds, bounds[1:], strict=False))
        pieces.append(Piece(offset, Table(tuple(bounds[:-1]), lengths)))
    return pieces


def pieces_of_blocks(plan: Plan, block: int, longest: int) -> list[Piece]:
    """Cut an array into pieces if every rank gets one of equal blocks of the result, in rank order.

    Args:
        plan: Scattering plan.
        block: Number of elements of a block.
        longest: Maximum number of elements of a slice in a piece.
    """
    owned, seen = Counter(plan.owners), Counter[int]()
    borders = []
    for owner in plan.owners:
        number, count = seen[owner], owned[owner]
        seen[owner] += 1
        borders.append((owner * block + block * number // count, owner * block + block * (number + 1) // count))
    most = max(stop - start for start, stop in borders)
    return [
        Piece(
            offset,
            Table(
                tuple(start for start, _ in borders),
                tuple(max(0, min(longest, stop - start - offset)) for start, stop in borders),
            ),
        )
        for offset in range(0, most, longest)
    ]
