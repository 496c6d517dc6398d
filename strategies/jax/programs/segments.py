"""A program in segments: the values that each one reads, makes and hands on, and their evaluation in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from strategies.typing import Leaf


@dataclass(frozen=True)
class Part:
    """A result of the program, or some of its rows.

    Attributes:
        result: Position among the results.
        rows: First row, and the end; None for all rows.
    """

    result: int
    rows: tuple[int, int] | None = None


@dataclass(frozen=True)
class ProgramSegment:
    """A part of a program: `function(*inputs, *intermediates) -> (*parts, *intermediates)`.

    Attributes:
        function: Traceable function.
        inputs: Positions of the program's flat arguments that it reads.
        takes: Numbers of the intermediates that it reads.
        gives: Numbers of the intermediates that it hands on.
        parts: Results that it finishes.
    """

    function: Callable[..., Sequence[Leaf]]
    inputs: tuple[int, ...]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    parts: tuple[Part, ...]

    def read(self, arguments: Sequence[Leaf], intermediates: Mapping[int, Leaf]) -> list[Leaf]:
        """Return the arguments of the function."""
        return [arguments[place] for place in self.inputs] + [intermediates[number] for number in self.takes]


Compute = Callable[[int, list[Leaf]], Sequence[Leaf]]
"""A function (number of a segment, its arguments) -> its results, intermediates last."""


def carry_out(
    segments: Sequence[ProgramSegment], arguments: Sequence[Leaf], compute: Compute
) -> Iterator[tuple[int, Sequence[Leaf]]]:
    """Yield the number of each segment with its results, in turn. The next one begins when it is asked for.

    An intermediate is released when it was taken for the last time.

    Args:
        segments: Segments of the program; each takes only intermediates of earlier segments.
        arguments: Flat arguments of the program.
        compute: Function that computes a segment; values may be arrays, tracers or shapes.
    """
    last = {taken: number for number, segment in enumerate(segments) for taken in segment.takes}
    intermediates: dict[int, Leaf] = {}
    for number, segment in enumerate(segments):
        read = [arguments[position] for position in segment.inputs]
        for taken in segment.takes:
            read.append(intermediates.pop(taken) if last[taken] == number else intermediates[taken])
        results = compute(number, read)
        del read  # otherwise the arguments would live as long as the caller uses the results
        if segment.gives:
            intermediates.update(zip(segment.gives, results[len(results) - len(segment.gives) :], strict=True))
        yield number, results
