"""The benchmark of the trainer's options runs, and counts what it says."""

import re
import subprocess
import sys

import pytest
from benchmark_runs import BENCHMARKS

pytestmark = [pytest.mark.job, pytest.mark.complete, pytest.mark.cores(2), pytest.mark.timeout(150)]


def test_counts_bytes_and_times_all_ways():
    command = [sys.executable, str(BENCHMARKS / "training_options.py"), "--models", "cnn", "--rounds", "1"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    assert re.search(r"throughput \d+\.\d+x, bytes 1/8", printed)
    assert {line.split()[0] for line in printed.splitlines() if "ms per step" in line} == {"run", "by", "step"}
