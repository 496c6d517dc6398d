"""A worker of gpu.py: one process of a case, which makes steps on request.

usage: gpu_rank.py SOCKET CASE
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import control
import timing  # noqa: F401 - timing makes the project importable
from gpu_task import WARM_UP_STEPS, GpuCase, GpuSteps, rank


class Chosen(logging.Handler):
    """A handler that keeps the exchange's word, which the project logs when it chooses the exchange."""

    word = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the word of `exchange WORD: ...`."""
        kind, _, rest = record.getMessage().partition(" ")
        if kind == "exchange" and ":" in rest:
            self.word = rest.partition(":")[0]


class GpuWorker:
    """A worker with the compiled steps of a case, after its warm-up."""

    def __init__(self, case: GpuCase) -> None:
        self._chosen = Chosen()
        logger = logging.getLogger("strategies.exchange")
        logger.setLevel(logging.INFO)
        logger.addHandler(self._chosen)
        self._steps: GpuSteps = import_module(f"gpu_{case.framework}").steps_of(case)
        for _ in range(WARM_UP_STEPS):
            loss = self._steps.step()
        self._steps.wait()
        float(loss)
        self._fingerprint = self._steps.fingerprint()

    def facts(self) -> dict[str, Any]:
        """Return the device, the fingerprint after the first steps, and the chosen exchange."""
        return {"device": self._steps.device, "bits": self._fingerprint, "chosen": self._chosen.word}

    def queue(self, steps: int) -> float:
        """Return the seconds of a queue of steps whose losses are not read, until the device has finished."""
        self._steps.meet()
        began = time.perf_counter()
        for _ in range(steps):
            self._steps.step()
        self._steps.wait()
        return time.perf_counter() - began

    def read(self, steps: int) -> list[float]:
        """Return the seconds of each step, with its loss read."""
        self._steps.meet()
        times = []
        for _ in range(steps):
            began = time.perf_counter()
            float(self._steps.step())
            times.append(time.perf_counter() - began)
        return times

    def peak_mb(self) -> float:
        """Return the peak of memory so far, in MB."""
        return self._steps.peak_bytes() / 1e6


def main() -> None:
    path, words = sys.argv[1:]
    worker = GpuWorker(GpuCase(**json.loads(words)))
    names = ("facts", "queue", "read", "peak_mb")
    handlers: dict[str, Callable[..., Any]] = {name: getattr(worker, name) for name in names}
    control.serve(path, "gpu", rank(), handlers)


if __name__ == "__main__":
    main()
