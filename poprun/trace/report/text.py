"""The report as text, and the sentences and tables that it shares with the HTML page. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np

from popdist.timeline.gauges import MEMORY
from poprun.cli.wording import USUAL_COLUMNS, count, draw_rows, list_ranges, time_text, wrap
from poprun.trace.merging import RecordedJob
from poprun.trace.report.findings import Cause, Outlier, PathSegment
from poprun.trace.report.step_table import CATEGORIES, WORDS, last_attempt
from poprun.trace.report.verdict import TimelineReport


def report_text(job: RecordedJob, verdict: TimelineReport, columns: int | None = None) -> str:
    """Return the whole report as text; if `columns` is None, tables are as wide as they need to be."""
    width = columns or USUAL_COLUMNS
    blocks = [
        wrap(f"{headline(verdict)}.", width) + "\n" + wrap(f"{origin(job)}.", width),
        "\n".join(wrap(each, width) for each in findings(verdict)),
        "Where the time went\n" + draw_rows(share_rows(verdict), columns),
        "Instances\n" + draw_rows(instance_rows(job, verdict), columns),
        "Critical paths\n" + "\n".join(wrap(f"{title}: {path}", width, 2) for title, path in paths(verdict)),
    ]
    if job.periods:
        blocks.append("Replicas of each instance\n" + draw_rows(period_rows(job), columns))
    if said := changes(verdict):
        blocks.append("What would gain most\n" + "\n".join(wrap(each, width, 2) for each in said))
    blocks += [wrap(f"Warning: {each}", width) for each in verdict.warnings]
    return "\n\n".join(blocks)


_MB = 1e6
_LEAST_PART = 0.02
_EXPLAINED = 0.5


def origin(job: RecordedJob) -> str:
    """Return the program, the numbers of replicas and instances, and the begin of the last attempt, as far as known."""
    first = job.aligned[last_attempt(job)[0]].recording
    replicas = f"R = {first.replicas} replicas on " if first.replicas else ""
    began = f"begun {datetime.fromtimestamp(first.began_at_s, UTC):%Y-%m-%d %H:%M:%S} UTC" if first.began_at_s else ""
    size = f"{replicas}n = {count(first.instances, 'instance')}"
    return ", ".join(filter(None, (" ".join(first.program), size, began)))


def headline(verdict: TimelineReport) -> str:
    """Return the number of steps, their speed, and the time that they took."""
    table = verdict.table
    return (
        f"{len(table.steps)} steps of {count(len(verdict.titles), 'instance')} in "
        f"{time_text(verdict.wall_s)}, {verdict.steps_per_second:.3g} steps per second once settled"
    )


def findings(verdict: TimelineReport) -> list[str]:
    """Return sentences about the causes of delays, the most important first; one sentence if there is none."""
    found = [*_of_culprit(verdict), *_of_link(verdict)]
    if verdict.input_bound:
        found.append(
            f"The job is bound by its input: every instance waits {verdict.input_bound:.0%} of the time for data."
        )
    found += [_of_outlier(verdict, each) for each in verdict.outliers]
    return found or ["No instance, link or input holds the job up."]


def _of_outlier(verdict: TimelineReport, outlier: Outlier) -> str:
    took = f"Step {outlier.step} took {time_text(outlier.lasted_s)} instead of {time_text(outlier.usual_s)}"
    if outlier.longer_s < _EXPLAINED * (outlier.lasted_s - outlier.usual_s):
        return f"{took}; no single recorded reason explains it."
    who = verdict.titles[outlier.instance]
    return f"{took}: {who} needed {time_text(outlier.longer_s)} longer for {_worded(outlier.category)}."


def _worded(category: str) -> str:
    return WORDS.get(category, category)


def _of_culprit(verdict: TimelineReport) -> list[str]:
    culprit = verdict.culprit
    if culprit is None:
        return []
    text = (
        f"{verdict.titles[culprit.instance]} is late: it holds the others up in {culprit.last_share:.0%} of the steps, "
        f"for {time_text(culprit.late_s)} (median), which costs {culprit.gain:.0%} of the time. "
    )
    if culprit.cause is Cause.UNCLEAR:
        return [text + "The numbers do not show why."]
    where = f", mostly at {culprit.line}" if culprit.line else ""
    return [text + f"The reason is {culprit.cause.value}{where}, which explains {culprit.explained:.0%} of it."]


def _of_link(verdict: TimelineReport) -> list[str]:
    link = verdict.link
    if link is None:
        return []
    return [
        f"The link from {verdict.titles[link.source]} to {verdict.titles[link.target]} is slow: {link.share:.0%} of "
        f"the waits inside exchanges are for its data. These exchanges take {link.gain:.0%} of the time."
    ]


def share_rows(verdict: TimelineReport) -> list[list[str]]:
    """Return the rows of a table of each instance's shares of time by category."""
    shown = [each for each in CATEGORIES if any(shares[each] >= 0.0005 for shares in verdict.shares)]
    rows = [["", *shown]]
    for title, shares in zip(verdict.titles, verdict.shares, strict=True):
        rows.append([title, *(f"{shares[each]:.1%}" for each in shown)])
    return rows


def instance_rows(job: RecordedJob, verdict: TimelineReport) -> list[list[str]]:
    """Return the rows of a table of each instance's lateness, overlap, bubbles and memory."""
    rows = [
        ["", "holds others up", "in all for", "computed during exchange", "bubbles", "memory, MB: first, most, last"]
    ]
    for row, (place, title) in enumerate(zip(last_attempt(job), verdict.titles, strict=True)):
        overlap = verdict.overlap[row]
        _, memory = job.spans[place].measured.get(MEMORY, (np.zeros(0), np.zeros(0)))
        sizes = [memory[0], memory.max(), memory[-1]] if len(memory) else []
        rows.append(
            [
                title,
                f"{verdict.last_shares[row]:.0%}" if len(verdict.titles) > 1 else "-",
                time_text(verdict.late_s[row]) if verdict.late_s[row] else "-",
                "-" if overlap.share is None else f"{overlap.share:.0%}",
                "-" if overlap.bubbles is None else f"{overlap.bubbles:.0%}",
                ", ".join(f"{size / _MB:.0f}" for size in sizes) or "-",
            ]
        )
    return rows


def period_rows(job: RecordedJob) -> list[list[str]]:
    """Return the rows of a table of the replicas that each instance drove in each period; none without changes."""
    first = job.aligned[0].recording
    names = sorted({each for period in job.periods for each in period.active})
    rows = [["steps", *(f"{'spare' if each >= first.instances else 'instance'} {each}" for each in names)]]
    for period in job.periods:
        of_each = {each: membership.replicas(first.replicas) for each, membership in period.active.items()}
        rows.append([list_ranges(period.steps), *(list_ranges(of_each.get(each, ())) or "-" for each in names)])
    return rows


def path_text(verdict: TimelineReport, path: Sequence[PathSegment]) -> str:
    """Return a critical path on one line; add the time of short parts to the part before."""
    total = sum(each.lasted_s for each in path)
    shown: list[PathSegment] = []
    for each in path:
        if shown and each.lasted_s < _LEAST_PART * total:
            shown[-1] = replace(shown[-1], lasted_s=shown[-1].lasted_s + each.lasted_s)
        else:
            shown.append(each)
    return " > ".join(
        f"{_worded(each.what)} on {verdict.titles[each.instance].partition(' (')[0]} {time_text(each.lasted_s)}"
        for each in shown
    )


def paths(verdict: TimelineReport) -> list[tuple[str, str]]:
    """Return titles and texts of the critical paths of the median and the slowest settled step."""
    (median, of_median), (slowest, of_slowest) = verdict.median_path, verdict.slowest_path
    return [
        (f"the median step ({median})", path_text(verdict, of_median)),
        (f"the slowest settled step ({slowest})", path_text(verdict, of_slowest)),
    ]


def changes(verdict: TimelineReport) -> list[str]:
    """Return sentences about the changes that would save most time."""
    return [f"{each.what[:1].upper()}{each.what[1:]}: {each.gain:.0%} of the time at most." for each in verdict.changes]
