"""Curves over the number of hosts, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

Points = Sequence[tuple[float, float]]
"""Pairs of a number of hosts and milliseconds."""


def check_matplotlib() -> None:
    """Raise a ValueError if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ValueError("curves need matplotlib: pip install 'popdist-everywhere[plot]'")


def plot(title: str, curves: Mapping[str, Points], output: Path) -> list[Path]:
    """Write curves as SVG and PNG, with logarithmic axes.

    Args:
        title: Title of the plot.
        curves: Points of each curve, by the name in the legend.
        output: File name; its suffix is replaced.

    Returns:
        The two files.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="hosts", ylabel="ms")
    for number, (name, points) in enumerate(curves.items()):
        hosts, times = zip(*points, strict=True)
        axes.plot(hosts, times, label=name, linewidth=2 * (len(curves) - number))  # no curve hides an earlier one
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.legend()
    files = [output.with_suffix(suffix) for suffix in (".svg", ".png")]
    for file in files:
        figure.savefig(file)
    return files
