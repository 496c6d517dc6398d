"""The benchmark of the trainer's options runs, and counts what it says."""

import re
import sys

import pytest
from benchmark_runs import BENCHMARKS

sys.path.append(str(BENCHMARKS))

import training_options  # noqa: E402

pytestmark = [pytest.mark.complete, pytest.mark.cores(2), pytest.mark.timeout(150)]


def test_counts_bytes_and_times_all_ways(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["training_options.py", "--models", "cnn", "--rounds", "1"])
    monkeypatch.setattr(training_options, "STEPS", 3)
    monkeypatch.setattr(training_options, "BATCH_SIZE", 2)
    training_options.main()
    printed = capsys.readouterr().out
    assert re.search(r"throughput \d+\.\d+x, bytes 1/8", printed)
    assert {line.split()[0] for line in printed.splitlines() if "ms per step" in line} == {"run", "by", "step"}
