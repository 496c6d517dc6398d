"""The native kernel of the exchange, which is optional: without it NumPy does the same work, with the same bits."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Protocol, cast
from zlib import crc32

import numpy as np

logger = logging.getLogger(__name__)

NATIVE = "POPDIST_NATIVE"
"""`0` turns the native kernel of the exchange off; NumPy does its work, with the same bits. Default: `1`."""


class NativeWindow(Protocol):
    """The words of a window, as one rank announces and awaits them."""

    def announce(self, word: int, value: int, /) -> None:
        """Set one of this rank's words, after all earlier writes are visible."""

    def await_all(self, word: int, value: int, /) -> None:
        """Wait until the word of every other rank has reached `value`."""

    def await_rank(self, rank: int, word: int, value: int, /) -> None:
        """Wait until the word of one rank has reached `value`."""

    def pause(self, index: int, value: int, seconds: float, /) -> None:
        """Sleep until the word at `index` has reached `value`, or the seconds have passed."""


class NativePlan(Protocol):
    """A reduction through a window of which everything but the arrays is known."""

    def take(self, contributions: Sequence[np.ndarray], out: np.ndarray, /) -> bool:
        """Hold the arrays of a call until `run` or `drop`; return False if they are not as planned."""

    def taken(self) -> list[np.ndarray]:
        """Return the arrays that are held: the contributions, then the result."""

    def is_apart(self, plans: list[NativePlan], /) -> bool:
        """Return whether the result shares no memory with arrays that other plans have taken."""

    def drop(self) -> None:
        """Release the arrays of a call that will not run."""

    def run(self, sequence: int, chunk: int, moves: Callable[[int], None] | None, /) -> int:
        """Carry out the reduction, and return DONE.

        Return DIFFERENT_CALLS or OTHER_COUNTS after the exchange alone: nothing was written, and the arrays are held.
        """


class Kernel(Protocol):
    """The module `collectives.native._kernel`. Its numbers are those of `collectives.shared_memory.segment`."""

    MOST_ROWS: int
    DONE: int
    DIFFERENT_CALLS: int
    OTHER_COUNTS: int
    INLINE: int
    STAGED: int
    CHUNKED: int

    def combine(self, steps: bytes, sources: Sequence[np.ndarray], out: np.ndarray, count: int, /) -> bool:
        """Add arrays in the order of `steps` into `out`, as a mean over `count` if it is not 0.

        Return False, with nothing changed, if the arrays are not plain ones of float32 or float64, in a list or tuple,
        or if `out` overlaps one of them but is not that one.
        """

    def Window(  # noqa: N802 - a class of the module
        self, memory: memoryview, rank: int, size: int, spin_ns: int, patient: Callable[[NativeWindow, int, int], None]
    ) -> NativeWindow:
        """Return the words at the start of `memory`; `patient(window, index, value)` takes over after a millisecond."""

    def Plan(self, **facts: object) -> NativePlan:  # noqa: N802 - a class of the module
        """Return a plan; the names of `facts` are those in `kernel.c`."""


@cache
def kernel() -> Kernel | None:
    """Return the native kernel; None if it is turned off, or if it was not built, which is logged once."""
    if os.environ.get(NATIVE, "1") == "0":
        return None
    try:
        from collectives.native import _kernel  # type: ignore[attr-defined]  # compiled from native/kernel.c
    except ImportError as error:
        logger.info("the exchange runs without its native kernel, which was not built here (%s)", error)
        return None
    if not _is_current(_kernel):
        logger.info("the exchange runs without its native kernel, built from another source; install the project again")
        return None
    return cast("Kernel", _kernel)


def _is_current(module: ModuleType) -> bool:
    """Return whether the module was built from the source beside it; an installed wheel has no source."""
    source = Path(module.__file__ or "").with_name("kernel.c")
    return not source.exists() or getattr(module, "SOURCE_CRC32", None) == crc32(source.read_bytes())
