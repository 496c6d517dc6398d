"""The native kernel of the exchange, which is optional: without it NumPy does the same work, with the same bits."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol, cast

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


class NativePlan(Protocol):
    """A reduction through a window of which everything but the arrays is known."""

    def take(self, contributions: Sequence[np.ndarray], out: np.ndarray, /) -> bool:
        """Hold the arrays of a call until `run` or `drop`; return False if they are not as planned."""

    def drop(self) -> None:
        """Release the arrays of a call that will not run."""

    def run(self, sequence: int, chunk: int, moves: Callable[[int], None] | None, /) -> int:
        """Carry out the reduction; return DONE, or DIFFERENT_CALLS or OTHER_COUNTS after the exchange alone."""


class Kernel(Protocol):
    """The module `collectives.native._kernel`. Its numbers are those of `collectives.shared_memory.segment`."""

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
        self, memory: memoryview, rank: int, size: int, spin_ns: int, patient: Callable[[int, int], None]
    ) -> NativeWindow:
        """Return the words at the start of `memory`; `patient(index, value)` takes over waits of a millisecond."""

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
    return cast("Kernel", _kernel)
