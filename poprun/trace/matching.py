"""Matching the collectives of instances: who came last to each, and who waited how long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from poprun.trace.recordings import InstanceRecording
from poprun.trace.spans import Sort, Spans

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class MatchedCollectives:
    """Collectives that several instances took part in. Rows are collectives, columns instances.

    Attributes:
        step: of each.
        name: of each, an index into `names`.
        names: of collectives.
        came_ns: when each instance came to it, int64.
        moved_ns: when it had seen that all others have come.
        left_ns: when it had its result.
        took_part: whether it was there at all; where it was not the times mean nothing.
    """

    step: np.ndarray
    name: np.ndarray
    names: Sequence[str]
    came_ns: np.ndarray
    moved_ns: np.ndarray
    left_ns: np.ndarray
    took_part: np.ndarray

    @property
    def last(self) -> np.ndarray:
        """The column of the last instance to come to each."""
        last: np.ndarray = np.argmax(np.where(self.took_part, self.came_ns, -_NEVER), axis=1)
        return last

    @property
    def late_ns(self) -> np.ndarray:
        """The time between the last but one and the last arrival: without it all could have gone on."""
        came = np.sort(np.where(self.took_part, self.came_ns, -_NEVER), axis=1)
        late: np.ndarray = came[:, -1] - came[:, -2]
        return late


def match(recordings: Sequence[InstanceRecording], spans: Sequence[Spans]) -> MatchedCollectives:
    """Collectives of the same name in the same step of an attempt, in their order, are the same one."""
    names = sorted({str(said["name"]) for each in recordings for said in each.names.values() if "call" in said})
    numbers = {name: number for number, name in enumerate(names)}
    parts = [_called(each, own, numbers) for each, own in zip(recordings, spans, strict=True)]
    turns = 1 + max((int(called[2].max(initial=0)) for called, _ in parts), default=0)
    steps = 2 + max((int(called[0].max(initial=0)) for called, _ in parts), default=0)
    packed = [
        ((each.attempt * steps + step + 1) * (len(names) or 1) + name) * turns + turn
        for each, ((step, name, turn), _) in zip(recordings, parts, strict=True)
    ]
    keys = np.unique(np.concatenate(packed)) if packed else np.zeros(0, np.int64)
    shape = (len(keys), len(recordings))
    came, moved, left = (np.zeros(shape, np.int64) for _ in range(3))
    took_part = np.zeros(shape, bool)
    for column, (key, (_, times)) in enumerate(zip(packed, parts, strict=True)):
        rows = np.searchsorted(keys, key)
        came[rows, column], moved[rows, column], left[rows, column] = times
        took_part[rows, column] = True
    several = took_part.sum(axis=1) > 1
    of_names = keys[several] // turns
    step, name = of_names // (len(names) or 1) % steps - 1, of_names % (len(names) or 1)
    order = np.lexsort((np.where(took_part, came, _NEVER)[several].min(axis=1), step)) if several.any() else slice(0)
    chosen = [each[several][order] for each in (came, moved, left, took_part)]
    return MatchedCollectives(step[order], name[order], names, *chosen)


def _called(recording: InstanceRecording, spans: Spans, numbers: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return an instance's collectives as (step, name, turn of that name), and their three times.

    The times are when the instance came, saw the others, and left.
    """
    waits, transfers = spans.of(Sort.WAIT), spans.of(Sort.TRANSFER)
    waits = waits[~waits["failed"]]
    known = np.zeros(1 + max(recording.names, default=0), np.int64)
    for number, said in recording.names.items():
        known[number] = numbers.get(str(said["name"]), -1)
    step, name = waits["step"], known[waits["name"]]
    order = np.lexsort((waits["begin_ns"], name, step))
    step, name, waits, transfers = step[order], name[order], waits[order], transfers[order]
    is_new = np.append(True, (step[1:] != step[:-1]) | (name[1:] != name[:-1]))[: len(step)]
    starts = np.flatnonzero(is_new)
    turn = np.arange(len(step)) - starts[np.cumsum(is_new) - 1] if len(step) else np.zeros(0, np.int64)
    return np.array([step, name, turn]), np.array([waits["begin_ns"], waits["end_ns"], transfers["end_ns"]])
