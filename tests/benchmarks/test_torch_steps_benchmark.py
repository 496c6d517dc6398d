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


def run(*words):
    command = [sys.executable, PROGRAM, "--json", "--rounds", "1", "--models", "cnn", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def test_every_way_is_measured():
    assert list(run()["cnn"]) == ["torch alone", "DistributedModel", "Trainer", "trainingModel"]
    assert list(run("--local-replicas", "2")["cnn"]) == ["one after another", "at once"]
    assert list(run("--pipeline")["four blocks"]) == ["one device", "four devices", "per block and micro-batch"]
