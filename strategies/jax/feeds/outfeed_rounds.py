"""The values that local replicas have enqueued, combined iteration by iteration."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from strategies.errors import FeedError

Iteration = tuple[int, ...]
"""The numbers of the iterations of the loops around an `enqueue`, outermost first; empty outside of loops."""

Value = list[np.ndarray]

KEPT = 8
"""The number of values kept for a replica that is ahead of others, if only the last round is kept."""


class Rounds(ABC):
    """The values that replicas have enqueued; a round is one value of each replica, all from one iteration.

    The queue calls `put` under its lock, in any order of replicas, and `end` after each program. A `put` that raises
    drops its value; complete rounds stay.

    Args:
        replicas: Global indices of the local replicas.
    """

    def __init__(self, replicas: range) -> None:
        self._replicas = replicas

    @property
    @abstractmethod
    def is_waiting(self) -> bool:
        """Whether values wait to be taken."""

    @abstractmethod
    def put(self, place: int, iteration: Iteration, value: Value) -> None:
        """Add a value of the local replica number `place`.

        Raises:
            FeedError: Another replica has enqueued its value in another iteration.
        """

    @abstractmethod
    def end(self) -> None:
        """Drop the values that only some replicas have enqueued. Called when all have finished their program.

        Raises:
            FeedError: There were such values.
        """

    def _difference(self, place: int, has: str, other: int, others: str) -> FeedError:
        return FeedError(
            f"replica {self._replicas[place]} has enqueued {has}, but replica {self._replicas[other]} {others}, so "
            "their unmatched values are dropped; have all replicas enqueue an outfeed in the same iterations, and mark "
            "the values that do not count"
        )


class AllRounds(Rounds):
    """All rounds until they are taken."""

    def __init__(self, replicas: range) -> None:
        super().__init__(replicas)
        self._waiting: list[deque[tuple[Iteration, Value]]] = [deque() for _ in replicas]
        self._agreed: float = math.inf  # number of rounds before replicas differ

    @property
    @override
    def is_waiting(self) -> bool:
        return any(self._waiting)

    def __len__(self) -> int:
        """Return the number of complete rounds."""
        return min(map(len, self._waiting))

    def take(self) -> list[Value]:
        """Return, and remove, the first round."""
        self._agreed -= 1
        return [values.popleft()[1] for values in self._waiting]

    @override
    def put(self, place: int, iteration: Iteration, value: Value) -> None:
        number = len(self._waiting[place])
        if number >= self._agreed:
            return
        for other, values in enumerate(self._waiting):
            if len(values) > number and values[number][0] != iteration:
                theirs = values[number][0]
                self._agreed = number
                self._keep(number)
                raise self._difference(place, f"in {_named(iteration)}", other, f"in {_named(theirs)}")
        self._waiting[place].append((iteration, value))

    @override
    def end(self) -> None:
        counts = [len(values) for values in self._waiting]
        most, least = counts.index(max(counts)), counts.index(min(counts))
        rest = list(self._waiting[most])[min(counts) :]
        self._keep(min(counts))
        self._agreed = math.inf
        if rest:
            raise self._difference(most, f"in {_named(rest[0][0])}", least, "has not")

    def _keep(self, count: int) -> None:
        for values in self._waiting:
            while len(values) > count:
                values.pop()


class LastRound(Rounds):
    """The last round alone.

    Attributes:
        whole: Last complete round, or None.
    """

    def __init__(self, replicas: range) -> None:
        super().__init__(replicas)
        self.whole: list[Value] | None = None
        self._newest = [deque([_NONE], KEPT) for _ in replicas]

    @property
    @override
    def is_waiting(self) -> bool:
        return False

    @override
    def put(self, place: int, iteration: Iteration, value: Value) -> None:
        newest = _Newest(self._newest[place][-1].count + 1, iteration, value)
        self._newest[place].append(newest)
        found = [one for values in self._newest for one in values if one.moment == newest.moment]
        if len(found) == len(self._newest):
            self.whole = [one.value for one in found]
            for values in self._newest:
                while values[0].moment != newest.moment:
                    values.popleft()

    @override
    def end(self) -> None:
        newest = [values[-1] for values in self._newest]
        self._newest = [deque([_NONE], KEPT) for _ in self._replicas]
        moments = [one.moment for one in newest]
        most, least = moments.index(max(moments)), moments.index(min(moments))
        if most != least:
            raise self._difference(most, str(newest[most]), least, str(newest[least]))


@dataclass(frozen=True)
class _Newest:
    """The latest value of a replica, and the number of values that it has enqueued since its program began."""

    count: int
    iteration: Iteration
    value: Value

    @property
    def moment(self) -> tuple[int, Iteration]:
        """The number of the value and its iteration, which are equal on all replicas for one round."""
        return self.count, self.iteration

    def __str__(self) -> str:
        last = f", the last one in {_named(self.iteration)}" if self.count else ""
        return f"{self.count} values{last}"


_NONE = _Newest(0, (), [])


def _named(iteration: Iteration) -> str:
    if not iteration:
        return "its program"
    return f"iteration {iteration[0] if len(iteration) == 1 else iteration}"
