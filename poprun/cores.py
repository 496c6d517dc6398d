"""The cores that this machine lets us use, in the order in which they are given out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_NODES = Path("/sys/devices/system/node")
_CPUS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, order=True)
class Core:
    """One hardware thread. Sorting brings the threads of a core, and the cores of a NUMA node, together.

    Attributes:
        node: the NUMA node whose memory is near.
        package: the processor.
        core: the physical core inside the processor.
        cpu: the number that the kernel uses.
    """

    node: int
    package: int
    core: int
    cpu: int


def usable_cores() -> tuple[Core, ...]:
    """The cores that this process may run on, sorted; where the machine tells nothing, all on one node."""
    nodes = _node_of_each_cpu()
    return tuple(sorted(_describe(cpu, nodes.get(cpu, 0)) for cpu in os.sched_getaffinity(0)))


def divide_cores(cores: Sequence[Core], count: int) -> tuple[tuple[int, ...], ...]:
    """Divide the cores into `count` disjoint blocks of equal size or nearly so, in order.

    Physical cores are kept whole where there are enough of them. Because the cores are sorted by NUMA node,
    the nodes are divided among the blocks wherever their numbers divide.

    Returns:
        For each block the numbers of its CPUs; empty blocks (run anywhere) if there are more than cores.
    """
    whole = _physical_cores(cores)
    units = whole if len(whole) >= count else [(core.cpu,) for core in cores]
    if len(units) < count:
        return ((),) * count
    edges = [index * len(units) // count for index in range(count + 1)]
    blocks = (units[low:high] for low, high in zip(edges, edges[1:], strict=False))
    return tuple(tuple(sorted(cpu for unit in block for cpu in unit)) for block in blocks)


def format_cpus(cpus: Iterable[int]) -> str:
    """CPU numbers as the kernel lists them: `0-3,8`."""
    ranges: list[tuple[int, int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], cpu)
        else:
            ranges.append((cpu, cpu))
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in ranges)


def parse_cpus(text: str) -> tuple[int, ...]:
    """The CPU numbers in a list such as `0-3,8`."""
    bounds = (part.partition("-")[::2] for part in text.strip().split(",") if part)
    return tuple(cpu for low, high in bounds for cpu in range(int(low), int(high or low) + 1))


def _physical_cores(cores: Sequence[Core]) -> list[tuple[int, ...]]:
    threads: dict[tuple[int, int, int], list[int]] = {}
    for core in cores:
        threads.setdefault((core.node, core.package, core.core), []).append(core.cpu)
    return [tuple(cpus) for cpus in threads.values()]


def _node_of_each_cpu() -> dict[int, int]:
    nodes = {}
    for directory in _NODES.glob("node[0-9]*"):
        for cpu in parse_cpus(_read(directory / "cpulist")):
            nodes[cpu] = int(directory.name[4:])
    return nodes


def _describe(cpu: int, node: int) -> Core:
    topology = _CPUS / f"cpu{cpu}" / "topology"
    package = _read(topology / "physical_package_id").strip()
    core = _read(topology / "core_id").strip()
    return Core(node, int(package or 0), int(core or cpu), cpu)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
