"""Curves over the number of hosts, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = Sequence[tuple[float, float]]
"""Pairs of a number of hosts and milliseconds."""


def check_matplotlib() -> None:
    """Raise a ValueError if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ValueError("curves need matplotlib: pip install matplotlib")


_MARKERS = "os^Dv"
_LEAST_COLOUR = "#9aa4ae"
_LEAST_DISTANCE = 0.055
"""The least distance of two names beside the curves, as a part of the height of the axes."""


def plot(title: str, curves: Mapping[str, Points], output: Path) -> list[Path]:
    """Write curves as SVG and PNG, with logarithmic axes.

    The lower bound is a broad grey band. The markers of the other curves alternate, so that equal curves are visible.
    Each name stands at the right end of its curve.

    Args:
        title: Title of the plot.
        curves: Points of each curve, by its name; the first one is a lower bound.
        output: File name; its suffix is replaced.

    Returns:
        The two files.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="hosts", ylabel="time, ms")
    for number, points in enumerate(curves.values()):
        hosts, times = zip(*points, strict=True)
        if number == 0:
            axes.plot(hosts, times, linewidth=9, color=_LEAST_COLOUR, solid_capstyle="butt")
        else:
            marker, every = _MARKERS[number % len(_MARKERS)], (number % 2, 2)
            axes.plot(hosts, times, linewidth=1.8, color=f"C{number}", marker=marker, markersize=7, markevery=every)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    _name(axes, curves)
    files = [output.with_suffix(suffix) for suffix in (".svg", ".png")]
    for file in files:
        figure.savefig(file)
    return files


def _name(axes: Axes, curves: Mapping[str, Points]) -> None:
    """Write the name of each curve beside its right end, or further up if another name stands there."""
    above = -1.0
    to_axes = axes.transData + axes.transAxes.inverted()
    most_hosts = max(points[-1][0] for points in curves.values())
    ends = [
        (float(to_axes.transform(points[-1])[1]), number, name, points[-1][0])
        for number, (name, points) in enumerate(curves.items())
    ]
    for end, number, name, hosts in sorted(ends):
        above = max(end, above + _LEAST_DISTANCE)
        words = name + (f" (to {hosts:g} hosts)" if hosts < most_hosts else "" if number else ": lower bound")
        colour = f"C{number}" if number else _LEAST_COLOUR
        axes.text(1.02, above, words, color=colour, transform=axes.transAxes, va="center", fontweight="bold")
