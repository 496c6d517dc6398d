"""The topology table: hosts, IPU-Link domains, instances and replicas, one row each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from poprun.launch.placement import Place

TITLE = "poprun topology"
_LABEL_WIDTH = 11


@dataclass(frozen=True)
class _Cell:
    """A piece of a row: its text and how many replicas lie below it."""

    text: str
    replicas: int


def draw_topology(places: Sequence[Place], columns: int | None = None) -> str:
    """The table as text, without a final newline.

    The layout is that of the original: a label column of 11, then one cell ` n ` per replica, as wide as the
    widest index needs; everything is centred over its replicas, odd space to the right.
    A host whose name is too long is shown as its index in brackets; a legend follows then.

    Args:
        places: of the instances, in their order.
        columns: of the page; what does not fit stands in further tables below. None: as many as it takes.
    """
    total = places[-1].replicas.stop
    cell = len(str(total - 1)) + 2
    hosts = _spans(places, _host_of)
    rows = [
        ("hosts", [_Cell(host, replicas) for host, replicas in hosts]),
        ("ILDs", [_Cell(domain, replicas) for domain, replicas in _spans(places, lambda place: str(place.domain))]),
        ("instances", [_Cell(str(place.index), len(place.replicas)) for place in places]),
        ("replicas", [_Cell(str(replica), 1) for replica in range(total)]),
    ]
    numbers = {host: f"[{index}]" for index, (host, _) in enumerate(hosts)}
    lines: list[str] = []
    for piece in _pieces(places, cell, columns):
        cut = [(label, _cut(cells, piece)) for label, cells in rows]
        cut[0] = ("hosts", [_shorten(each, numbers[each.text], cell) for each in cut[0][1]])
        lines += _frame(cut, len(piece) * (cell + 1) - 1, cell)
    legend = [f" {number} = {host}" for host, number in numbers.items() if any(number in line for line in lines)]
    return "\n".join([*lines, *legend])


def _pieces(places: Sequence[Place], cell: int, columns: int | None) -> list[range]:
    """The replicas of each table: as many as fit, of whole instances where one fits."""
    total, each = places[-1].replicas.stop, len(places[0].replicas)
    most = total if columns is None else max(1, (columns - _LABEL_WIDTH - 2) // (cell + 1))
    if each < most < total:
        most -= most % each
    return [range(start, min(start + most, total)) for start in range(0, total, most)]


def _cut(cells: Sequence[_Cell], piece: range) -> list[_Cell]:
    """What of the cells stands over these replicas."""
    found, start = [], 0
    for each in cells:
        shared = range(max(start, piece.start), min(start + each.replicas, piece.stop))
        if shared:
            found.append(_Cell(each.text, len(shared)))
        start += each.replicas
    return found


def _shorten(host: _Cell, number: str, cell: int) -> _Cell:
    return host if len(host.text) <= host.replicas * (cell + 1) - 1 else _Cell(number, host.replicas)


def _frame(rows: Sequence[tuple[str, Sequence[_Cell]]], width: int, cell: int) -> list[str]:
    whole = _LABEL_WIDTH + 1 + width
    lines = [f" {'=' * whole}", f"|{_centre(TITLE, whole)}|", f"|{'=' * whole}|"]
    rule = f"|{'-' * _LABEL_WIDTH}|{'-' * width}|"
    for label, cells in rows:
        texts = (_centre(each.text, each.replicas * (cell + 1) - 1) for each in cells)
        lines += [f"| {label:<{_LABEL_WIDTH - 1}}|{'|'.join(texts)}|", rule]
    return [*lines[:-1], f" {'-' * whole}"]


def _host_of(place: Place) -> str:
    return place.host


def _spans(places: Sequence[Place], part: Callable[[Place], str]) -> list[tuple[str, int]]:
    """The hosts or domains in order, each with the number of its replicas."""
    counts: dict[str, int] = {}
    for place in places:
        counts[part(place)] = counts.get(part(place), 0) + len(place.replicas)
    return list(counts.items())


def _centre(text: str, width: int) -> str:
    left = (width - len(text)) // 2
    return f"{' ' * left}{text}{' ' * (width - len(text) - left)}"
