"""Runs a profiler in the steps that are wanted, with markers by which its clock is compared with the recording's."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

from popdist.errors import EnvironmentMismatchError
from popdist.timeline.profiles.profiler import Profiler
from popdist.timeline.profiles.wanted import JAX, Wanted

logger = logging.getLogger(__name__)

MARKER = "popdist marker"
_AT_ENDS = 3  # the first one takes long


@final
class Profiling:
    """The instrument that starts a profiler and stops it. What goes wrong with it never disturbs the program.

    A marker is a span of the profile. Between which two times of the recording's clock it was made is noted, in ns:
    so it bounds the difference of both clocks, as an exchange of messages does; see `popdist.timeline.clocks`.

    Args:
        wanted: which profiler, and when.
        folder: of its files; an older one is replaced.
        now_ns: the clock of the recording.
        add: gets what is to be known of a profile when it is merged: first that it has begun, without a file.

    Raises:
        EnvironmentMismatchError: the library of the profiler is not there.
    """

    def __init__(
        self, wanted: Wanted, folder: Path, now_ns: Callable[[], int], add: Callable[[dict[str, Any]], None]
    ) -> None:
        if find_spec(wanted.profiler) is None:
            raise EnvironmentMismatchError(
                f"a profile by {wanted.profiler} is asked for, which this instance cannot import; "
                "install it, or leave the profile out"
            )
        self._wanted = wanted
        self._folder = folder
        self._now_ns = now_ns
        self._add = add
        self._first_step: int | None = None
        self._profiler: Profiler | None = None
        self._is_over = False
        self._markers: list[tuple[int, int]] = []

    def step_begins(self, step: int) -> None:
        """See `collectives.instruments`."""
        if self._is_over:
            return
        if self._first_step is None:
            self._first_step = step
        made = step - self._first_step
        if self._profiler is None and self._wanted.begins_before(made):
            self._try(self._start)
        elif self._profiler is not None and self._wanted.ends_before(made):
            self.close()
        elif self._profiler is not None:
            self._mark(self._profiler)

    def close(self) -> None:
        """Stop the profiler, if it runs, and write what it saw; may be called again."""
        if self._profiler is not None and not self._is_over:
            self._try(self._stop)
        self._is_over = True

    def _start(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        profiler = _open(self._wanted.profiler, self._folder)
        profiler.start()
        self._profiler = profiler
        self._add({"profiler": self._wanted.profiler, "file": "", "markers": []})
        for _ in range(_AT_ENDS):
            self._mark(profiler)

    def _mark(self, profiler: Profiler) -> None:
        before = self._now_ns()
        with profiler.marker(f"{MARKER} {len(self._markers)}"):
            pass
        self._markers.append((before, self._now_ns()))

    def _stop(self) -> None:
        assert self._profiler is not None
        for _ in range(_AT_ENDS):
            self._mark(self._profiler)
        file = self._profiler.stop().relative_to(self._folder.parent)
        self._add({"profiler": self._wanted.profiler, "file": file.as_posix(), "markers": self._markers})

    def _try(self, doing: Callable[[], None]) -> None:
        try:
            doing()
        except (RuntimeError, OSError, ImportError) as error:
            self._is_over = True
            logger.warning("the profiler of %s failed: %s; the program goes on without", self._wanted.profiler, error)


def _open(name: str, folder: Path) -> Profiler:
    """The profiler with one of the names of `PROFILERS`, which writes into this folder.

    Raises:
        ImportError: its library is missing.
    """
    if name == JAX:
        from popdist.timeline.profiles.jax_profiler import JaxProfiler

        return JaxProfiler(folder)
    from popdist.timeline.profiles.torch_profiler import TorchProfiler

    return TorchProfiler(folder)
