"""Paths between instances of loops, and their sharing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from collectives.arrays import bfloat16
from strategies import StrategyError
from strategies.torch.exchange.paths import TorchHostPath, path_of_loops
from strategies.torch.tensors import as_array, as_tensor

FLOAT32 = np.dtype(np.float32)
CPU = torch.device("cpu")


@pytest.mark.parametrize(("word", "is_there"), [("auto", False), ("host", False), ("compiled", True)])
def test_modules_on_a_cpu_have_a_path_on_request(on_instances, monkeypatch, word, is_there) -> None:
    monkeypatch.setenv("POPDIST_EXCHANGE", word)

    def run(strategy):
        first, second = (path_of_loops(strategy.replicas, CPU) for _ in range(2))
        assert first is second
        return first is not None

    assert on_instances(2, 4, run) == [is_there] * 2


def test_the_host_makes_the_means_of_a_device(on_instances) -> None:
    """Each step copies its means to memory of its own."""

    def run(strategy):
        communicator = strategy.communicator
        path = TorchHostPath(communicator, CPU)
        kept = []
        for step in range(2):
            own = [
                np.random.default_rng([step, size, communicator.rank]).standard_normal(size).astype(dtype)
                for size, dtype in ((1003, FLOAT32), (0, FLOAT32), (77, bfloat16))
            ]
            means = path.means("gradients", [[as_tensor(one.copy())] for one in own], [one.dtype for one in own])
            kept.append((means, [communicator.ordered_all_reduce([one], op="mean") for one in own]))
        rows = path.gather("rows", torch.full((3,), communicator.rank, dtype=torch.int16))
        assert rows.tolist() == [[0] * 3, [1] * 3, [2] * 3]
        path.close()
        return all(
            as_array(mean).tobytes() == right.tobytes() and as_array(mean).dtype == right.dtype
            for means, wanted in kept
            for mean, right in zip(means, wanted, strict=True)
        )

    assert on_instances(3, 3, run) == [True] * 3


def test_an_obstacle_to_a_requested_path_is_an_error(on_instances, monkeypatch) -> None:
    def run(strategy):
        return path_of_loops(strategy.replicas, CPU, "there is no way; go on foot")

    assert on_instances(2, 2, run) == [None] * 2
    monkeypatch.setenv("POPDIST_EXCHANGE", "compiled")
    with pytest.raises(StrategyError, match="'compiled' was requested, but there is no way; go on foot; or use"):
        on_instances(2, 2, run)
