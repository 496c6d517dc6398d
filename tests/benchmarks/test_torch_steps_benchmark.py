"""The benchmark of steps of modules runs in all its ways; no speed is tested."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = str(ROOT / "benchmarks" / "torch_steps.py")

pytestmark = [
    pytest.mark.job,
    pytest.mark.complete,
    pytest.mark.cores(2),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"),
]


def run(folder, *words):
    figures = folder / "figures.json"
    command = [sys.executable, PROGRAM, "--json", str(figures), "--rounds", "1", "--models", "cnn", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    return json.loads(figures.read_text())["rows"]


def test_every_way_is_measured_and_ours_compared_with_those_of_others(tmp_path):
    row = run(tmp_path)["cnn"]
    ways = [kind for kind in row if " / " not in kind]
    assert ways == ["torch alone", "in lockstep", "DDP", "DistributedModel", "Trainer", "trainingModel"]
    assert len(row) == len(ways) + 3 * 3


def test_replicas_of_one_process_and_turns_of_a_pipeline_are_measured(tmp_path):
    local = run(tmp_path, "--local-replicas", "2")["cnn"]
    assert list(local) == ["one after another", "at once", "one after another / at once"]
    assert list(run(tmp_path, "--pipeline")["four blocks"]) == [
        "one device",
        "four devices",
        "per block and micro-batch",
    ]
