"""The benchmark of steps of modules runs in all its ways; no speed is tested."""

from __future__ import annotations

import importlib.util

import pytest
from benchmark_runs import LONGER_LIMIT_S, run_benchmark

pytestmark = [
    pytest.mark.job,
    pytest.mark.long,
    pytest.mark.complete,
    pytest.mark.cores(2),
    pytest.mark.timeout(LONGER_LIMIT_S + 20),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"),
]


def rows_of(folder, *words):
    words = ["--rounds", "1", "--models", "mlp", *words]
    figures, _ = run_benchmark("torch_steps.py", folder, *words, limit_s=LONGER_LIMIT_S)
    return figures["rows"]


def test_every_way_is_measured_and_ours_compared_with_those_of_others(tmp_path):
    row = rows_of(tmp_path, "--instances", "1")["mlp"]
    ways = [kind for kind in row if " / " not in kind]
    assert ways == ["torch alone", "in lockstep", "DDP", "DistributedModel", "Trainer", "trainingModel"]
    assert len(row) == len(ways) + 3 * 3


def test_replicas_of_one_process_and_turns_of_a_pipeline_are_measured(tmp_path):
    local = rows_of(tmp_path, "--local-replicas", "2")["mlp"]
    ways = ["one after another", "plain, on threads", "at once"]
    assert list(local) == [*ways, *(f"{ways[0]} / {way}" for way in ways[1:])]
    pipeline = rows_of(tmp_path, "--pipeline")["four blocks"]
    assert list(pipeline) == [
        "one device",
        "four devices",
        "four devices, zero_bubble",
        "a block and micro-batch on four devices",
        "a block and micro-batch on four devices, zero_bubble",
    ]
