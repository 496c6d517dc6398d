"""Reductions of small arrays by messages, each prepared for arrays of one layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast, final

import numpy as np

from collectives import collective_ops
from collectives.buffers import flat_view
from collectives.calls import Call
from collectives.point_to_point.gathering import SumLayout
from collectives.point_to_point.link import Mail
from collectives.requests import Request
from collectives.transport import Prepared, Reducing, Transport
from collectives.waiting import Watch

_FIRST_PAUSE_S = 0.001
_BUFFERS = "iuf"  # kinds of dtypes whose arrays `bytes.join` takes; bfloat16 is not among them


@dataclass(frozen=True)
class Correspondence:
    """The messages of a reduction in which all ranks contribute equally many arrays.

    Attributes:
        layout: Sums of each rank; a message has those of its sender.
        head: Bytes before the sums. The first `compared` of them are equal on all ranks.
        compared: Number of bytes to compare.
        rank: This rank.
        others: Other ranks, in order.
        mail: Messages to and from the other ranks.
        expect: Function that lets the next exchange begin after its messages were sent.
    """

    layout: SumLayout
    head: bytes
    compared: int
    rank: int
    others: Sequence[int]
    mail: Mail
    expect: Callable[[], None]


def is_preparable(reducing: Reducing) -> bool:
    """Return whether the arrays of a reduction can be prepared."""
    reduction = reducing.reduction
    return reduction.dtype.kind in _BUFFERS and not reduction.divides_first and reducing.out.size > 0


@final
class PreparedMessages:
    """A `Prepared` reduction by one message from each rank to each other rank.

    Args:
        told: Messages of the reduction.
        call: Call that all ranks make.
        reducing: An equal reduction.
        out: Array of the layout of results.
        watch: Limits and messages of waits.
    """

    def __init__(self, told: Correspondence, call: Call, reducing: Reducing, out: np.ndarray, watch: Watch) -> None:
        self.call = call
        self.is_of_use = True
        self.take: Callable[[Sequence[np.ndarray], np.ndarray], bool] = self._take
        self.drop: Callable[[], None] = self._drop
        layout = told.layout
        self._told = told
        self._watch = watch
        self._reduction = reducing.reduction
        self._dtype, self._shape, self._is_flat = out.dtype, out.shape, out.ndim == 1
        self._count = len(reducing.contributions)
        self._words = told.head[: told.compared]
        self._coming = [
            (box.take, len(told.head) + layout.nbytes[rank])
            for box, rank in zip(told.mail.boxes, told.others, strict=True)
        ]
        self._places = [layout.places(rank, len(told.head)) for rank in told.others]
        self._before = sum(map(len, layout.dtypes[: told.rank]))  # number of sums before those of this rank
        is_added = len(layout.own) < self._count
        rooms = np.empty((len(layout.own), layout.elements), self._reduction.accumulator) if is_added else ()
        self._rooms = list(rooms)
        self._taken: tuple[Sequence[np.ndarray], np.ndarray] | None = None

    # ---- the arrays of a call

    def _take(self, contributions: Sequence[np.ndarray], out: np.ndarray) -> bool:
        if self._taken is not None or type(out) is not np.ndarray or len(contributions) != self._count:
            return False
        flags = out.flags
        if out.shape != self._shape or out.dtype != self._dtype or not (flags.c_contiguous and flags.writeable):
            return False
        for array in contributions:
            if array is not out and not self._is_as_planned(array, out):
                return False
        self._taken = contributions, out
        return True

    def _is_as_planned(self, array: np.ndarray, out: np.ndarray) -> bool:
        return (
            type(array) is np.ndarray
            and array.dtype == self._dtype
            and array.shape == self._shape
            and array.flags.c_contiguous
            and not np.may_share_memory(array, out)
        )

    def _drop(self) -> None:
        self._taken = None

    def is_apart(self, group: Sequence[Prepared]) -> bool:
        """Return whether the result shares no memory with the arrays of other members of the group."""
        assert self._taken is not None
        out = self._taken[1]
        others = [each for each in cast("Sequence[PreparedMessages]", group) if each is not self]
        return not any(each._shares(out) for each in others)

    def _shares(self, out: np.ndarray) -> bool:
        assert self._taken is not None
        arrays, result = self._taken
        return any(np.may_share_memory(out, array) for array in (*arrays, result))

    # ---- the call

    def carry_out(self, transport: Transport, moves: Callable[[int], None] | None = None) -> None:
        """Carry out the call whose arrays were taken."""
        assert self._taken is not None
        contributions, out = self._taken
        own = contributions
        if self._rooms:
            flat = [array.reshape(-1) for array in contributions]
            own = self._told.layout.own_sums(self._reduction, flat, self._rooms)
        message = b"".join((self._told.head, *cast("Sequence[memoryview]", own)))  # arrays are buffers
        mail, words = self._told.mail, self._words
        for put in mail.puts:
            put(message)
        messages: list[bytes] = []
        are_alike = True
        for take, nbytes in self._coming:
            come = take()
            if come is None:
                mail.pause(_FIRST_PAUSE_S)
                come = take()
                if come is None:
                    come = self._await(len(messages))
            messages.append(come)
            are_alike = are_alike and come.startswith(words) and len(come) == nbytes
        self._taken = None
        if not are_alike:
            self._end_unprepared(transport, contributions, out, messages, moves)
            return
        if moves is not None:
            moves(self.call.nbytes)
        self._add(own, messages, out)

    def _await(self, number: int) -> bytes:
        """Return the message of the other rank with this number, when it has come."""
        boxes, others = self._told.mail.boxes[number:], self._told.others[number:]

        def missing() -> list[int]:
            return [rank for box, rank in zip(boxes, others, strict=True) if not len(box)]

        self._watch.wait_on(lambda: len(boxes[0]) > 0, missing, self._told.mail.pause)
        come = boxes[0].take()
        assert come is not None
        return come

    def _add(self, own: Sequence[np.ndarray], messages: Sequence[bytes], out: np.ndarray) -> None:
        layout = self._told.layout
        pairs = zip(messages, self._places, strict=True)
        sources = [each for message, places in pairs for each in layout.sums_in(message, places)]
        before = self._before
        sources[before:before] = own if self._is_flat else [array.reshape(-1) for array in own]
        self._reduction.reduce(sources, out if self._is_flat else out.reshape(-1), layout.replicas, layout.order)

    def _end_unprepared(
        self,
        transport: Transport,
        contributions: Sequence[np.ndarray],
        out: np.ndarray,
        messages: Sequence[bytes],
        moves: Callable[[int], None] | None,
    ) -> None:
        """Continue as an unprepared call does after sending: other ranks have made other calls."""
        for box, message in zip(self._told.mail.boxes, messages, strict=True):
            box.put_back(message)
        self._told.expect()
        flat = [flat_view(array) for array in contributions]
        reducing = Reducing(flat, flat_view(out), self._reduction)
        Request(self.call, flat, len(flat), collective_ops.reduce, (reducing,), out).carry_out(transport, moves)
        self.is_of_use = False  # the calls were equal, but the ranks contribute different numbers of arrays now
        self.take = lambda contributions, out: False
