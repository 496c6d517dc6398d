"""The second half of each collective, after all ranks have agreed: small arrays are there already, others move now."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from collectives.arrays import aligned_empty
from collectives.reduction import Reduction, join, shares
from collectives.transport import Contributions, Parts, Transport

SHARED_BYTES = 1 << 13  # smaller results are faster computed by every rank than waited for


def nothing(transport: Transport, parts: Parts) -> None:
    """Do nothing: the agreement was all."""


def allocate(transport: Transport, parts: Parts, nbytes: int) -> np.ndarray:
    """Return memory for a result."""
    return transport.allocate(nbytes) if nbytes >= SHARED_BYTES else aligned_empty(nbytes)


def reduce(
    transport: Transport, parts: Parts, arrays: Sequence[np.ndarray], out: np.ndarray, reduction: Reduction
) -> None:
    """Combine all contributions on every rank."""
    if parts.arrays:
        reduction.reduce(parts.arrays, out, len(parts.arrays))
    elif out.size and reduction.divides_first:
        _join_means(transport.reduce, parts, arrays, out)
    elif out.size:
        transport.reduce(arrays, out, reduction, parts)


def reduce_into_shared(
    transport: Transport, parts: Parts, arrays: Sequence[np.ndarray], out: np.ndarray, reduction: Reduction
) -> None:
    """Combine all contributions once for all ranks; what has to be joined, each rank joins to the same bits."""
    if reduction.divides_first:
        reduce(transport, parts, arrays, out, reduction)
        return
    transport.reduce(arrays, out, reduction, parts, True)


def reduce_group(
    transport: Transport,
    parts: Parts,
    group: Sequence[tuple[Contributions, np.ndarray, Reduction]],
) -> None:
    """Combine all contributions to each tensor of the group on every rank."""
    divided = [one for one in group if one[2].divides_first]
    transport.reduce_group([one for one in group if one[1].size and not one[2].divides_first], parts)
    for of_rank, out, reduction in divided:
        reduce(transport, parts, of_rank, out, reduction)


def reduce_scatter(
    transport: Transport,
    parts: Parts,
    arrays: Sequence[np.ndarray],
    out: np.ndarray,
    reduction: Reduction,
) -> None:
    """Combine all contributions to this rank's block."""
    if parts.arrays:
        block = slice(transport.rank * out.size, (transport.rank + 1) * out.size)
        reduction.reduce([array[block] for array in parts.arrays], out, parts.total)
    elif out.size and reduction.divides_first:
        _join_means(transport.reduce_scatter, parts, arrays, out)
    elif out.size:
        transport.reduce_scatter(arrays, out, reduction, parts)


def _join_means(
    sum_up: Callable[[Contributions, np.ndarray, Reduction, Parts], None],
    parts: Parts,
    arrays: Sequence[np.ndarray],
    out: np.ndarray,
) -> None:
    """Make the means of 64-bit integers from the sums of their quotients and of their remainders."""
    totals = np.empty_like(out), np.empty_like(out)
    for contributions, total in zip(shares(arrays, parts.total), totals, strict=True):
        sum_up(contributions, total, Reduction("sum", out.dtype), parts)
    join(*totals, out, parts.total)


def broadcast(transport: Transport, parts: Parts, flat: np.ndarray, root: int) -> None:
    """Copy the bytes of the root."""
    if parts.arrays:
        if transport.rank != root:
            np.copyto(flat, parts.arrays[root])
    elif flat.size:
        transport.broadcast(flat.view(np.uint8), root)


def all_gather(transport: Transport, parts: Parts, flat: np.ndarray, out: np.ndarray) -> None:
    """Copy the bytes of every rank into its row."""
    rows = out.reshape(transport.size, -1)
    if parts.arrays:
        for row, array in zip(rows, parts.arrays, strict=True):
            np.copyto(row, array)
    elif flat.size:
        transport.all_gather(flat.view(np.uint8), rows.view(np.uint8))


def gather(transport: Transport, parts: Parts, flat: np.ndarray, out: np.ndarray | None, root: int) -> None:
    """Copy the bytes of every rank into its row at the root."""
    if out is not None and parts.arrays:
        all_gather(transport, parts, flat, out)
    elif not parts.arrays and flat.size:
        rows = None if out is None else out.reshape(transport.size, -1).view(np.uint8)
        transport.gather(flat.view(np.uint8), rows, root)
