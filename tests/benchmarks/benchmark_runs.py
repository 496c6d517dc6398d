"""Running a benchmark with sizes that take seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
LIMIT_S = 110.0
LONGER_LIMIT_S = 300.0  # where many processes import torch or JAX, and other programs take part of the machine


def run_benchmark(
    name: str, folder: Path, *words: str, limit_s: float = LIMIT_S, **environ: str
) -> tuple[dict[str, Any], str]:
    """The figures that a benchmark wrote, and its table; it has to end well."""
    figures = folder / "figures.json"
    command = [sys.executable, str(BENCHMARKS / name), *words, "--json", str(figures)]
    finished = subprocess.run(
        command, capture_output=True, text=True, timeout=limit_s, check=False, env=os.environ | environ
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(figures.read_text()), finished.stdout
