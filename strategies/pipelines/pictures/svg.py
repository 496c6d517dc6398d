"""A pipeline as SVG: a lane for each stage on a device, time from left to right; one file without scripts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from strategies.pipelines.pictures.panel import LETTERS, Panel, Unit, label_of, round_step, unit_of
from strategies.pipelines.timetable import Kind, Timed

WIDTH = 1000
LEFT, MARGIN, TITLE, LANE, GAP, AXIS, LEGEND = 120, 12, 24, 22, 5, 30, 34
DIGIT = 6.4
WIDTHS = {"F": 6.0, "B": 7.0, "I": 4.5, "W": 10.0, "U": 7.5}
"""How wide digits and letters are in boxes, in pixels; see the size of the font below."""

CLASSES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUTS: "inputs",
    Kind.BACKWARD_WEIGHTS: "weights",
    Kind.UPDATE: "update",
}
HATCHES = {
    Kind.BACKWARD: "M0,8 8,0",
    Kind.BACKWARD_INPUTS: "M0,0 8,8",
    Kind.BACKWARD_WEIGHTS: "M0,1 8,1",
    Kind.UPDATE: "M0,1 8,1 M1,0 1,8",
}
"""Lines on the colours, by which kinds are told apart without them."""

LIGHT = {
    "page": "#ffffff", "ink": "#1f2328", "idle": "#e9ecef", "line": "#8c959f",
    "forward": "#9ecbff", "backward": "#ffc58a", "inputs": "#ffdf8c", "weights": "#a8dba8", "update": "#d8b9ff",
}  # fmt: skip
DARK = {
    "page": "#0d1117", "ink": "#e6edf3", "idle": "#21262d", "line": "#768390",
    "forward": "#1f5a9e", "backward": "#9a5312", "inputs": "#7d6200", "weights": "#2c6b34", "update": "#6b3fa0",
}  # fmt: skip


def draw_svg(panels: Sequence[Panel], width: int = WIDTH) -> str:
    """Panels below each other, on one scale of time, so that lengths can be compared by eye.

    An action is a box with its letter and the number of its micro-batch where they fit, and a text that shows when the
    mouse is on it. Colours follow the reader's light or dark mode; hatches say the same.

    Args:
        panels: at least one.
        width: in pixels, at least 300.

    Raises:
        ValueError: if there is no panel, or the picture is too narrow.
    """
    if not panels or width < 300:
        raise ValueError(f"{len(panels)} panels, {width} pixels wide, are asked for; it takes 1 or more, and 300")
    longest = max(panels, key=lambda panel: panel.length)
    scale = (width - LEFT - MARGIN) / (longest.length or 1.0)
    parts: list[str] = []
    top = float(MARGIN)
    for panel in panels:
        top = _draw_panel(parts, panel, scale, unit_of(longest.length, longest.in_seconds), top)
    kinds = [kind for kind in Kind if any(kind in panel.kinds for panel in panels)]
    parts += _legend(kinds, top)
    return "\n".join([*_head(width, top + LEGEND, panels, kinds), *parts, "</svg>\n"])


def _head(width: int, height: float, panels: Sequence[Panel], kinds: Sequence[Kind]) -> Iterator[str]:
    size = f'viewBox="0 0 {width} {height:g}" width="{width}" height="{height:g}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" class="pipeline" role="img" {size}>'
    yield f"<title>{escape('; '.join(panel.title for panel in panels))}</title>"
    yield f"<style>{_style()}</style>"
    yield "<defs>"
    for kind in kinds:
        if kind in HATCHES:
            yield (
                f'<pattern id="pipeline-{CLASSES[kind]}" width="8" height="8" patternUnits="userSpaceOnUse">'
                f'<rect class="{CLASSES[kind]}-plain" width="8" height="8"/><path class="hatch" d="{HATCHES[kind]}"/>'
                "</pattern>"
            )
    yield "</defs>"
    yield f'<rect class="page" width="{width}" height="{height:g}"/>'


def _style() -> str:
    dark = _colours(DARK)
    return (
        ".pipeline text{font:11px Verdana,DejaVu Sans,sans-serif}.pipeline .title{font-weight:bold;font-size:12px}"
        ".pipeline .label text{text-anchor:middle;font-size:10px}.pipeline .axis text{text-anchor:middle}"
        ".pipeline .axis line{stroke-width:1}.pipeline .hatch{stroke-opacity:.3;stroke-width:1;fill:none}"
        ".pipeline .box rect{stroke-width:1}"
        + "".join(f".pipeline .{CLASSES[kind]} rect{{fill:url(#pipeline-{CLASSES[kind]})}}" for kind in HATCHES)
        + f"{_colours(LIGHT)}@media(prefers-color-scheme:dark){{{dark}}}"
    )


def _colours(of: dict[str, str]) -> str:
    plain = [f".pipeline .{name}-plain{{fill:{of[name]}}}" for name in CLASSES.values()]
    return (
        f".pipeline text{{fill:{of['ink']}}}.pipeline .page{{fill:{of['page']}}}.pipeline .idle{{fill:{of['idle']}}}"
        f".pipeline .axis line{{stroke:{of['line']}}}.pipeline .hatch{{stroke:{of['ink']}}}"
        f".pipeline .box rect{{stroke:{of['page']}}}.pipeline .forward rect{{fill:{of['forward']}}}" + "".join(plain)
    )


def _draw_panel(parts: list[str], panel: Panel, scale: float, unit: Unit, top: float) -> float:
    """Draw a panel; returns where the next one begins."""
    parts.append(f'<text class="title" x="{MARGIN}" y="{top + 12:g}">{escape(panel.title)}</text>')
    top += TITLE
    boxes: dict[Kind, list[str]] = {kind: [] for kind in panel.kinds}
    labels: list[str] = []
    for device, stages in panel.lanes.items():
        height = LANE * len(stages)
        parts.append(f'<text x="{MARGIN}" y="{top + 15:g}">device {device}</text>')
        parts.append(_rect(LEFT, top, panel.length * scale, height, ' class="idle"'))
        for stage in stages:
            parts.append(f'<text x="{LEFT - 50}" y="{top + 15:g}">stage {stage}</text>')
            for span in panel.in_lane(device, stage):
                boxes[span.action.kind].append(_box(span, scale, unit, top))
                labels += _label(span, scale, top)
            top += LANE
        top += GAP
    for kind, drawn in boxes.items():
        parts.append(f'<g class="box {CLASSES[kind]}">{"".join(drawn)}</g>')
    parts.append(f'<g class="label">{"".join(labels)}</g>')
    parts += _axis(panel, scale, unit, top - GAP)
    return top + AXIS


def _rect(left: float, top: float, width: float, height: float, more: str) -> str:
    return f'<rect{more} x="{left:.5g}" y="{top:g}" width="{width:.5g}" height="{height:g}"/>'


def _box(span: Timed, scale: float, unit: Unit, top: float) -> str:
    left, right = LEFT + span.begin_s * scale, LEFT + span.end_s * scale
    words = f"{span.action}: {unit.said(span.end_s - span.begin_s)} from {unit.said(span.begin_s)}"
    return (
        f'<rect x="{left:.5g}" y="{top:g}" width="{max(right - left, 0.5):.4g}" height="{LANE}">'
        f"<title>{escape(words)}</title></rect>"
    )


def _label(span: Timed, scale: float, top: float) -> Iterator[str]:
    """The letter and number of an action, or the number alone, if it fits into its box."""
    room = (span.end_s - span.begin_s) * scale - 2
    whole = label_of(span)
    for text in (whole, whole[1:]):
        if text and sum(WIDTHS.get(letter, DIGIT) for letter in text) <= room:
            middle = LEFT + (span.begin_s + span.end_s) * scale / 2
            yield f'<text x="{middle:.5g}" y="{top + 15:g}">{text}</text>'
            return


def _axis(panel: Panel, scale: float, unit: Unit, bottom: float) -> Iterator[str]:
    """Round times below the lanes."""
    per_unit = scale * unit.size
    step = round_step(80 / per_unit)
    yield f'<text x="{MARGIN}" y="{bottom + 15:g}">{unit.name}</text>'
    yield '<g class="axis">'
    for number in range(int(panel.length / unit.size / step + 1e-9) + 1):
        left = LEFT + number * step * per_unit
        yield f'<line x1="{left:.5g}" x2="{left:.5g}" y1="{bottom:g}" y2="{bottom + 4:g}"/>'
        yield f'<text x="{left:.5g}" y="{bottom + 15:g}">{number * step:g}</text>'
    yield "</g>"


def _legend(kinds: Sequence[Kind], top: float) -> Iterator[str]:
    left = float(LEFT)
    for kind in kinds:
        words = f"{LETTERS[kind]} {kind.value}"
        yield f'<g class="box {CLASSES[kind]}">{_rect(left, top, 22, 16, "")}</g>'
        yield f'<text x="{left + 28:g}" y="{top + 12:g}">{words}</text>'
        left += 28 + 18 + len(words) * 6.7
    yield _rect(left, top, 22, 16, ' class="idle"')
    yield f'<text x="{left + 28:g}" y="{top + 12:g}">nothing to do</text>'
