"""Prepared reductions: a repeated call whose checks and places are known from the call before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from collectives.caches import BoundedCache
from collectives.requests import Request
from collectives.transport import Prepared, Transport

Key = tuple[object, ...]

ORDERED = "ordered_all_reduce"
"""The name of the operation in keys."""


@final
class PreparedReductions:
    """The prepared reductions of a communicator. A call is prepared when one of its layout is made the second time.

    Args:
        transport: Transport that prepares them.
        place_of: Returns the place of a result, as `Preparations.place_of` does.

    Attributes:
        calls: Prepared reductions by key; None after the first call of a key.
    """

    def __init__(self, transport: Transport, place_of: Callable[[np.ndarray], int]) -> None:
        self._transport = transport
        self._place_of = place_of
        self.calls: BoundedCache[Key, Prepared | None] = BoundedCache(1024)

    def key(self, operation: str, name: str, op: str, count: int, out: np.ndarray) -> Key:
        """Return the key of a call, for the number of its contributions: equal for all arrays of one layout.

        Shared memory has a key for each array. If `out` is no array, the key is empty: no such call is prepared.
        """
        try:
            return operation, name, op, count, self._place_of(out), out.shape, out.dtype
        except AttributeError:
            return ()

    def take_group(
        self,
        contributions: Sequence[Sequence[np.ndarray]],
        outs: Sequence[np.ndarray],
        op: str,
        names: Sequence[str],
    ) -> list[Prepared]:
        """Take the arrays of all tensors of a group; return nothing, with nothing taken, if one is not prepared."""
        if not len(contributions) == len(outs) == len(names) or len(set(map(len, contributions))) != 1:
            return []
        taken: list[Prepared] = []
        for arrays, out, name in zip(contributions, outs, names, strict=True):
            found = self.calls.get(self.key(ORDERED, name, op, len(arrays), out))
            if found is None or not found.take(arrays, out):
                break
            taken.append(found)
        if len(taken) == len(outs) and (len(taken) == 1 or all(each.is_apart(taken) for each in taken)):
            return taken
        for each in taken:
            each.drop()
        return []

    def learn(self, key: Key, request: Request[np.ndarray]) -> None:
        """Prepare repetitions of a request that has been carried out, if it was not the first one of its key."""
        out = request.result
        if not self._transport.prepares_reductions or out is None:
            return
        if key not in self.calls:
            self.calls[key] = None
            return
        known = self.calls[key]
        if known is not None and known.is_of_use:
            return
        prepared = self._transport.prepared(request.call, request.arguments[0], out)
        if prepared is not None:
            self.calls[key] = prepared
