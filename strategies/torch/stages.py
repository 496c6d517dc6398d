"""Which stage of a pipeline each block of a forward pass belongs to, and who is told when one begins."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from strategies.pipelines.schedules import PipelineSchedule


class Placing(Protocol):
    """Finds the stage of each block, as forward passes meet them; may learn while the first one runs."""

    def of(self, name: str, ipu: int | None) -> tuple[int, int]:
        """The number of the stage of a block, and its device.

        Args:
            name: of the block.
            ipu: what the block says of the device.

        Raises:
            StrategyError: if there is none.
        """

    def unmet(self) -> list[str]:
        """The names of blocks that are expected, and were not met."""


class Watcher(Protocol):
    """Who is told of the blocks that a forward pass enters, in its thread."""

    def begin(self, name: str, ipu: int | None) -> None:
        """A block begins, inside of another one or behind it."""

    def end(self) -> None:
        """The block of a `with` statement ends, and the one around it goes on."""


@dataclass(frozen=True)
class Pipeline:
    """How the stages of a module run on simulated devices.

    Attributes:
        placing: makes what finds the stages.
        schedule: which stage works on which micro-batch when.
        needs_full: whether there have to be at least as many micro-batches as stages.
    """

    placing: Callable[[], Placing]
    schedule: PipelineSchedule | str = PipelineSchedule.OneForwardOneBackward
    needs_full: bool = True


class _OfThread(threading.local):
    watcher: Watcher | None = None
    next_id = 0


_of_thread = _OfThread()


def watch(watcher: Watcher | None) -> None:
    """Have somebody told of the blocks of this thread; None: nobody."""
    _of_thread.watcher, _of_thread.next_id = watcher, 0


def number_from_zero() -> None:
    """Begin to number blocks without a name."""
    _of_thread.next_id = 0


def begin_block(name: str | None, ipu: int | None) -> None:
    """A block begins; without a name it gets the number of such blocks before."""
    if _of_thread.watcher is None:
        return
    if name is None:
        name, _of_thread.next_id = str(_of_thread.next_id), _of_thread.next_id + 1
    _of_thread.watcher.begin(name, ipu)


def end_block() -> None:
    """The block of a `with` statement ends."""
    if _of_thread.watcher is not None:
        _of_thread.watcher.end()
