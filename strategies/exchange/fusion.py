"""The buffers that travel together in one collective."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def fusion_groups(nbytes: Sequence[int], dtypes: Sequence[np.dtype], most_bytes: int) -> list[list[int]]:
    """Return the numbers of buffers that travel together: of one dtype, in order, none empty.

    Args:
        nbytes: of each buffer.
        dtypes: of the mean of each.
        most_bytes: of a group. A larger buffer is a group alone.
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
