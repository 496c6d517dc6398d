"""What replicas contribute to an all-reduce in the benchmarks, and the sum that it should have."""

from __future__ import annotations

import numpy as np


def contribution(replica: int, elements: int) -> np.ndarray:
    """What a replica contributes: the same on whatever rank it is made; rounding makes sums depend on their order."""
    return np.random.default_rng(replica).random(elements, np.float32) - np.float32(0.5)


def sequential_sum(replicas: int, elements: int) -> np.ndarray:
    """((c0 + c1) + c2) + ..."""
    total = contribution(0, elements)
    for replica in range(1, replicas):
        total += contribution(replica, elements)
    return total
