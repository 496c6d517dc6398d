"""The places of a plan's slices in an array, and the pieces into which a long array is cut before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from collectives.plans.plan import Plan

UNDER_WAY = 4
"""So many pieces of an array go through a plan at once."""


@dataclass(frozen=True)
class Table:
    """The places of the slices of one piece.

    Attributes:
        starts: for each slice its first element, from the piece's on.
        lengths: how many elements it has.
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    def runs(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """Neighbouring slices that neighbour each other in memory too, as (first, stop); what is empty is left out."""
        begun = first
        for number in range(first + 1, stop + 1):
            if number == stop or self.starts[number] != self.starts[number - 1] + self.lengths[number - 1]:
                if self.elements(begun, number):
                    yield begun, number
                begun = number

    def elements(self, first: int, stop: int) -> int:
        """Return how many elements some slices have."""
        return sum(self.lengths[first:stop])


@dataclass(frozen=True)
class Piece:
    """A part of an array that goes through a plan by itself.

    Attributes:
        offset: its first element.
        table: where its slices lie, from there on.
    """

    offset: int
    table: Table


def pieces_of(plan: Plan, size: int, longest: int) -> list[Piece]:
    """Return the pieces of an array of which everybody gets everything.

    Args:
        plan: in whose order slices lie.
        size: in elements.
        longest: the elements of a piece.
    """
    pieces = []
    for offset in range(0, size, longest):
        length = min(longest, size - offset)
        bounds = [length * number // plan.slices for number in range(plan.slices + 1)]
        lengths = tuple(stop - start for start, stop in zip(bounds, bounds[1:], strict=False))
        pieces.append(Piece(offset, Table(tuple(bounds[:-1]), lengths)))
    return pieces


def pieces_of_blocks(plan: Plan, block: int, longest: int) -> list[Piece]:
    """Return the pieces of an array of which every rank gets its block, one of equal ones in rank order.

    Args:
        plan: which scatters.
        block: the elements of a block.
        longest: the elements of a slice in a piece.
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
