"""The profiler of JAX, which sees its threads, XLA's and what its devices run."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import final

import jax

from popdist.timeline.profiles.profiler import Profiler

_SUFFIX = ".trace.json.gz"


@final
class JaxProfiler(Profiler):
    """See https://docs.jax.dev/en/latest/profiling.html; calls of Python functions, which cost much, are not recorded.

    XLA's own file, which TensorBoard and XProf read, lies beside the one that is returned.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def start(self) -> None:
        """See `Profiler`."""
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        jax.profiler.start_trace(self._folder, profiler_options=options)

    def marker(self, name: str) -> AbstractContextManager[object]:
        """See `Profiler`."""
        return jax.profiler.TraceAnnotation(name)

    def stop(self) -> Path:
        """See `Profiler`."""
        jax.profiler.stop_trace()
        for file in self._folder.rglob(f"*{_SUFFIX}"):
            return file
        raise FileNotFoundError(f"JAX has written no *{_SUFFIX} into {self._folder}")
