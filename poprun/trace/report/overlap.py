"""How much of the exchange replicas computed on, and how long stages of pipelines had nothing to do. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from poprun.trace.spans import Sort, Spans


@dataclass(frozen=True)
class Overlap:
    """Of one instance; None where nothing was recorded that says so.

    Attributes:
        share: the part of the time of its exchanges, waits for others included, in which a replica was computing.
        bubbles: the part of a pipeline's time in which a stage had nothing to do, on the average.
    """

    share: float | None = None
    bubbles: float | None = None


def overlap_of(spans: Spans) -> Overlap:
    """What the spans of an instance say."""
    replicas = spans.of(Sort.REPLICA)
    if not len(replicas):
        return Overlap()
    exchange = spans.of(Sort.WAIT, Sort.TRANSFER, Sort.OPERATION)
    steps = np.unique(replicas["step"])
    exchange = exchange[np.isin(exchange["step"], steps)]
    lasted = float((exchange["end_ns"] - exchange["begin_ns"]).sum())
    share = None if not lasted else common_ns(exchange, replicas) / lasted
    return Overlap(share, bubbles_of(replicas) if np.any(replicas["track"] > 1) else None)


def common_ns(spans: np.ndarray, others: np.ndarray) -> float:
    """How much of the first spans lies within any of the others."""
    return float(inside_ns(spans, others).sum())


def inside_ns(spans: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return for each of the first spans how much of it lies within any of the others."""
    if not len(others):
        return np.zeros(len(spans))
    order = np.argsort(others["begin_ns"], kind="stable")
    begin, end = others["begin_ns"][order], np.maximum.accumulate(others["end_ns"][order])
    begin = np.maximum(begin, np.append(begin[0], end[:-1]))  # what is left of each behind those before
    end = np.maximum(begin, others["end_ns"][order])
    points = np.stack([begin, end], axis=1).reshape(-1)
    covered = np.cumsum(np.append(0, np.diff(points)) * (np.arange(len(points)) % 2))
    inside: np.ndarray = np.interp(spans["end_ns"], points, covered) - np.interp(spans["begin_ns"], points, covered)
    return inside


def bubbles_of(replicas: np.ndarray) -> float:
    """The part of the time of steps in which stages had nothing to do."""
    lasted = (replicas["end_ns"] - replicas["begin_ns"]).astype(np.float64)
    keys = np.stack([replicas["step"], replicas["name"].astype(np.int64)])
    _, group = np.unique(keys, axis=1, return_inverse=True)
    group = group.reshape(-1)
    count = int(group.max()) + 1
    begin, end = np.full(count, np.iinfo(np.int64).max), np.zeros(count, np.int64)
    np.minimum.at(begin, group, replicas["begin_ns"])
    np.maximum.at(end, group, replicas["end_ns"])
    stages = len(np.unique(replicas["track"]))
    room = float((end - begin).sum()) * stages
    return max(0.0, 1 - float(lasted.sum()) / room) if room else 0.0
