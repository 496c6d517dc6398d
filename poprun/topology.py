"""The topology table: hosts, IPU-Link domains, instances and replicas, one row each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    widest index needs; everything is centred over its replicas, odd space to the right.
    A host whose name is too long is shown as its index in brackets; a legend follows then.
    """
    total = places[-1].replicas.stop
    cell = len(str(total - 1)) + 2
    hosts = _host_cells(places, cell)
    rows = [
        ("hosts", hosts),
        ("ILDs", [_Cell(domain, replicas) for domain, replicas in _spans(places, lambda place: str(place.domain))]),
        ("instances", [_Cell(str(place.index), len(place.replicas)) for place in places]),
        ("replicas", [_Cell(str(replica), 1) for replica in range(total)]),
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
    for index, (host, replicas) in enumerate(_spans(places, _host_of)):
        fits = len(host) <= replicas * (cell + 1) - 1
        cells.append(_Cell(host if fits else f"[{index}]", replicas))
    return cells


def _host_of(place: Place) -> str:
    return place.host


def _spans(places: Sequence[Place], part: Callable[[Place], str]) -> list[tuple[str, int]]:
    """The hosts or domains in order, each with the number of its replicas."""
    counts: dict[str, int] = {}
    for place in places:
        counts[part(place)] = counts.get(part(place), 0) + len(place.replicas)
    return list(counts.items())


def _legend(places: Sequence[Place], hosts: Sequence[_Cell]) -> list[str]:
    names = zip(_spans(places, _host_of), hosts, strict=True)
    return [f" {cell.text} = {name}" for (name, _), cell in names if cell.text != name]


def _centre(text: str, width: int) -> str:
    left = (width - len(text)) // 2
    return f"{' ' * left}{text}{' ' * (width - len(text) - left)}"
