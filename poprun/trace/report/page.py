"""The report as one HTML page with SVG pictures, without scripts or links to a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape, quoteattr

import numpy as np

from popdist.timeline.gauges import MEMORY
from poprun.cli.wording import count, time_text
from poprun.trace.merging import RecordedJob
from poprun.trace.report.findings import PathSegment
from poprun.trace.report.step_table import CATEGORIES, last_attempt
from poprun.trace.report.text import (
    changes,
    findings,
    headline,
    instance_rows,
    origin,
    paths,
    period_rows,
    share_rows,
)
from poprun.trace.report.verdict import TimelineReport

_WIDTH, _BAR, _CURVE_HEIGHT = 1000, 20, 140
"""The size of a picture in its own units; a page stretches its width."""
_MOST_POINTS = 400
_STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;background:#fff;"
    "color:#1b1f24}"
    "h2{margin-top:2rem;font-size:1.15rem}table{border-collapse:collapse}"
    "td,th{padding:.2rem .8rem .2rem 0;text-align:right;font-variant-numeric:tabular-nums}"
    "td:first-child,th:first-child{text-align:left}.found{border-left:4px solid #d9822b;padding-left:.8rem}"
    ".wide{overflow-x:auto}td{white-space:nowrap}"
    "figure{margin:1rem 0}figure span{font-size:.8rem;line-height:1}"
    ".keys{display:flex;flex-wrap:wrap;gap:.3rem 1rem;margin-bottom:.5rem}"
    ".keys i{display:inline-block;width:.75rem;height:.75rem;margin-right:.3rem}"
    ".bar{display:grid;grid-template-columns:12rem 1fr;align-items:center;margin:.4rem 0}"
    ".plot{display:grid;grid-template-columns:4.5rem 1fr}"
    ".scale{display:flex;flex-direction:column;justify-content:space-between}"
    ".range{grid-column:2;display:flex;justify-content:space-between;margin-top:.3rem}"
    f"svg{{display:block;width:100%;overflow:visible}}figure svg{{height:{_BAR}px}}"
    f".plot svg{{height:{_CURVE_HEIGHT}px;border:solid #8a949e;border-width:0 0 1px 1px}}"
    "polyline,.dot{vector-effect:non-scaling-stroke}.dot{stroke-width:6;stroke-linecap:round}"
    "@media(prefers-color-scheme:dark){body{background:#15191d;color:#e6eaee}}"
    # on a phone, each row of a table becomes a list of its cells with their headings
    "@media(max-width:40rem){.bar{grid-template-columns:1fr;gap:.2rem}thead{display:none}"
    "tbody tr{display:block;padding:.4rem 0;border-top:1px solid #8a949e}"
    "td{display:flex;justify-content:space-between;gap:1rem;padding:0;white-space:normal}"
    'td::before{content:attr(data-of);text-align:left}td[data-of=""]::before{content:none}'
    "td:first-child{font-weight:bold}table{width:100%}}"
)


def report_page(job: RecordedJob, verdict: TimelineReport) -> str:
    """Return the page as HTML."""
    blocks = [
        f"<h1>What the job did</h1><p>{escape(origin(job))}.</p><p>{escape(headline(verdict))}.</p>",
        "".join(f'<p class="found">{escape(each)}</p>' for each in findings(verdict)),
        _section("Where the time went", draw_shares(verdict.titles, verdict.shares), _table(share_rows(verdict))),
        _section("Steps", _draw_steps(verdict)),
        _section("Instances", _table(instance_rows(job, verdict))),
        _section("Critical paths", *_draw_paths(verdict)),
    ]
    if job.periods:
        blocks.append(_section("Replicas of each instance", _table(period_rows(job))))
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
    """Return a table that scrolls by itself if it is wider than the page; on a phone its cells stand in a list."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join(
        "<tr>"
        + "".join(f"<td data-of={quoteattr(of)}>{escape(cell)}</td>" for of, cell in zip(rows[0], row, strict=True))
        + "</tr>"
        for row in rows[1:]
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _draw_steps(verdict: TimelineReport) -> str:
    """Draw the duration of each step and each instance's own work; the longest settled step sets the scale."""
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
    also = f" and {count(len(higher) - 1, 'other')}" if len(higher) > 1 else ""
    said += (
        f"{also} {'are' if also else 'is'} higher than the picture: steps that compile, and the first two."
        if said
        else ""
    )
    drawn = draw_curves(whole | curves, "ms", "step", top / 1e6)
    return f"<p>The whole step, and each instance's own work and input.{escape(said)}</p>{drawn}"


def _draw_paths(verdict: TimelineReport) -> list[str]:
    parts = []
    for (title, words), (_, path) in zip(paths(verdict), (verdict.median_path, verdict.slowest_path), strict=True):
        drawn = draw_path([(_category_of(each), each.what, each.lasted_s) for each in path])
        parts.append(f"<p>{escape(title[:1].upper() + title[1:])}: {escape(words)}</p>{drawn}")
    return parts


def _category_of(segment: PathSegment) -> str:
    if segment.what in COLOURS:
        return segment.what
    return "exchange" if segment.what.startswith("exchange") else "update"


def _draw_memory(job: RecordedJob, verdict: TimelineReport) -> str:
    began = verdict.table.begin_ns.min()
    curves = {}
    for place, title in zip(last_attempt(job), verdict.titles, strict=True):
        times, values = job.spans[place].measured.get(MEMORY, (np.zeros(0), np.zeros(0)))
        curves[title.partition(" (")[0]] = ((times - began) / 1e9, values / 1e6)
    return draw_curves(curves, "MB", "s")


COLOURS = {
    "compute": ("#2a78b8", "#5aa9e6"),
    "exchange": ("#d9822b", "#f0a35e"),
    "waiting": ("#c23b3b", "#f07178"),
    "input": ("#6a4fb3", "#a48be0"),
    "update": ("#2f8f5b", "#5fc98f"),
    "checkpoint": ("#8a6d1f", "#d4b24c"),
    "compile": ("#5d6b78", "#9aa7b4"),
    "recovery": ("#a13d86", "#e07cc4"),
    "between": ("#c96a9b", "#e794c0"),
    "rest": ("#b8bec5", "#4a525b"),
}
"""The colours of categories, on light and on dark pages."""


def style() -> str:
    """Return the style sheet of all pictures, for light and dark pages."""
    light = "".join(f".{name}{{fill:{colours[0]};background:{colours[0]}}}" for name, colours in COLOURS.items())
    dark = "".join(f".{name}{{fill:{colours[1]};background:{colours[1]}}}" for name, colours in COLOURS.items())
    lines = [each[0] for each in COLOURS.values()], [each[1] for each in COLOURS.values()]
    curves = [
        "".join(f".line{n}{{stroke:{c};fill:none}}.key{n}{{background:{c}}}" for n, c in enumerate(of)) for of in lines
    ]
    return (
        "svg{max-width:100%;height:auto;font:13px system-ui,sans-serif}"
        f"svg text{{fill:#1b1f24}}.axis{{stroke:#8a949e;stroke-width:1;fill:none}}{light}{curves[0]}"
        f"@media(prefers-color-scheme:dark){{svg text{{fill:#e6eaee}}.axis{{stroke:#77818b}}{dark}{curves[1]}}}"
    )


def draw_shares(titles: Sequence[str], shares: Sequence[Mapping[str, float]]) -> str:
    """Draw one bar for each instance, divided by the shares of its time."""
    shown = [each for each in CATEGORIES if any(of[each] >= 0.002 for of in shares)]
    bars = [
        f'<div class="bar"><span>{escape(title)}</span>'
        + _bar([(name, f"{title}: {name} {of_instance[name]:.1%}", of_instance[name]) for name in shown], title)
        + "</div>"
        for title, of_instance in zip(titles, shares, strict=True)
    ]
    return f"<figure>{_keys([(name, name) for name in shown])}{''.join(bars)}</figure>"


def draw_path(path: Sequence[tuple[str, str, float]]) -> str:
    """Draw a critical path as one bar; each part is (category, words, seconds)."""
    total = sum(seconds for _, _, seconds in path) or 1.0
    parts = [(category, f"{words}: {1e3 * seconds:.3g} ms", seconds / total) for category, words, seconds in path]
    return f"<figure>{_bar(parts, 'critical path')}</figure>"


def draw_curves(
    curves: Mapping[str, tuple[np.ndarray, np.ndarray]], unit: str, across: str, most: float | None = None
) -> str:
    """Draw curves over a common axis. If points are too close to be told apart, only the highest of them is drawn.

    Args:
        curves: x and y of each curve, by name; both have one dimension, and y is not negative.
        unit: The unit of y.
        across: "step", or the unit of x.
        most: The largest y in the picture; None for the largest of all.
    """
    known = {name: curve for name, curve in curves.items() if len(curve[0])}
    if not known:
        return ""
    left, right = (float(f([f(x) for x, _ in known.values()])) for f in (min, max))
    top = (max(float(y.max()) for _, y in known.values()) if most is None else most) or 1.0
    drawn = []
    for number, (x, y) in enumerate(known.values()):
        x, y = _thinned(x, y)
        across_px = (x - left) / ((right - left) or 1) * _WIDTH
        up_px = _CURVE_HEIGHT * (1 - np.minimum(y, top) / top)
        drawn.append(_line(number % len(COLOURS), list(zip(across_px.tolist(), up_px.tolist(), strict=True))))
    keys = _keys([(f"key{number % len(COLOURS)}", name) for number, name in enumerate(known)])
    scale = f"<span>{escape(f'{top:.3g} {unit}')}</span><span>0</span>"
    labels = [f"step {x:.4g}" if across == "step" else f"{x:.4g} {across}" for x in (left, right)]
    ends = "".join(f"<span>{escape(label)}</span>" for label in labels)
    picture = _picture(_CURVE_HEIGHT, drawn, f"{unit} over {across}")
    plot = f'<div class="scale">{scale}</div>{picture}<div class="range">{ends}</div>'
    return f'<figure>{keys}<div class="plot">{plot}</div></figure>'


def _line(colour: int, points: Sequence[tuple[float, float]]) -> str:
    """Return a line through points, or a dot for a single one."""
    if len(points) == 1:
        return '<path class="line{} dot" d="M{:.1f} {:.1f}h0"/>'.format(colour, *points[0])
    drawn = " ".join(f"{across:.1f},{up:.1f}" for across, up in points)
    return f'<polyline class="line{colour}" points="{drawn}"/>'


def _thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    group = -(-len(x) // _MOST_POINTS)
    starts = np.arange(0, len(x), group)
    return x[starts], np.maximum.reduceat(y, starts)


def _bar(parts: Sequence[tuple[str, str, float]], label: str) -> str:
    """Return a picture of one bar; each part is (category, words, share of the width)."""
    drawn, left = [], 0.0
    for category, words, share in parts:
        place = f'x="{left:.1f}" y="0" width="{share * _WIDTH:.1f}" height="{_BAR}"'
        drawn.append(f'<rect class="{category}" {place}><title>{escape(words)}</title></rect>')
        left += share * _WIDTH
    return _picture(_BAR, drawn, label)


def _keys(names: Sequence[tuple[str, str]]) -> str:
    """Return a legend; each name is (class of its colour, words)."""
    keys = (f'<span><i class="{name}"></i>{escape(words)}</span>' for name, words in names)
    return f'<div class="keys">{"".join(keys)}</div>'


def _picture(height: int, parts: Sequence[str], label: str) -> str:
    size = f'viewBox="0 0 {_WIDTH} {height}" preserveAspectRatio="none"'
    return f'<svg {size} role="img" aria-label={quoteattr(label)}>{"".join(parts)}</svg>'
