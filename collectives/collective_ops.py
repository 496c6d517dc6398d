"""The second half of each collective, after the agreement: small arrays have arrived with it, large ones move now."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from collectives.arrays import aligned_empty
from collectives.reduction import Reduction, join, shares
from collectives.transport import Parts, Reducing, Transport

SHARED_BYTES = 1 << 13  # for smaller results, computing them on every rank is faster than waiting


def nothing(transport: Transport, parts: Parts) -> None:
    """Do nothing: the agreement was the whole operation."""


def allocate(transport: Transport, parts: Parts, nbytes: int) -> np.ndarray:
    """Allocate memory for a result."""
    return transport.allocate(nbytes) if nbytes >= SHARED_BYTES else aligned_empty(nbytes)


def reduce(transport: Transport, parts: Parts, reducing: Reducing) -> None:
    """Combine all contributions into the whole result, or into this rank's block."""
    _, out, reduction, scatters, _ = reducing
    if parts.arrays:
        block = slice(transport.rank * out.size, (transport.rank + 1) * out.size)
        arrays = [array[block] for array in parts.arrays] if scatters else parts.arrays
        reduction.reduce(arrays, out, len(arrays))
    elif out.size and reduction.divides_first:
        _join_means(transport, parts, reducing)
    elif out.size:
        transport.reduce(reducing, parts)


def reduce_group(transport: Transport, parts: Parts, group: Sequence[Reducing]) -> None:
    """Combine all contributions to each tensor of the group, on every rank."""
    divided = [one for one in group if one.reduction.divides_first]
    transport.reduce_group([one for one in group if one.out.size and not one.reduction.divides_first], parts)
    for reducing in divided:
        reduce(transport, parts, reducing)


def _join_means(transport: Transport, parts: Parts, reducing: Reducing) -> None:
    """Compute means of 64-bit integers from the sums of their quotients and of their remainders.

    Each rank computes the same bits, so several ranks may write them to a shared `out`.
    """
    contributions, out, _, scatters, _ = reducing
    totals = np.empty_like(out), np.empty_like(out)
    for share, total in zip(shares(contributions, parts.total), totals, strict=True):
        transport.reduce(Reducing(share, total, Reduction("sum", out.dtype), scatters), parts)
    join(*totals, out, parts.total)


def broadcast(transport: Transport, parts: Parts, flat: np.ndarray, root: int) -> None:
    """Copy the root's bytes into `flat` of all other ranks."""
    if parts.arrays:
        if transport.rank != root:
            np.copyto(flat, parts.arrays[root])
    elif flat.size:
        transport.broadcast(flat.view(np.uint8), root)


def all_gather(transport: Transport, parts: Parts, flat: np.ndarray, out: np.ndarray) -> None:
    """Copy the bytes of every rank into row `rank` of `out`."""
    rows = out.reshape(transport.size, -1)
    if parts.arrays:
        for row, array in zip(rows, parts.arrays, strict=True):
            np.copyto(row, array)
    elif flat.size:
        transport.all_gather(flat.view(np.uint8), rows.view(np.uint8))


def shift(transport: Transport, parts: Parts, flat: np.ndarray, out: np.ndarray, distance: int) -> None:
    """Copy the bytes of the rank that is `distance` ranks further, around the ring, into `out`."""
    if parts.arrays:
        np.copyto(out, parts.arrays[(transport.rank + distance) % transport.size])
    elif flat.size:
        transport.shift(flat.view(np.uint8), out.view(np.uint8), distance)


def gather(transport: Transport, parts: Parts, flat: np.ndarray, out: np.ndarray | None, root: int) -> None:
    """Copy the bytes of every rank into row `rank` of the root's `out`."""
    if out is not None and parts.arrays:
        all_gather(transport, parts, flat, out)
    elif not parts.arrays and flat.size:
        rows = None if out is None else out.reshape(transport.size, -1).view(np.uint8)
        transport.gather(flat.view(np.uint8), rows, root)
