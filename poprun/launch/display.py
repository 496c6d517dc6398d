"""The display of a launch as tables or JSON: the topology, and each instance's place and environment. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from poprun.cli.wording import draw_rows, list_ranges
from poprun.launch.launch import Launch
from poprun.launch.placement import InstancePlace

TITLE = "poprun topology"
_LABEL_WIDTH = 11
_HEADINGS = ("instance", "host", "cores", "NUMA", "replicas", "IPUs", "device")


@dataclass(frozen=True)
class _Cell:
    """A piece of a row: its text, and the number of replicas below it."""

    text: str
    replicas: int


def draw_topology(places: Sequence[InstancePlace], columns: int | None = None) -> str:
    """Return the topology table as text, without a final newline.

    The layout is the original's: a label column of 11 characters, then a cell ` n ` for each replica, as wide as the
    widest index needs. Texts are centred over their replicas; an odd space goes to the right. If a host name is too
    long, its index in brackets takes its place, and a legend follows the table.

    Args:
        places: The places of the instances, in the order of the instances; spares are listed below the table.
        columns: The width of the page; the rest of a wider table stands in further tables below. None: no limit.
    """
    spares = [f" {_kind_of(place)} {place.index} on host {place.host}" for place in places if place.is_spare]
    places = [place for place in places if not place.is_spare]
    total = places[-1].replicas.stop
    cell = len(str(total - 1)) + 2
    hosts = _spans(places, lambda place: place.host)
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
    return "\n".join([*lines, *legend, *spares])


def _pieces(places: Sequence[InstancePlace], cell: int, columns: int | None) -> list[range]:
    """Return the replicas of each table: as many as fit, in whole instances if one fits."""
    total, each = places[-1].replicas.stop, len(places[0].replicas)
    most = total if columns is None else max(1, (columns - _LABEL_WIDTH - 2) // (cell + 1))
    if each < most < total:
        most -= most % each
    return [range(start, min(start + most, total)) for start in range(0, total, most)]


def _cut(cells: Sequence[_Cell], piece: range) -> list[_Cell]:
    """Return the parts of the cells that lie over the replicas of a piece."""
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


def _spans(places: Sequence[InstancePlace], part: Callable[[InstancePlace], str]) -> list[tuple[str, int]]:
    """Return the hosts or domains in order, each with its number of replicas."""
    counts: dict[str, int] = {}
    for place in places:
        counts[part(place)] = counts.get(part(place), 0) + len(place.replicas)
    return list(counts.items())


def _centre(text: str, width: int) -> str:
    left = (width - len(text)) // 2
    return f"{' ' * left}{text}{' ' * (width - len(text) - left)}"


def draw_placement(launch: Launch, columns: int | None = None) -> str:
    """Draw the placement as a table, then the environment of all instances and of each. No final newline.

    Args:
        launch: The launch to draw.
        columns: The width of the page. None: no limit.
    """
    rows = [_HEADINGS, *(_row(launch, place) for place in launch.places)]
    lines = draw_rows(rows, columns).splitlines()
    return "\n".join([*lines, *_assumptions(launch), "", *_environment_lines(launch)])


def describe_plan(launch: Launch, command: Sequence[str]) -> dict[str, object]:
    """Return all decisions of a launch as JSON values."""
    settings = launch.settings
    return {
        "num_instances": settings.num_instances,
        "num_replicas": settings.num_replicas,
        "ipus_per_replica": settings.ipus_per_replica,
        "num_ilds": settings.domains,
        "hosts": [
            {"name": host.name, "slots": host.slots, "is_this_machine": host.is_this_machine} for host in launch.hosts
        ],
        "instances": [_describe_instance(launch, place) for place in launch.places if not place.is_spare],
        "spares": [
            _describe_instance(launch, place) for place in launch.places if place.is_spare and not place.is_reserve
        ],
        "reserves": [_describe_instance(launch, place) for place in launch.places if place.is_reserve],
        "program": list(settings.program),
        "command": list(command),
    }


def _kind_of(place: InstancePlace) -> str:
    if place.is_reserve:
        return "reserve"
    return "spare" if place.is_spare else "instance"


def _row(launch: Launch, place: InstancePlace) -> tuple[str, ...]:
    return (
        str(place.index),
        place.host,
        list_ranges(place.cpus) or "any",
        list_ranges(place.nodes) or "any",
        _kind_of(place) if place.is_spare else list_ranges(place.replicas),
        "-" if place.is_spare else list_ranges(_ipus(launch, place)),
        "-" if place.device is None else str(place.device),
    )


def _ipus(launch: Launch, place: InstancePlace) -> range:
    """Return the devices of an instance, counted over all replicas of the job."""
    each = launch.settings.ipus_per_replica
    return range(place.replicas.start * each, place.replicas.stop * each)


def _assumptions(launch: Launch) -> list[str]:
    others = [host.name for host in launch.hosts if not host.is_this_machine]
    if not others or not any(place.cpus for place in launch.places):
        return []
    return [f"The cores of {', '.join(others)} are assumed to be like those of this machine."]


def _environment_lines(launch: Launch) -> list[str]:
    each = [variables.every for variables in launch.variables]
    common = set(each[0].items()).intersection(*(environment.items() for environment in each))
    lines = ["environment of all instances:", *_assignments(each[0], lambda item: item in common)]
    for place, environment in zip(launch.places, each, strict=True):
        own = _assignments(environment, lambda item: item not in common)
        lines += [f"environment of {_kind_of(place)} {place.index}:", *own] if own else []
    return lines


def _assignments(variables: Mapping[str, str | None], is_wanted: Callable[[tuple[str, str | None]], bool]) -> list[str]:
    wanted = filter(is_wanted, variables.items())
    return [f"  {name} (forwarded)" if value is None else f"  {name}={value}" for name, value in wanted]


def _describe_instance(launch: Launch, place: InstancePlace) -> dict[str, object]:
    environment = launch.variables[place.index].every
    return {
        "index": place.index,
        "host": place.host,
        "local_index": place.local_index,
        "ild": place.domain,
        "replicas": list(place.replicas),
        "ipus": list(_ipus(launch, place)),
        "device": place.device,
        "cpus": list(place.cpus),
        "numa_nodes": list(place.nodes),
        "environment": {name: value for name, value in environment.items() if value is not None},
        "forwarded": [name for name, value in environment.items() if value is None],
    }
