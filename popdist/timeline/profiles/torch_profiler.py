"""The profiler of PyTorch, which sees its operators in all threads, and what its devices run."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import final

import torch
from torch.profiler import profile, record_function

from popdist.timeline.profiles.profiler import Profiler

_NAME = "torch.trace.json.gz"


@final
class TorchProfiler(Profiler):
    """See https://docs.pytorch.org/docs/stable/profiler.html; threads of replicas are seen too."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        of_all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        self._profile = profile(experimental_config=of_all_threads)

    def start(self) -> None:
        """See `Profiler`."""
        self._profile.start()

    def marker(self, name: str) -> AbstractContextManager[object]:
        """See `Profiler`."""
        annotation: AbstractContextManager[object] = record_function(name)
        return annotation

    def stop(self) -> Path:
        """See `Profiler`."""
        self._profile.stop()
        self._folder.mkdir(parents=True)
        self._profile.export_chrome_trace(str(self._folder / _NAME))
        return self._folder / _NAME
