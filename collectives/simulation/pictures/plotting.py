"""Curves over numbers of hosts, both axes logarithmic, as SVG and as PNG; without any library for it."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from xml.sax.saxutils import escape

import numpy as np

from collectives.simulation.pictures.lettering import GLYPH_HEIGHT, GLYPH_WIDTH, glyph

WIDTH, HEIGHT = 760, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 200, 40, 50
_COLOURS = ("#888888", "#c0392b", "#e67e22", "#2471a3", "#1e8449", "#7d3c98")
_INK = "#333333"
_GRID = "#dddddd"


@dataclass(frozen=True)
class Curve:
    """A name and points.

    Attributes:
        name: for the legend.
        points: hosts and milliseconds.
    """

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class _Line:
    points: tuple[tuple[float, float], ...]
    colour: str
    thickness: int = 1


@dataclass(frozen=True)
class _Text:
    place: tuple[float, float]
    words: str
    colour: str = _INK
    is_behind: bool = False  # it ends at its place


def _drawn(title: str, curves: Sequence[Curve]) -> Iterator[_Line | _Text]:
    """What is to be seen, in pixels from the upper left corner."""
    points = [point for curve in curves for point in curve.points]
    hosts, times = [math.log2(host) for host, _ in points], [math.log10(max(time, 1e-6)) for _, time in points]
    first, last = min(hosts), max(max(hosts), min(hosts) + 1)
    low, high = math.floor(min(times)), max(math.ceil(max(times)), math.floor(min(times)) + 1)

    def place(host: float, time: float) -> tuple[float, float]:
        across = _LEFT + (host - first) / (last - first) * (WIDTH - _LEFT - _RIGHT)
        return across, HEIGHT - _BOTTOM - (time - low) / (high - low) * (HEIGHT - _TOP - _BOTTOM)

    yield _Text((_LEFT, 18), title)
    for power in range(math.ceil(first), math.floor(last) + 1):
        yield _Line((place(power, low), place(power, high)), _GRID)
        across, below = place(power, low)
        yield _Text((across + 3 * len(str(2**power)), below + 16), str(2**power), is_behind=True)
    for power in range(low, high + 1):
        yield _Line((place(first, power), place(last, power)), _GRID)
        across, below = place(first, power)
        yield _Text((across - 6, below + 4), f"{10.0**power:g} ms", is_behind=True)
    yield _Text((_LEFT, HEIGHT - 12), "hosts")
    for number, curve in enumerate(curves):
        colour = _COLOURS[number % len(_COLOURS)]
        thickness = 2 * (len(curves) - number)  # a curve that lies on an earlier one leaves its edges to be seen
        way = tuple(place(math.log2(host), math.log10(max(time, 1e-6))) for host, time in curve.points)
        yield _Line(way, colour, thickness)
        legend = (WIDTH - _RIGHT + 14, _TOP + 20 * number)
        yield _Line((legend, (legend[0] + 20, legend[1])), colour, thickness)
        yield _Text((legend[0] + 26, legend[1] + 4), curve.name)


def svg_of(title: str, curves: Sequence[Curve]) -> str:
    """The text of an SVG file."""
    made = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for each in _drawn(title, curves):
        if isinstance(each, _Line):
            way = " ".join(f"{across:.1f},{below:.1f}" for across, below in each.points)
            made.append(
                f'<polyline points="{way}" fill="none" stroke="{each.colour}" stroke-width="{each.thickness}"/>'
            )
        else:
            anchor = ' text-anchor="end"' if each.is_behind else ""
            across, below = each.place
            words = escape(each.words)
            made.append(f'<text x="{across:.1f}" y="{below:.1f}" fill="{each.colour}"{anchor}>{words}</text>')
    return "\n".join([*made, "</svg>", ""])


def png_of(title: str, curves: Sequence[Curve]) -> bytes:
    """The bytes of a PNG file."""
    image = np.full((HEIGHT, WIDTH, 3), 255, np.uint8)
    for each in _drawn(title, curves):
        if isinstance(each, _Line):
            _draw_line(image, each)
        else:
            _draw_text(image, each)
    rows = np.concatenate([np.zeros((HEIGHT, 1), np.uint8), image.reshape(HEIGHT, -1)], axis=1)
    head = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def _colour(text: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(text[1:]))


def _draw_line(image: np.ndarray, line: _Line) -> None:
    for (across, below), (to_across, to_below) in zip(line.points, line.points[1:], strict=False):
        steps = int(2 * max(abs(to_across - across), abs(to_below - below))) + 1
        columns = np.linspace(across, to_across, steps).round().astype(int)
        rows = np.linspace(below, to_below, steps).round().astype(int)
        brush = range(-(line.thickness // 2), (line.thickness + 1) // 2)
        for down, right in product(brush, brush):
            image[np.clip(rows + down, 0, HEIGHT - 1), np.clip(columns + right, 0, WIDTH - 1)] = _colour(line.colour)


def _draw_text(image: np.ndarray, text: _Text) -> None:
    step = GLYPH_WIDTH + 1
    across, below = round(text.place[0]), round(text.place[1]) - GLYPH_HEIGHT
    across -= step * len(text.words) if text.is_behind else 0
    for number, letter in enumerate(text.words):
        column = across + number * step
        here = image[max(0, below) : below + GLYPH_HEIGHT, max(0, column) : column + GLYPH_WIDTH]
        shape = glyph(letter)[: here.shape[0], : here.shape[1]]
        here[shape] = _colour(text.colour)
