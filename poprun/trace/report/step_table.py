"""The time of each instance by category and step, and its overlap of computing and exchange. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from poprun.trace.merging import RecordedJob
from poprun.trace.recordings import InstanceRecording
from poprun.trace.spans import COMPILE, SPAN, Sort, Spans

COMPUTE, EXCHANGE, WAITING, INPUT = "compute", "exchange", "waiting", "input"
UPDATE, CHECKPOINT, RECOVERY, BETWEEN, REST = "update", "checkpoint", "recovery", "between", "rest"
CATEGORIES = (COMPUTE, EXCHANGE, WAITING, INPUT, UPDATE, CHECKPOINT, COMPILE, RECOVERY, BETWEEN, REST)
"""The categories of time. Between: the program's own code between two steps. Rest: time of a step outside of phases."""
WORDS = {BETWEEN: "your code between steps", REST: "code outside of phases"}
"""Descriptions of categories in sentences; the other categories use their own names."""
OWN_WORK = (COMPUTE, UPDATE, CHECKPOINT, BETWEEN, REST)
"""The categories of an instance's own work: they depend neither on input nor on links nor on other instances."""
_OF_PHASES = {
    "forward and backward": COMPUTE,
    "data": INPUT,
    "update": UPDATE,
    "checkpoint": CHECKPOINT,
    COMPILE: COMPILE,
    "recovery": RECOVERY,
}


@dataclass(frozen=True, eq=False)
class StepTable:
    """The times of the steps that all instances of the last attempt have recorded.

    Attributes:
        steps: The numbers of the steps, increasing.
        begin_ns: The begin of each step, by instance and step. It is the end of the step before; if an evaluation or
            other code came between, it is the first phase of the step.
        end_ns: The end of each step, by instance and step.
        of: For each of `CATEGORIES`, the time in ns, by instance and step.
    """

    steps: np.ndarray
    begin_ns: np.ndarray
    end_ns: np.ndarray
    of: dict[str, np.ndarray]

    @property
    def lasted_ns(self) -> np.ndarray:
        """The duration of each step, by instance and step."""
        lasted: np.ndarray = self.end_ns - self.begin_ns
        return lasted

    @property
    def is_settled(self) -> np.ndarray:
        """A mask of the steps except the first two and steps with compilation or recovery."""
        rare = (self.of[COMPILE] + self.of[RECOVERY]).sum(axis=0) > 0
        rare[:2] = True
        settled: np.ndarray = ~rare if (~rare).any() else np.ones(len(rare), bool)
        return settled

    def own_work_ns(self) -> np.ndarray:
        """Return the time of each instance's own work, by instance and step."""
        total: np.ndarray = np.sum([self.of[each] for each in OWN_WORK], axis=0)
        return total


def last_attempt(job: RecordedJob) -> list[int]:
    """Return the positions of the recordings of the last attempt."""
    attempt = max(each.recording.attempt for each in job.aligned)
    return [place for place, each in enumerate(job.aligned) if each.recording.attempt == attempt]


def table_of(job: RecordedJob) -> StepTable:
    """Return the table of a job's last attempt."""
    places = last_attempt(job)
    spans = [job.spans[place] for place in places]
    recordings = [job.aligned[place].recording for place in places]
    detailed = [np.unique(own.of(Sort.PHASE)["step"]) for own in spans]
    steps = _in_all([*detailed, *(np.unique(own.of(Sort.STEP)["step"]) for own in spans)])
    shape = (len(spans), len(steps))
    begin, end = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    of = {category: np.zeros(shape) for category in CATEGORIES}
    for row, (own, recording) in enumerate(zip(spans, recordings, strict=True)):
        made_ns, begin[row], end[row] = _lasted(own, steps)
        of[BETWEEN][row] = _between(own, begin[row], made_ns)
        for category, chosen in categories_of(own, recording).items():
            of[category][row] = _sums(chosen, steps)
    of[COMPUTE] = np.maximum(of[COMPUTE] - of[COMPILE], 0)  # compilation happens inside of the compute phase
    known = np.sum([times for category, times in of.items() if category != REST], axis=0)
    of[REST] = np.maximum(end - begin - known, 0)
    return StepTable(steps, begin, end, of)


def _in_all(parts: Sequence[np.ndarray]) -> np.ndarray:
    found = parts[0]
    for each in parts[1:]:
        found = np.intersect1d(found, each)
    return found[found >= 0]


def _between(spans: Spans, begin_ns: np.ndarray, made_ns: np.ndarray) -> np.ndarray:
    """Return the time before each step that is in no phase and no collective."""
    gaps = np.zeros(len(begin_ns), SPAN)
    gaps["begin_ns"], gaps["end_ns"] = begin_ns, np.maximum(begin_ns, made_ns)
    known = spans.of(Sort.PHASE, Sort.WAIT, Sort.TRANSFER, Sort.OPERATION)
    free: np.ndarray = np.maximum(gaps["end_ns"] - gaps["begin_ns"] - inside_ns(gaps, known), 0)
    return free


def _lasted(spans: Spans, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return each step's own begin, its begin with the work before it, and its end.

    If a step was repeated, the last one counts.
    """
    if not len(steps):
        return steps, steps, steps
    made = spans.of(Sort.STEP)
    made = made[np.argsort(made["end_ns"], kind="stable")]
    _, from_the_end = np.unique(made["step"][::-1], return_index=True)
    known = len(made) - 1 - from_the_end
    places = known[np.searchsorted(made["step"][known], steps)]
    begin, end = made["begin_ns"][places].copy(), made["end_ns"][places]
    phases = spans.of(Sort.PHASE)
    reading = phases[np.argsort(phases["begin_ns"], kind="stable")]
    first = np.full(len(steps), np.iinfo(np.int64).max)
    rows = np.searchsorted(steps, reading["step"])
    inside = (rows < len(steps)) & (steps[np.minimum(rows, max(len(steps) - 1, 0))] == reading["step"])
    np.minimum.at(first, rows[inside], reading["begin_ns"][inside])
    begin = np.minimum(begin, first)
    previous = np.append(np.int64(0), made["end_ns"])[places]
    follows = np.append(np.int64(-2), made["step"])[places] == steps - 1
    between = spans.of(Sort.BETWEEN_STEPS)["begin_ns"]
    disturbed = np.searchsorted(between, previous) != np.searchsorted(between, begin)
    made_ns = made["begin_ns"][places]
    return made_ns, np.where(follows & ~disturbed, np.minimum(previous, begin), begin), end


def categories_of(spans: Spans, recording: InstanceRecording) -> dict[str, np.ndarray]:
    """Return the spans of an instance by category, without "between" and "rest": their times are computed later."""
    phases = spans.of(Sort.PHASE)
    found = {WAITING: spans.of(Sort.WAIT), EXCHANGE: spans.of(Sort.TRANSFER, Sort.OPERATION)}
    for number, said in recording.names.items():
        if category := _OF_PHASES.get(str(said["name"])) if "call" not in said else None:
            found[category] = phases[phases["name"] == number]
    return found


def _sums(spans: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Return the total time of spans in each of the steps."""
    if not len(steps) or not len(spans):
        return np.zeros(len(steps))
    rows = np.minimum(np.searchsorted(steps, spans["step"]), len(steps) - 1)
    inside = steps[rows] == spans["step"]
    lasted = (spans["end_ns"] - spans["begin_ns"])[inside].astype(np.float64)
    sums: np.ndarray = np.bincount(rows[inside], lasted, len(steps))
    return sums


@dataclass(frozen=True)
class Overlap:
    """The overlap of one instance's exchanges and computing; None for values that were not recorded.

    Attributes:
        share: The share of the time of exchanges, including waits for others, in which a replica was computing.
        bubbles: The mean share of a pipeline's time in which a stage was idle.
    """

    share: float | None = None
    bubbles: float | None = None


def overlap_of(spans: Spans) -> Overlap:
    """Return the overlap of an instance from its spans."""
    replicas = spans.of(Sort.REPLICA)
    if not len(replicas):
        return Overlap()
    exchange = spans.of(Sort.WAIT, Sort.TRANSFER, Sort.OPERATION)
    steps = np.unique(replicas["step"])
    exchange = exchange[np.isin(exchange["step"], steps)]
    lasted = float((exchange["end_ns"] - exchange["begin_ns"]).sum())
    share = None if not lasted else float(inside_ns(exchange, replicas).sum()) / lasted
    return Overlap(share, bubbles_of(replicas) if np.any(replicas["track"] > 1) else None)


def inside_ns(spans: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return for each span how much of it lies within any of the `others`."""
    if not len(others):
        return np.zeros(len(spans))
    order = np.argsort(others["begin_ns"], kind="stable")
    begin, end = others["begin_ns"][order], np.maximum.accumulate(others["end_ns"][order])
    begin = np.maximum(begin, np.append(begin[0], end[:-1]))  # each one without the part that earlier ones cover
    end = np.maximum(begin, others["end_ns"][order])
    points = np.stack([begin, end], axis=1).reshape(-1)
    covered = np.cumsum(np.append(0, np.diff(points)) * (np.arange(len(points)) % 2))
    inside: np.ndarray = np.interp(spans["end_ns"], points, covered) - np.interp(spans["begin_ns"], points, covered)
    return inside


def bubbles_of(replicas: np.ndarray) -> float:
    """Return the share of the steps' time in which stages were idle."""
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
