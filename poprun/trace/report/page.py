"""The report as one page of HTML, which needs neither a network nor scripts."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

import numpy as np

from popdist.timeline.gauges import MEMORY
from poprun.trace.merging import Job
from poprun.trace.report.findings import Segment
from poprun.trace.report.pictures import COLOURS, draw_curves, draw_path, draw_shares, style
from poprun.trace.report.sentences import (
    changes,
    findings,
    headline,
    instance_rows,
    origin,
    paths,
    share_rows,
    time_text,
)
from poprun.trace.report.step_table import last_attempt
from poprun.trace.report.verdict import Verdict

_STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;background:#fff;"
    "color:#1b1f24}"
    "h2{margin-top:2rem;font-size:1.15rem}table{border-collapse:collapse}"
    "td,th{padding:.2rem .8rem .2rem 0;text-align:right;font-variant-numeric:tabular-nums}"
    "td:first-child,th:first-child{text-align:left}.found{border-left:4px solid #d9822b;padding-left:.8rem}"
    ".wide{overflow-x:auto}.wide svg{min-width:40rem}td{white-space:nowrap}"
    "@media(prefers-color-scheme:dark){body{background:#15191d;color:#e6eaee}}"
)


def report_page(job: Job, verdict: Verdict) -> str:
    """The whole page."""
    blocks = [
        f"<h1>What the job did</h1><p>{escape(origin(job))}.</p><p>{escape(headline(verdict))}.</p>",
        "".join(f'<p class="found">{escape(each)}</p>' for each in findings(verdict)),
        _section("Where the time went", _draw_shares(verdict), _table(share_rows(verdict))),
        _section("Steps", _draw_steps(verdict)),
        _section("Instances", _table(instance_rows(job, verdict))),
        _section("Critical paths", *_draw_paths(verdict)),
    ]
    if said := changes(verdict):
        blocks.append(_section("What would gain most", "<ol>", *(f"<li>{escape(each)}</li>" for each in said), "</ol>"))
    if memory := _draw_memory(job, verdict):
        blocks.append(_section("Memory", memory))
    blocks += [f"<p>Warning: {escape(each)}</p>" for each in verdict.warnings]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    head += f"<title>{escape(headline(verdict))}</title><style>{_STYLE}{style()}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(blocks)}</body></html>\n'


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    return _wide(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def _wide(drawn: str) -> str:
    """What may be wider than a narrow screen: it moves there by itself, not the page."""
    return f'<div class="wide">{drawn}</div>' if drawn else ""


def _draw_shares(verdict: Verdict) -> str:
    return _wide(draw_shares(verdict.titles, verdict.shares))


def _draw_steps(verdict: Verdict) -> str:
    """How long each step took, and how much of it was each instance's own work; as high as settled steps are."""
    table = verdict.table
    own = table.own_work_ns() + table.of["input"]
    curves = {
        title.partition(" (")[0]: (table.steps.astype(np.float64), own[row] / 1e6)
        for row, title in enumerate(verdict.titles[:7])
    }
    lasted = table.lasted_ns.max(axis=0)
    whole = {"the step": (table.steps.astype(np.float64), lasted / 1e6)}
    top = float(lasted[table.is_settled].max())
    higher = np.flatnonzero(lasted > top)
    said = f" Step {table.steps[lasted.argmax()]}, which took {time_text(lasted.max() / 1e9)}," if len(higher) else ""
    also = f" and {len(higher) - 1} others" if len(higher) > 1 else ""
    said += f"{also} {'are' if also else 'is'} higher than the picture: compiling, and the first two." if said else ""
    drawn = draw_curves(whole | curves, "ms", "step", top / 1e6)
    return f"<p>The whole step, and each instance's own work and input.{escape(said)}</p>{_wide(drawn)}"


def _draw_paths(verdict: Verdict) -> list[str]:
    parts = []
    for (title, words), (_, path) in zip(paths(verdict), (verdict.median_path, verdict.slowest_path), strict=True):
        drawn = draw_path([(_category_of(each), each.what, each.lasted_s) for each in path])
        parts.append(f"<p>{escape(title[:1].upper() + title[1:])}: {escape(words)}</p>{_wide(drawn)}")
    return parts


def _category_of(segment: Segment) -> str:
    if segment.what in COLOURS:
        return segment.what
    return "exchange" if segment.what.startswith("exchange") else "update"


def _draw_memory(job: Job, verdict: Verdict) -> str:
    began = verdict.table.begin_ns.min()
    curves = {}
    for place, title in zip(last_attempt(job), verdict.titles, strict=True):
        times, values = job.spans[place].measured.get(MEMORY, (np.zeros(0), np.zeros(0)))
        curves[title.partition(" (")[0]] = ((times - began) / 1e9, values / 1e6)
    return _wide(draw_curves(curves, "MB", "s"))
