"""Profiles of some steps, made by the profiler of JAX or PyTorch, for the timeline of the job.

A profiler's library is loaded when the profiler is made.
"""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import final

from popdist.errors import EnvironmentMismatchError

logger = logging.getLogger(__name__)

MARKER = "popdist marker"
_AT_ENDS = 3  # number of markers at each end; one is not enough, because the first one takes long

JAX, TORCH = "jax", "torch"
PROFILERS = (JAX, TORCH)
FORM = "jax or torch, then :STEPS or :all, then @FIRST, as in jax:20@100"
USUAL_STEPS, USUAL_FIRST = 5, 2
_ALL = "all"
_OF_JAX, _OF_TORCH = ".trace.json.gz", "torch.trace.json.gz"  # suffix of JAX's file, name of PyTorch's file
_FORM = re.compile(r"(?P<profiler>\w+)(:(?P<steps>\w+))?(@(?P<first>\d+))?")


@dataclass(frozen=True)
class WantedProfile:
    """A requested profile.

    Attributes:
        profiler: Profiler, one of `PROFILERS`.
        first: Number of steps before the profile begins.
        steps: Number of profiled steps; None: all that follow.
    """

    profiler: str
    first: int = USUAL_FIRST
    steps: int | None = USUAL_STEPS

    @classmethod
    def parse(cls, text: str) -> WantedProfile:
        """Parse a profile in the syntax `FORM`. By default the first two steps, which compile, are left out.

        Raises:
            ValueError: The text does not follow the syntax.
        """
        found = _FORM.fullmatch(text)
        if found is None or found["profiler"] not in PROFILERS:
            raise ValueError(f"{text!r} names no profile; write {FORM}")
        steps = found["steps"] or str(USUAL_STEPS)
        if steps != _ALL and (not steps.isdecimal() or not int(steps)):
            raise ValueError(f"{text!r} asks for {steps} steps, but a profile has at least 1; write a number or {_ALL}")
        first = found["first"] or (0 if steps == _ALL else USUAL_FIRST)
        return cls(found["profiler"], int(first), None if steps == _ALL else int(steps))

    def begins_before(self, steps_made: int) -> bool:
        """Return whether the profile begins before the step that follows `steps_made` steps."""
        return steps_made >= self.first

    def ends_before(self, steps_made: int) -> bool:
        """Return whether the profile ends before the step that follows `steps_made` steps."""
        return self.steps is not None and steps_made >= self.first + self.steps


class Profiler(ABC):
    """A profiler, started and stopped once: `start`, any number of `marker`s, `stop`.

    Errors of the library are raised as RuntimeError, errors of files as OSError. After an error it is not used again.

    Args:
        folder: Folder of the output, which does not exist yet.
    """

    @abstractmethod
    def __init__(self, folder: Path) -> None: ...

    @abstractmethod
    def start(self) -> None:
        """Start to record this process."""

    @abstractmethod
    def marker(self, name: str) -> AbstractContextManager[object]:
        """Return a context manager that is recorded as a span of this name."""

    @abstractmethod
    def stop(self) -> Path:
        """Stop recording, and write the profile.

        Returns:
            Path of the profile, in the format of chrome://tracing, compressed by gzip.
        """


@final
class JaxProfiler(Profiler):
    """JAX's profiler (https://docs.jax.dev/en/latest/profiling.html), without the costly tracing of Python calls.

    XLA's own file for TensorBoard and XProf lies beside the returned file.
    """

    def __init__(self, folder: Path) -> None:
        import jax

        self._folder = folder
        self._jax = jax.profiler

    def start(self) -> None:
        options = self._jax.ProfileOptions()
        options.python_tracer_level = 0
        self._jax.start_trace(self._folder, profiler_options=options)

    def marker(self, name: str) -> AbstractContextManager[object]:
        return self._jax.TraceAnnotation(name)

    def stop(self) -> Path:
        self._jax.stop_trace()
        for file in self._folder.rglob(f"*{_OF_JAX}"):
            return file
        raise FileNotFoundError(f"JAX has written no *{_OF_JAX} into {self._folder}")


@final
class TorchProfiler(Profiler):
    """PyTorch's profiler (https://docs.pytorch.org/docs/stable/profiler.html), including the threads of replicas."""

    def __init__(self, folder: Path) -> None:
        import torch

        self._folder = folder
        self._torch = torch.profiler
        of_all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        self._profile = self._torch.profile(experimental_config=of_all_threads)

    def start(self) -> None:
        self._profile.start()

    def marker(self, name: str) -> AbstractContextManager[object]:
        annotation: AbstractContextManager[object] = self._torch.record_function(name)
        return annotation

    def stop(self) -> Path:
        self._profile.stop()
        self._folder.mkdir(parents=True)
        self._profile.export_chrome_trace(str(self._folder / _OF_TORCH))
        return self._folder / _OF_TORCH


@final
class Profiling:
    """The instrument that starts and stops a profiler. Errors at its start and stop do not disturb the program.

    A marker is a short span in the profile. The recording's clock is read before and after it, in ns. So a marker
    bounds the difference of the two clocks, as an exchange of messages does (`popdist.timeline.clocks`).

    Args:
        wanted: Requested profile.
        folder: Folder of the profiler's files; an older folder is replaced.
        now_ns: Clock of the recording.
        add: Function that receives facts for merging: first the begin of the profile, without a file, then its result.

    Raises:
        EnvironmentMismatchError: The library of the profiler is not installed.
    """

    def __init__(
        self, wanted: WantedProfile, folder: Path, now_ns: Callable[[], int], add: Callable[[dict[str, object]], None]
    ) -> None:
        from importlib.util import find_spec  # imported here because `import popdist` and poprun load this module

        if find_spec(wanted.profiler) is None:
            raise EnvironmentMismatchError(
                f"a profile by {wanted.profiler} was asked for, but this instance cannot import it; "
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
        """Stop the profiler if it runs, and write its profile; repeated calls do nothing."""
        if self._profiler is not None and not self._is_over:
            self._try(self._stop)
        self._is_over = True

    def _start(self) -> None:
        import shutil

        shutil.rmtree(self._folder, ignore_errors=True)
        profiler = (JaxProfiler if self._wanted.profiler == JAX else TorchProfiler)(self._folder)
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
