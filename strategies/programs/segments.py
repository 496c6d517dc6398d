"""A program in segments, and what runs when.

Whoever cuts a program says what each segment reads and makes. A list of actions says which segment is computed when,
and for which micro-batch; whoever carries it out need not know what segments compute, nor why they were cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from strategies.roles import Leaf


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


@dataclass(frozen=True)
class SegmentAction:
    """One thing to be done in a step. Whether it is of the forward or the backward pass is the segment's matter.

    Attributes:
        segment: the number of the segment that is computed.
        micro_batch: the number of the micro-batch whose arguments it gets.
    """

    segment: int
    micro_batch: int

    def __str__(self) -> str:
        return f"segment {self.segment} of micro-batch {self.micro_batch}"


Compute = Callable[[SegmentAction, list[Any]], Sequence[Any]]
"""(An action, what its segment reads) -> what the segment makes, its intermediates last."""


def in_turn(segments: int, micro_batches: int = 1) -> tuple[SegmentAction, ...]:
    """All segments one after another, for one micro-batch after another."""
    return tuple(SegmentAction(segment, number) for number in range(micro_batches) for segment in range(segments))


def refuse_impossible(
    actions: Sequence[SegmentAction], segments: Sequence[ProgramSegment], micro_batches: int = 1
) -> None:
    """Check a list before anything runs.

    Raises:
        ValueError: if it does not have each segment once for each micro-batch, or a segment comes before one of which
            it takes intermediates.
    """
    expected, counts = set(in_turn(len(segments), micro_batches)), Counter(actions)
    wrong = [action for action in counts if action not in expected or counts[action] > 1]
    wrong += [action for action in in_turn(len(segments), micro_batches) if action not in counts]
    if wrong:
        raise ValueError(
            f"the list has {wrong[0]} {counts[wrong[0]]} times, for {len(segments)} segments and {micro_batches} "
            "micro-batches; it needs each segment once for each micro-batch"
        )
    given: set[tuple[int, int]] = set()
    for action in actions:
        missing = {(action.micro_batch, number) for number in segments[action.segment].takes} - given
        if missing:
            giver = next(place for place, one in enumerate(segments) if min(missing)[1] in one.gives)
            raise ValueError(f"{action} takes what segment {giver} gives; it must come behind it")
        given |= {(action.micro_batch, number) for number in segments[action.segment].gives}


def carry_out(
    actions: Sequence[SegmentAction],
    segments: Sequence[ProgramSegment],
    arguments: Sequence[Sequence[Leaf]],
    compute: Compute,
) -> Iterator[tuple[SegmentAction, Sequence[Leaf]]]:
    """Each action when it is computed, with what its segment has made; the next one is begun when that is asked for.

    An intermediate is let go when it was taken for the last time.

    Args:
        actions: possible ones, see `refuse_impossible`.
        segments: of the program.
        arguments: for each micro-batch the flat arguments of the program.
        compute: computes a segment; values may be arrays, tracers or shapes.
    """
    last = {
        (action.micro_batch, taken): place  # of the action that takes it last
        for place, action in enumerate(actions)
        for taken in segments[action.segment].takes
    }
    intermediates: dict[tuple[int, int], Any] = {}
    for place, action in enumerate(actions):
        segment, of_batch = segments[action.segment], action.micro_batch
        flat = arguments[of_batch]
        read = [flat[position] for position in segment.inputs]
        for key in [(of_batch, taken) for taken in segment.takes]:
            read.append(intermediates.pop(key) if last[key] == place else intermediates[key])
        results = compute(action, read)
        del read  # or they would be kept for as long as the results are looked at
        if segment.gives:
            handed_on = results[len(results) - len(segment.gives) :]
            intermediates.update(zip([(of_batch, number) for number in segment.gives], handed_on, strict=True))
        yield action, results
