"""One pass through a data set without training: all replicas' results for every batch, in a fixed order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from popdist.switches import require_switches
from strategies.core.gathering import gather_arrays, gather_arrays_on_first
from strategies.core.members import Members
from strategies.core.rows import Begun, Told, ToldRows
from strategies.core.survival import meet, surviving
from strategies.errors import StrategyError

if TYPE_CHECKING:
    from strategies.data.every_row import EveryRow
    from strategies.data.sources import Masked

_ELSEWHERE: Told = [ToldRows((), lambda leaves: None, np.zeros(0, np.bool_))]
"""The empty results on an instance other than 0, if instance 0 alone gets the results."""


@dataclass(frozen=True)
class Passing:
    """The rules of a pass through a data set.

    Attributes:
        title: The name of the work, for messages.
        step: The number of steps that made the state, for messages.
        tell: Function that begins to compute a batch; see `Engine.tell`.
        survives: Whether the other instances can go on without a lost instance.
    """

    title: str
    step: int
    tell: Callable[[Masked], Begun]
    survives: bool


class DataPass:
    """A pass through the rest of a data set, by all instances together.

    Args:
        members: The instances.
        passing: The rules of the pass.
        rows: The rows of the data set.
        to_all: Whether all instances get the results, or instance 0 alone.
    """

    def __init__(self, members: Members, passing: Passing, rows: EveryRow, to_all: bool = True) -> None:
        require_switches(to_all=to_all)
        self._members = members
        self._passing = passing
        self._rows = rows
        self._to_all = to_all
        self._batches = rows.batches(0)
        self._begun: deque[Begun] = deque()
        self._number = 0  # number of the oldest batch in `_begun`
        self._ahead = 0
        self._is_at_end = False

    def results(self) -> Generator[Told, None, None]:
        """Yield the results of all replicas for each batch. Collective. After an error no replica computes any more."""
        done = 0
        try:
            while told := self._surviving(done):
                done += 1
                yield told
        finally:
            self._stop()
            self._members.done_so_far.passes += 1
            self._members.done_so_far.batches = 0
            if not self._is_at_end:
                self._rows.leave(done)

    def _surviving(self, done: int) -> Told:
        self._members.done_so_far.batches = done
        if not self._passing.survives:
            return self._next(done)
        return surviving(self._members, lambda: self._next(done), lambda: self._catch_up(done))  # part of a pass

    def _next(self, done: int) -> Told:
        """Return the results of batch number `done`, counted from 0; an empty list after the last batch."""
        while True:
            self._begin()
            title = f"{self._passing.title} at step {self._passing.step}"
            if not self._begun:
                self._is_at_end = True
                self._members.communicator.barrier(name=f"end of {title}")
                return []
            local = self._begun.popleft().wait()
            told = self._gather(local, f"{title}, batch {self._number}")
            self._number += 1
            if self._number > done:
                return told

    def _begin(self) -> None:
        """Begin batches in advance, so that no replica waits for this thread; the engine says how many."""
        while len(self._begun) <= self._ahead:
            batch = next(self._batches, None)
            if batch is None:
                return
            self._begun.append(self._passing.tell(batch))
            self._ahead = self._begun[-1].ahead

    def _gather(self, local: Told, name: str) -> Told:
        gather = gather_arrays if self._to_all else gather_arrays_on_first
        found = gather(self._members, [[*one.leaves, one.mask] for one in local], name)
        return _ELSEWHERE if found is None else [ToldRows(leaves, local[0].build, mask) for *leaves, mask in found]

    def _catch_up(self, done: int) -> Told | None:
        """Prepare to go on after a loss: return None to repeat from the first batch that an instance lacks.

        Return an empty list if other instances have ended the pass, and this instance has reached its end too.
        """
        self._stop()
        meeting, own = meet(self._members), self._members.done_so_far.passes
        if meeting.passes.max() > own:
            if not self._is_at_end:
                raise StrategyError(
                    f"an instance is lost, and others have left the {self._passing.title} after {done} batches; take "
                    "all batches that predict yields"
                )
            return []
        self._is_at_end = False
        self._number = int(np.where(meeting.passes == own, meeting.batches, 0).min())
        self._batches = self._rows.batches(self._number)
        return None

    def _stop(self) -> None:
        """Drop the batches that were begun, after their replicas have ended."""
        self._batches.close()
        while self._begun:
            with suppress(Exception):  # no caller waits for this result
                self._begun.popleft().wait()
