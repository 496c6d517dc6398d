"""Prepared reductions: a repeated call whose checks and places are known from the call before it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import final

import numpy as np

from collectives.requests import Request
from collectives.transport import Prepared, Transport

Key = tuple[str | int, ...]

_CACHED = 1024


@final
class PreparedReductions:
    """The prepared reductions of a communicator. A call is prepared when it is made for the second time.

    Args:
        transport: Transport that prepares them.

    Attributes:
        calls: Prepared reductions by operation, name, operator and `id` of the result.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._outs: dict[Key, weakref.ref[np.ndarray]] = {}
        self.calls: dict[Key, Prepared] = {}

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
            found = self.calls.get((name, op, id(out)))
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
        known, is_second = self.calls.get(key), self._is_known(key, out)
        if not is_second or (known is not None and known.is_of_use):
            return
        prepared = self._transport.prepared(request.call, request.arguments[0], out)
        if prepared is not None:
            self.calls[key] = prepared

    def _is_known(self, key: Key, out: np.ndarray) -> bool:
        """Return whether the key was seen with the same array; note it otherwise."""
        seen = self._outs.get(key)
        if seen is not None and seen() is out:
            return True
        if len(self._outs) >= _CACHED:
            self._outs.clear()
            self.calls.clear()
        self._outs[key] = weakref.ref(out)
        self.calls.pop(key, None)
        return False
