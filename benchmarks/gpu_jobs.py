"""The processes of a case of gpu.py: their command, environment and answers, and the error that ended them."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from control import Coordinator, Group
from gpu_task import BITS, BY_HAND, JAX, OURS, PLAIN, GpuCase
from timing import as_strategies_do, environment

from popdist.xla import deterministic_setting

RANK = Path(__file__).with_name("gpu_rank.py")
QUEUES = 3
READ_STEPS = 10
ERROR = re.compile(r"(?:[\w.]*\.)?(\w*(?:Error|Exception|Interrupt|Exit))\b(.*)")

LAUNCHER = " POPRUN "  # part of each line that poprun writes about a job


@dataclass(frozen=True)
class Effort:
    """The effort for the measurement of a case.

    Attributes:
        steps: Maximum number of steps of a queue.
        turn_s: Approximate maximum length of a queue, in seconds.
        limit_s: Time limit for the start of the processes, in seconds.
        answer_s: Time limit of an answer, in seconds.
    """

    steps: int
    turn_s: float
    limit_s: float
    answer_s: float

    def steps_of(self, step_s: float, most: int) -> int:
        """Return the number of steps for a turn, given the time of a step, between 2 and `most`."""
        return max(2, min(most, round(self.turn_s / max(step_s, 1e-6))))


class GpuJob:
    """The processes of a case, from start to end.

    Args:
        case: Case to measure.
        effort: Effort for its measurement.
    """

    def __init__(self, case: GpuCase, effort: Effort) -> None:
        self.case = case
        self._effort = effort
        self._began = time.monotonic()
        self._folder = tempfile.TemporaryDirectory(prefix="gpu-")
        self._log = Path(self._folder.name) / "log"
        self._coordinator = Coordinator(self._folder.name, effort.limit_s, effort.answer_s)
        self._group: Group | None = None
        self._error = ""
        self._start_s = 0.0

    def start(self) -> None:
        """Start the processes, and wait until all have made their first steps or one has failed."""
        words = [sys.executable, str(RANK), self._coordinator.path, json.dumps(asdict(self.case))]
        command = logged([*launcher_of(self.case), *words], self._log)
        try:
            self._group = self._coordinator.start("gpu", self.case.instances, [command], environment_of(self.case))
        except SystemExit as reason:
            self._error = self._why(reason)
        self._start_s = time.monotonic() - self._began

    def measure(self) -> dict[str, Any]:
        """Return the figures of the case, or its error."""
        row: dict[str, Any] = {"start_s": self._start_s}
        if self._group is not None:
            try:
                row |= self._figures(self._group)
            except SystemExit as reason:
                self._error = self._why(reason)
        if self._error:
            row |= {"error": self._error, "log": self._tail()}
        return asdict(self.case) | row

    def close(self) -> None:
        """End the processes."""
        error = SystemExit(self._error) if self._error else None
        self._coordinator.__exit__(type(error) if error else None, error, None)
        self._folder.cleanup()

    def _figures(self, group: Group) -> dict[str, Any]:
        facts = group.ask(do="facts")
        row = facts[0] | {"bits": " ".join(sorted({each["bits"] for each in facts}))}
        if self.case.model != BITS:
            step_s = max(group.ask(do="queue", steps=2)) / 2
            steps = self._effort.steps_of(step_s, self._effort.steps)
            queues = [max(group.ask(do="queue", steps=steps)) / steps for _ in range(QUEUES)]
            read = group.ask(do="read", steps=self._effort.steps_of(step_s, READ_STEPS))
            row |= {"queue_steps": steps, "queue_ms": 1e3 * median(queues), "read_ms": 1e3 * max(map(median, read))}
        return row | {"peak_mb": max(group.ask(do="peak_mb"))}

    def _why(self, reason: SystemExit) -> str:
        """Return the last error in the log of the processes, or else their last line."""
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        if found := list(ERROR.finditer(text)):
            return "".join(found[-1].groups()).strip()
        lines = [line for line in text.splitlines() if line.strip() and LAUNCHER not in line]
        return lines[-1] if lines else str(reason)

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-3000:] if self._log.exists() else ""


def launcher_of(case: GpuCase) -> list[str]:
    """Return the launcher's part of the command of a case."""
    if case.way in (PLAIN, BY_HAND):
        return []
    poprun = [sys.executable, "-m", "poprun", "--summary", "no"]
    poprun += ["--num-instances", str(case.instances), "--num-replicas", str(case.replicas)]
    return poprun


def environment_of(case: GpuCase) -> dict[str, str]:
    """Return the environment of a case, with flags that are the same for all ways."""
    environ = environment(XLA_PYTHON_CLIENT_PREALLOCATE="false", POPDIST_EXCHANGE=case.exchange)
    if case.is_deterministic:
        environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        environ |= deterministic_setting(environ)
    if case.framework == JAX and case.way != OURS:
        environ = as_strategies_do(environ, case.replicas)
    return environ


def logged(command: list[str], log: Path) -> list[str]:
    """Return the command with its output redirected to a file."""
    return ["sh", "-c", 'log=$1; shift; exec "$@" >"$log" 2>&1', "sh", str(log), *command]
