"""How a communicator is put together from what a backend has: links between its ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from collectives.communicator import Communicator
from collectives.instruments import Instruments
from collectives.named import NamedQueue
from collectives.ring.link import Link
from collectives.ring.transport import RingTransport
from collectives.transport import Transport
from collectives.waiting import SPINS, Limits, Watch
from collectives.window.layout import channel_bytes
from collectives.window.shared_memory import SHARED_MEMORY_DIR, share_segment
from collectives.window.transport import WindowTransport

logger = logging.getLogger(__name__)

MECHANISMS = ("auto", "window", "ring")

MakeSubgroup = Callable[[Sequence[int]], Communicator]


@dataclass(frozen=True)
class Settings:
    """What all backends take.

    Attributes:
        limits: when waits warn and when they give up, and by what clock.
        progress: those that see what this rank does.
        mechanism: "window" (shared memory), "ring", or "auto": the window where all ranks share a host whose shared
            memory is large enough, else the ring.
        shared_memory_dir: where shared memory is made.
        spins: how often a wait polls before it offers its core to others.
    """

    limits: Limits = field(default_factory=Limits)
    progress: Instruments = field(default_factory=Instruments)
    mechanism: str = "auto"
    shared_memory_dir: Path = SHARED_MEMORY_DIR
    spins: int = SPINS

    def __post_init__(self) -> None:
        if self.mechanism not in MECHANISMS:
            raise ValueError(f"mechanism is {self.mechanism!r}; use one of {', '.join(MECHANISMS)}")


@dataclass(frozen=True)
class Group:
    """The ranks of a communicator, seen from one of them.

    Attributes:
        rank: this rank.
        names: what each rank is called in messages.
        instances: the instance behind each rank, for instruments.
        lost: says why it is useless to wait for some ranks, "" while it is not.
    """

    rank: int
    names: Sequence[str]
    instances: Sequence[int]
    lost: Callable[[Sequence[int]], str] = lambda awaited: ""

    def watch(self, settings: Settings) -> Watch:
        """How one channel of this group waits."""
        watch = Watch(self.rank, self.names, self.instances, settings.limits, settings.progress, settings.spins)
        watch.lost = self.lost
        return watch


def assemble(
    settings: Settings, group: Group, links: tuple[Link, Link], share_host: bool, make_subgroup: MakeSubgroup
) -> Communicator:
    """A communicator over two independent links, for the synchronous and for the named collectives; collective.

    Args:
        settings: as all ranks have them.
        group: who is there.
        links: connected to all ranks of the group.
        share_host: whether all ranks run on one host, so that shared memory is worth a try.
        make_subgroup: connects some of the ranks.

    Raises:
        RuntimeError: if the window was asked for but cannot be had.
    """
    watches = (group.watch(settings), group.watch(settings))
    for link, watch in zip(links, watches, strict=True):
        watch.pause = link.pause
    rings = [RingTransport(link, watch) for link, watch in zip(links, watches, strict=True)]
    windows = _open_windows(settings, rings[0], watches) if share_host and settings.mechanism != "ring" else None
    if windows is None and settings.mechanism == "window":
        raise RuntimeError(
            f"mechanism 'window' needs all ranks on one host and room in {settings.shared_memory_dir}; "
            "use 'auto' or 'ring', or enlarge it"
        )
    if windows:
        for link in links:
            link.close()
    main, named = windows or rings
    mechanism = "window" if windows else "ring"
    logger.debug("%s: %d ranks, %s", group.names[group.rank], len(group.names), mechanism)
    queue = NamedQueue(named, watches[1])
    return Communicator(main, watches[0], queue, settings.progress, make_subgroup, mechanism)


def _open_windows(
    settings: Settings, transport: Transport, watches: tuple[Watch, Watch]
) -> tuple[Transport, Transport] | None:
    channel = channel_bytes(transport.size)
    segment = share_segment(transport, 2 * channel, settings.shared_memory_dir)
    if segment is None:
        return None
    memory = memoryview(segment)
    main, named = (
        WindowTransport(
            memory[number * channel : (number + 1) * channel],
            transport.rank,
            transport.size,
            watch,
            settings.shared_memory_dir,
        )
        for number, watch in enumerate(watches)
    )
    return main, named
