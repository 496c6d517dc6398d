"""The topology table: hosts, IPU-Link domains, instances and replicas, one row each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poprun.placement import Place

TITLE = "poprun topology"
_LABEL_WIDTH = 11


@dataclass(frozen=True)
class _Cell:
    """A piece of a row: its text and how many replicas lie below it."""

    text: str
    replicas: int


def draw_topology(places: Sequence[Place]) -> str:
    """The table as text, without a final newline.

    The layout is that of the original: a label column of 11, then one cell ` n ` per replica, as wide as the
    widest index needs; hosts, domains and instances are centred over their replicas, odd space to the right.
    A host whose name is too long is shown as its index in brackets; a legend follows then.
    """
    total = places[-1].replicas.stop
    cell = len(str(total - 1)) + 2
    hosts = _host_cells(places, cell)
    rows = [
        ("hosts", hosts),
        ("ILDs", [_Cell("0", total)]),
        ("instances", [_Cell(str(place.index), len(place.replicas)) for place in places]),
        ("replicas", [_Cell(f"{replica:>{cell - 2}}", 1) for replica in range(total)]),
    ]
    return "\n".join([*_frame(rows, total * (cell + 1) - 1, cell), *_legend(places, hosts)])


def _frame(rows: Sequence[tuple[str, Sequence[_Cell]]], width: int, cell: int) -> list[str]:
    whole = _LABEL_WIDTH + 1 + width
    lines = [f" {'=' * whole}", f"|{_centre(TITLE, whole)}|", f"|{'=' * whole}|"]
    rule = f"|{'-' * _LABEL_WIDTH}|{'-' * width}|"
    for label, cells in rows:
        texts = (_centre(each.text, each.replicas * (cell + 1) - 1) for each in cells)
        lines += [f"| {label:<{_LABEL_WIDTH - 1}}|{'|'.join(texts)}|", rule]
    return [*lines[:-1], f" {'-' * whole}"]


def _host_cells(places: Sequence[Place], cell: int) -> list[_Cell]:
    cells = []
    for index, (host, replicas) in enumerate(_replicas_of_hosts(places).items()):
        fits = len(host) + 2 <= replicas * (cell + 1) - 1
        cells.append(_Cell(host if fits else f"[{index}]", replicas))
    return cells


def _replicas_of_hosts(places: Sequence[Place]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for place in places:
        counts[place.host] = counts.get(place.host, 0) + len(place.replicas)
    return counts


def _legend(places: Sequence[Place], hosts: Sequence[_Cell]) -> list[str]:
    names = zip(_replicas_of_hosts(places), hosts, strict=True)
    return [f" {cell.text} = {name}" for name, cell in names if cell.text != name]


def _centre(text: str, width: int) -> str:
    left = (width - len(text)) // 2
    return f"{' ' * left}{text}{' ' * (width - len(text) - left)}"
