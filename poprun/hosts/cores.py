"""The cores that this machine lets us use, in the order in which they are given out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poprun.hosts import survey_script


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
    return tuple(Core(*each) for each in survey_script.cores())


def divide_cores(cores: Sequence[Core], count: int) -> tuple[tuple[Core, ...], ...]:
    """Divide the cores into `count` disjoint blocks of equal size or nearly so, in order.

    Physical cores are kept whole where there are enough of them. Because the cores are sorted by NUMA node,
    the nodes are divided among the blocks wherever their numbers divide.

    Returns:
        The blocks; empty ones (run anywhere) if there are more than cores.
    """
    units = _units(cores, count)
    if not units:
        return ((),) * count
    edges = [index * len(units) // count for index in range(count + 1)]
    blocks = (units[low:high] for low, high in zip(edges, edges[1:], strict=False))
    return tuple(tuple(core for unit in block for core in unit) for block in blocks)


def deal_cores(cores: Sequence[Core], count: int) -> tuple[tuple[Core, ...], ...]:
    """Give one core to each of `count` instances in turn, as `mpirun --bind-to core` does.

    Returns:
        A core with its threads for each, or a thread where cores are too few; nothing (run anywhere) if those are.
    """
    return tuple(_units(cores, count)[:count]) or ((),) * count


def deal_sockets(cores: Sequence[Core], count: int) -> tuple[tuple[Core, ...], ...]:
    """Give all cores of one processor to each of `count` instances in turn, as `mpirun --map-by socket` does."""
    sockets: dict[int, list[Core]] = {}
    for core in cores:
        sockets.setdefault(core.package, []).append(core)
    blocks = [tuple(block) for _, block in sorted(sockets.items())]
    return tuple(blocks[index % len(blocks)] for index in range(count))


def _units(cores: Sequence[Core], count: int) -> list[tuple[Core, ...]]:
    """What is not divided any further among `count` instances: cores, or else threads; empty if those are too few."""
    whole: dict[tuple[int, int, int], list[Core]] = {}
    for core in cores:
        whole.setdefault((core.node, core.package, core.core), []).append(core)
    units: list[tuple[Core, ...]] = [tuple(threads) for threads in whole.values()]
    if len(units) < count:
        units = [(core,) for core in cores]
    return units if len(units) >= count else []
