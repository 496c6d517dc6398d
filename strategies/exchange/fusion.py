"""The buffers that travel together in one collective."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def fusion_groups(nbytes: Sequence[int], dtypes: Sequence[np.dtype], most_bytes: int) -> list[list[int]]:
    """Return groups of buffers that travel together: of one dtype, in order, without empty buffers.

    Args:
        nbytes: Size of each buffer in bytes.
        dtypes: Dtype of each buffer's mean.
        most_bytes: Largest size of a group in bytes. A larger buffer is a group of its own.
    """
    groups: list[list[int]] = []
    filled: dict[np.dtype, int] = {}
    latest: dict[np.dtype, list[int]] = {}
    for number, (size, dtype) in enumerate(zip(nbytes, dtypes, strict=True)):
        if not size:
            continue
        filled[dtype] = filled.get(dtype, 0) + size
        if dtype not in latest or filled[dtype] > most_bytes:
            latest[dtype], filled[dtype] = [], size
            groups.append(latest[dtype])
        latest[dtype].append(number)
    return groups
