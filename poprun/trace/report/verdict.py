"""The verdict on a job's timeline, which has the whole contents of a report. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from popdist.timeline.events import EventKind
from poprun.cli.wording import cut_off
from poprun.trace.merging import RecordedJob
from poprun.trace.recordings import InstanceRecording
from poprun.trace.report.findings import (
    LEAST_GAIN,
    Cause,
    Change,
    Culprit,
    Lateness,
    Outlier,
    PathSegment,
    SlowLink,
    are_outliers,
    culprit_of,
    outliers_of,
    path_of,
)
from poprun.trace.report.links import slow_link_of
from poprun.trace.report.step_table import (
    BETWEEN,
    CATEGORIES,
    CHECKPOINT,
    COMPUTE,
    EXCHANGE,
    INPUT,
    REST,
    Overlap,
    StepTable,
    last_attempt,
    overlap_of,
    table_of,
)
from poprun.trace.spans import COMPILE, MatchedCollectives, Sort

_MUCH_INPUT = 0.1


@dataclass(frozen=True, eq=False)
class TimelineReport:
    """The contents of a report.

    Attributes:
        titles: The titles of the instances.
        table: The times of steps.
        wall_s: The time from the first begin to the last end of a recorded step.
        steps_per_second: The rate of settled steps.
        shares: For each instance, the share of the time by category.
        last_shares: For each instance, the share of settled steps in which it held the others up most.
        late_s: For each instance, how long it held the others up in all steps.
        culprit: The late instance; None if the numbers support none.
        link: The slow link between instances, by their waits; None if there is none.
        input_bound: The share of the time in which every instance waits for data; 0 if it is small.
        overlap: For each instance, the overlap of its computing and exchanges.
        outliers: The worst outliers among the steps.
        median_path: The number and the critical path of the median step.
        slowest_path: The number and the critical path of the slowest settled step.
        changes: The three changes that would save most time.
        warnings: Warnings about missing or untrustworthy data.
    """

    titles: Sequence[str]
    table: StepTable
    wall_s: float
    steps_per_second: float
    shares: Sequence[Mapping[str, float]]
    last_shares: Sequence[float]
    late_s: Sequence[float]
    culprit: Culprit | None
    link: SlowLink | None
    input_bound: float
    overlap: Sequence[Overlap]
    outliers: Sequence[Outlier]
    median_path: tuple[int, Sequence[PathSegment]]
    slowest_path: tuple[int, Sequence[PathSegment]]
    changes: Sequence[Change]
    warnings: Sequence[str]


def judge(job: RecordedJob) -> TimelineReport:
    """Find the causes of delays in a job's last attempt.

    Raises:
        ValueError: If no step was recorded by all instances.
    """
    places = last_attempt(job)
    table = table_of(job)
    if not len(table.steps):
        raise ValueError(_why_no_step(job, places))
    spans = [job.spans[place] for place in places]
    meetings = _settled(job.meetings, places, table)
    settled = table.is_settled
    settled_ns = float(table.lasted_ns[:, settled].max(axis=0).sum())
    total = table.lasted_ns.sum(axis=1)
    shares = [
        {category: float(table.of[category][row].sum() / max(total[row], 1)) for category in CATEGORIES}
        for row in range(len(places))
    ]
    late = _late_ns(meetings, table, len(places))
    most = np.where(late.any(axis=1), late.argmax(axis=1), -1)
    last_shares = [float(np.mean(most[settled] == row)) for row in range(len(places))]
    late_s = [float(late[:, row].sum()) / 1e9 for row in range(len(places))]
    usual = settled & ~are_outliers(table)
    culprit = culprit_of(Lateness(table, usual, spans, late[usual], settled_ns))
    lines = [_usual_line(job.aligned[place].recording) for place in places]
    if culprit is not None and culprit.cause is Cause.BETWEEN:
        culprit = replace(culprit, line=lines[culprit.instance])
    rows = {job.aligned[place].recording.instance: row for row, place in enumerate(places)}
    link = slow_link_of(spans, rows, table.steps[usual], settled_ns)
    input_bound = _input_share(table)
    overlap = [overlap_of(own) for own in spans]
    changes = _changes(table, culprit, link, input_bound, overlap, lines)
    lasted = table.lasted_ns.max(axis=0)
    chosen = np.flatnonzero(settled)
    by_length = chosen[np.argsort(lasted[chosen], kind="stable")]
    return TimelineReport(
        titles=[job.aligned[place].recording.title for place in places],
        table=table,
        wall_s=float(table.end_ns.max() - table.begin_ns.min()) / 1e9,
        steps_per_second=len(chosen) / (settled_ns / 1e9) if settled_ns else 0.0,
        shares=shares,
        last_shares=last_shares,
        late_s=late_s,
        culprit=culprit,
        link=link,
        input_bound=input_bound if input_bound >= _MUCH_INPUT else 0.0,
        overlap=overlap,
        outliers=outliers_of(table),
        median_path=path_of(table, meetings, int(by_length[len(by_length) // 2])),
        slowest_path=path_of(table, meetings, int(by_length[-1])),
        changes=changes,
        warnings=job.warnings,
    )


def _usual_line(recording: InstanceRecording) -> str:
    """Return the line of the program where an instance was seen most often between steps; "" if it was never seen."""
    seen = recording.events["name"][recording.events["kind"] == EventKind.SEEN_AT]
    numbers, counts = np.unique(seen, return_counts=True)
    return str(recording.names[int(numbers[counts.argmax()])]["name"]) if len(numbers) else ""


def _why_no_step(job: RecordedJob, places: Sequence[int]) -> str:
    without = [job.aligned[each].recording.title for each in places if not len(job.spans[each].of(Sort.STEP))]
    if not without:
        return "instances have recorded no step in common; look at the trace (poprun timeline merge)"
    if len(without) == len(places):
        return "no step was recorded by all instances; record a program that trains"
    named = cut_off(", ".join(without))
    return f"no step was recorded by all instances: {named} completed none; remove its file to see the others"


def _settled(meetings: MatchedCollectives, places: Sequence[int], table: StepTable) -> MatchedCollectives:
    """Return the collectives of settled steps in which all instances of the last attempt took part."""
    took_part = meetings.took_part[:, places]
    chosen = np.isin(meetings.step, table.steps[table.is_settled]) & took_part.all(axis=1)
    chosen &= len(places) > 1
    came, moved, left = (each[chosen][:, places] for each in (meetings.came_ns, meetings.moved_ns, meetings.left_ns))
    step, name = meetings.step[chosen], meetings.name[chosen]
    return MatchedCollectives(step, name, meetings.names, came, moved, left, took_part[chosen])


def _late_ns(meetings: MatchedCollectives, table: StepTable, instances: int) -> np.ndarray:
    """Return by step and instance how long it held the others up: the time from the last but one arrival to its own."""
    late = np.zeros((len(table.steps), instances))
    if len(meetings.step):
        np.add.at(late, (np.searchsorted(table.steps, meetings.step), meetings.last), np.maximum(meetings.late_ns, 0))
    return late


def _input_share(table: StepTable) -> float:
    """Return the share of settled steps' time in which even the fastest reader waits for data."""
    settled = table.is_settled
    lasted = table.lasted_ns[:, settled].max(axis=0).sum()
    return float(table.of[INPUT][:, settled].min(axis=0).sum() / lasted) if lasted else 0.0


def _changes(
    table: StepTable,
    culprit: Culprit | None,
    link: SlowLink | None,
    input_bound: float,
    overlap: Sequence[Overlap],
    lines: Sequence[str],
) -> list[Change]:
    """Return the three changes that would save most time."""
    found = []
    if culprit is not None:
        advice = {
            Cause.COMPUTE: "let it compute as fast as the others: an equal core, no other program on it",
            Cause.BETWEEN: f"do less in its loop{f', at {culprit.line}' if culprit.line else ''}",
            Cause.REST: "find in the trace the code of its steps that is in no phase, such as callbacks",
            Cause.INPUT: "let it read its data as fast as the others: a local copy, or reading ahead "
            "(the others may read as slowly: their delay is hidden while they wait for this instance)",
            Cause.LINK: "mend or avoid its link",
            Cause.HOST: "stop other programs on its host, or give it a core of its own",
            Cause.UNCLEAR: "look at it in the trace",
        }[culprit.cause]
        found.append(Change(f"instance {culprit.instance} is late: {advice}", culprit.gain))
    if link is not None:
        found.append(Change(f"mend or avoid the link from instance {link.source} to {link.target}", link.gain))
    found.append(Change("read data ahead of the steps, or with more threads", input_bound))

    def everywhere(category: str) -> float:
        settled = np.ones(len(table.steps), bool) if category == COMPILE else table.is_settled
        of_each = table.of[category][:, settled].sum(axis=1) / np.maximum(table.lasted_ns.sum(axis=1), 1)
        return float(of_each.min())

    hidden = min((each.share for each in overlap if each.share is not None), default=0.0)
    exchange = max(everywhere(EXCHANGE) - (link.gain if link else 0.0), 0.0) * (1 - hidden)
    found.append(Change("exchange less often (gradient accumulation), or fewer bytes (16 bits)", exchange))
    found.append(Change("write checkpoints less often", everywhere(CHECKPOINT)))
    found.append(Change("keep compiled programs (--executable-cache-path)", everywhere(COMPILE)))
    at = f", at {max(lines, key=len)}" if any(lines) else ""
    found.append(Change(f"do less in your code between steps{at}", everywhere(BETWEEN)))
    found.append(Change("shorten the code of steps that is in no phase, such as callbacks", everywhere(REST)))
    bubbles = [each.bubbles for each in overlap if each.bubbles is not None]
    if bubbles:
        computing = everywhere(COMPUTE)
        found.append(Change("use more micro-batches or a better cut, for fewer bubbles", min(bubbles) * computing))
    worthwhile = [each for each in found if each.gain >= LEAST_GAIN]
    return sorted(worthwhile, key=lambda each: -each.gain)[:3]
