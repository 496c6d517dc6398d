"""A program in segments: what each of them reads, makes and hands on, and how they are carried out in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from strategies.typing import Leaf


@dataclass(frozen=True)
class Part:
    """A result of the program, or some of its rows.

    Attributes:
        result: its position among the results.
        rows: the first of them and the one behind the last; None for all of them.
    """

    result: int
    rows: tuple[int, int] | None = None


@dataclass(frozen=True)
class ProgramSegment:
    """A part of a program: `function(*inputs, *intermediates) -> (*parts, *intermediates)`.

    Attributes:
        function: traceable.
        inputs: which of the program's flat arguments it reads.
        takes: the numbers of the intermediates that it reads.
        gives: the numbers of those that it hands on.
        parts: what it finishes.
    """

    function: Callable[..., Sequence[Leaf]]
    inputs: tuple[int, ...]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    parts: tuple[Part, ...]

    def read(self, arguments: Sequence[Leaf], intermediates: Mapping[int, Leaf]) -> list[Leaf]:
        """Return what the function is called with."""
        return [arguments[place] for place in self.inputs] + [intermediates[number] for number in self.takes]


Compute = Callable[[int, list[Leaf]], Sequence[Leaf]]
"""(The number of a segment, what it reads) -> what it makes, its intermediates last."""


def carry_out(
    segments: Sequence[ProgramSegment], arguments: Sequence[Leaf], compute: Compute
) -> Iterator[tuple[int, Sequence[Leaf]]]:
    """Yield the number of each segment with its results, in turn; the next one begins when that is asked for.

    An intermediate is let go when it was taken for the last time.

    Args:
        segments: of the program; each takes only intermediates of segments before it.
        arguments: the flat arguments of the program.
        compute: computes a segment; values may be arrays, tracers or shapes.
    """
    last = {taken: number for number, segment in enumerate(segments) for taken in segment.takes}
    intermediates: dict[int, Leaf] = {}
    for number, segment in enumerate(segments):
        read = [arguments[position] for position in segment.inputs]
        for taken in segment.takes:
            read.append(intermediates.pop(taken) if last[taken] == number else intermediates[taken])
        results = compute(number, read)
        del read  # or they would be kept for as long as the results are looked at
        if segment.gives:
            intermediates.update(zip(segment.gives, results[len(results) - len(segment.gives) :], strict=True))
        yield number, results
