"""Paths between instances: which buffers travel together, and who shares a path."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from collectives.arrays import bfloat16
from strategies import StrategyError
from strategies.torch.on_device.compiled_path import FUSED_BYTES, parcels
from strategies.torch.on_device.connecting import path_between

FLOAT32 = np.dtype(np.float32)
CPU = torch.device("cpu")


def test_buffers_of_one_dtype_travel_together() -> None:
    sizes, dtypes = (5, 0, 7, 3, 0, 9), (FLOAT32, FLOAT32, bfloat16, FLOAT32, bfloat16, bfloat16)
    assert parcels(sizes, dtypes) == ((0, 3), (2, 5))


def test_a_parcel_has_a_limit_that_one_buffer_alone_may_exceed() -> None:
    half = FUSED_BYTES // 8
    assert parcels((half, half, 1, 4 * half, 1), (FLOAT32,) * 5) == ((0, 1), (2,), (3,), (4,))
    assert parcels((), ()) == ()


@pytest.mark.parametrize(("word", "is_there"), [("auto", False), ("host", False), ("compiled", True)])
def test_modules_on_a_cpu_have_a_path_if_they_ask_for_it(on_instances, monkeypatch, word, is_there) -> None:
    monkeypatch.setenv("POPDIST_EXCHANGE", word)

    def run(strategy):
        first, second = (path_between(strategy.replicas, CPU) for _ in range(2))
        assert first is second
        return first is not None

    assert on_instances(2, 4, run) == [is_there] * 2


def test_an_obstacle_is_an_error_where_a_path_is_asked_for(on_instances, monkeypatch) -> None:
    def run(strategy):
        return path_between(strategy.replicas, CPU, "there is no way; go on foot")

    assert on_instances(2, 2, run) == [None] * 2
    monkeypatch.setenv("POPDIST_EXCHANGE", "compiled")
    with pytest.raises(StrategyError, match="'compiled' was asked for, and there is no way; go on foot; or use"):
        on_instances(2, 2, run)
