"""What `--dry-run` shows: where every instance runs and what it gets, as a table or as JSON. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from poprun.cli.pages import draw_rows
from poprun.cli.wording import list_ranges
from poprun.launch.command import Launch, environment_of
from poprun.launch.placement import Place

_HEADINGS = ("instance", "host", "cores", "NUMA", "replicas", "IPUs", "device")


def draw_placement(launch: Launch, columns: int | None = None) -> str:
    """The placement as a table, then the environment that all instances share and that of each. No final newline.

    Args:
        launch: what would be run.
        columns: of the page; None: as many as the table takes.
    """
    rows = [_HEADINGS, *(_row(launch, place) for place in launch.places)]
    lines = draw_rows(rows, columns).splitlines()
    return "\n".join([*lines, *_assumptions(launch), "", *_environment_lines(launch)])


def describe_plan(launch: Launch, command: Sequence[str]) -> dict[str, object]:
    """Everything that is decided, in values that JSON has."""
    settings = launch.settings
    return {
        "num_instances": settings.num_instances,
        "num_replicas": settings.num_replicas,
        "ipus_per_replica": settings.ipus_per_replica,
        "num_ilds": settings.domains,
        "hosts": [
            {"name": host.name, "slots": host.slots, "is_this_machine": host.is_this_machine} for host in launch.hosts
        ],
        "instances": [_describe_instance(launch, place) for place in launch.places],
        "program": list(settings.program),
        "command": list(command),
    }


def _row(launch: Launch, place: Place) -> tuple[str, ...]:
    return (
        str(place.index),
        place.host,
        list_ranges(place.cpus) or "any",
        list_ranges(place.nodes) or "any",
        list_ranges(place.replicas),
        list_ranges(_ipus(launch, place)),
        "-" if place.device is None else str(place.device),
    )


def _ipus(launch: Launch, place: Place) -> range:
    """The devices of an instance, counted over all replicas."""
    each = launch.settings.ipus_per_replica
    return range(place.replicas.start * each, place.replicas.stop * each)


def _assumptions(launch: Launch) -> list[str]:
    others = [host.name for host in launch.hosts if not host.is_this_machine]
    if not others or not any(place.cpus for place in launch.places):
        return []
    return [f"The cores of {', '.join(others)} are taken to be like those of this machine."]


def _environment_lines(launch: Launch) -> list[str]:
    each = [environment_of(launch, place) for place in launch.places]
    common = set(each[0].items()).intersection(*(environment.items() for environment in each))
    lines = ["environment of all instances:", *_assignments(each[0], lambda item: item in common)]
    for place, environment in zip(launch.places, each, strict=True):
        own = _assignments(environment, lambda item: item not in common)
        lines += [f"environment of instance {place.index}:", *own] if own else []
    return lines


def _assignments(variables: Mapping[str, str | None], is_wanted: Callable[[tuple[str, str | None]], bool]) -> list[str]:
    wanted = filter(is_wanted, variables.items())
    return [f"  {name} (forwarded)" if value is None else f"  {name}={value}" for name, value in wanted]


def _describe_instance(launch: Launch, place: Place) -> dict[str, object]:
    environment = environment_of(launch, place)
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
