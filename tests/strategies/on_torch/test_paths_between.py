"""Paths between instances of loops, and their sharing."""

from __future__ import annotations

import pytest
import torch

from strategies import StrategyError
from strategies.torch.exchange.paths import path_of_loops

CPU = torch.device("cpu")


@pytest.mark.parametrize(("word", "is_there"), [("auto", False), ("host", False), ("compiled", True)])
def test_modules_on_a_cpu_have_a_path_on_request(on_instances, monkeypatch, word, is_there) -> None:
    monkeypatch.setenv("POPDIST_EXCHANGE", word)

    def run(strategy):
        first, second = (path_of_loops(strategy.replicas, CPU) for _ in range(2))
        assert first is second
        return first is not None

    assert on_instances(2, 4, run) == [is_there] * 2


def test_an_obstacle_to_a_requested_path_is_an_error(on_instances, monkeypatch) -> None:
    def run(strategy):
        return path_of_loops(strategy.replicas, CPU, "there is no way; go on foot")

    assert on_instances(2, 2, run) == [None] * 2
    monkeypatch.setenv("POPDIST_EXCHANGE", "compiled")
    with pytest.raises(StrategyError, match="'compiled' was requested, but there is no way; go on foot; or use"):
        on_instances(2, 2, run)
