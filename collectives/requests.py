"""Prepared collectives: buffers are checked; comparing the calls and moving the data remain."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count as numbers_from
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from collectives import collective_ops
from collectives.agreement import agree
from collectives.buffers import (
    flat_contributions,
    flat_view,
    new_call,
    refuse_overlaps_in_group,
    refuse_partial_overlap,
    result_array,
)
from collectives.caches import BoundedCache
from collectives.calls import Call, checked_root
from collectives.errors import UnsupportedBufferError
from collectives.reduction import Reduction
from collectives.transport import Reducing, Transport

Result = TypeVar("Result")
Carries = TypeVar("Carries", covariant=True)


class Carried(Protocol[Carries]):
    """A checked collective that remains to be carried out."""

    @property
    def call(self) -> Call:
        """The call that all ranks must make."""

    def carry_out(self, transport: Transport, moves: Callable[[int], None] | None = None) -> Carries:
        """Compare the call with the calls of the other ranks, and move the data; a collective call."""


@dataclass(slots=True)  # not frozen: one is made per call, and a frozen one takes several times as long to make
class Request(Generic[Result]):
    """A collective that can be carried out at once, or when all ranks have started it.

    Attributes:
        call: Call that all ranks must make.
        carried: Arrays that may travel with the comparison of the calls.
        count: Number of arrays that this rank contributes.
        finish: Function of `collective_ops` that moves the data; takes the transport, the exchanged parts and
            `arguments`.
        arguments: Further arguments of `finish`.
        result: Result for the caller; None: the result of `finish`.
    """

    call: Call
    carried: Sequence[np.ndarray]
    count: int
    finish: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    result: Result | None = None

    def carry_out(self, transport: Transport, moves: Callable[[int], None] | None = None) -> Result:
        """Compare the call with the calls of the other ranks, and move the data; a collective call.

        Args:
            transport: Transport between the ranks.
            moves: Function to call between comparison and data, with the size of a contribution in bytes.

        Raises:
            LayoutMismatchError: The calls differ. Raised on every rank; no buffer was written.
        """
        call, result = self.call, self.result
        if self.finish is collective_ops.reduce:
            reducing: Reducing = self.arguments[0]
            if transport.opens_reductions and not reducing.is_shared and not reducing.reduction.divides_first:
                transport.announce(reducing)
        parts = agree(transport, call, self.carried, self.count)
        if moves is not None:
            moves(call.nbytes)
        made: Result = self.finish(transport, parts, *self.arguments)
        return made if result is None else result


class Preparations:
    """The checks of a caller's arguments, made before other ranks are involved.

    Each method prepares one collective as a `Request`. It raises the errors of the communicator's method of the same
    name, and changes no buffer.

    Args:
        rank: This rank.
        size: Number of ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._shared: dict[int, np.ndarray] = {}  # flat views of shared arrays, by the id of the array
        self._shared_bases: set[int] = set()
        self._places: dict[int, int] = {}  # a number for each shared array, never used again, by the id of the array
        self._numbers = numbers_from(1)
        self._calls: BoundedCache[tuple[Any, ...], tuple[Call, Reduction]] = BoundedCache(1024)

    def share(self, array: np.ndarray) -> None:
        """Note that all ranks share the memory of an array: a reduction into it is then written once."""
        self._shared[id(array)] = array.reshape(-1)
        self._places[id(array)] = next(self._numbers)
        weakref.finalize(array, self._shared.pop, id(array), None)
        weakref.finalize(array, self._places.pop, id(array), None)
        self._shared_bases.add(id(array.base))
        weakref.finalize(array.base, self._shared_bases.discard, id(array.base))

    def place_of(self, out: np.ndarray) -> int:
        """Return the number of a shared array; 0 for private memory, and -1 for a part or view of a shared array."""
        if not self._shared_bases or id(out.base) not in self._shared_bases:
            return 0
        return self._places.get(id(out), -1)

    def all_reduce(self, buffer: np.ndarray, op: str, name: str) -> Request[np.ndarray]:
        """Prepare a reduction in place."""
        call, reduction = self._describe("all_reduce", name, op, buffer)
        flat = self._private(buffer)
        return self._reduce(call, Reducing([flat], flat, reduction), buffer)

    def ordered_all_reduce(
        self,
        contributions: Sequence[np.ndarray],
        out: np.ndarray | None,
        op: str,
        name: str,
        begun: str = "called",
    ) -> Request[np.ndarray]:
        """Prepare an ordered reduction into `out`, which may be shared memory; `begun` is a verb for messages."""
        if not contributions:
            raise ValueError(f"ordered_all_reduce was {begun} without contributions; give one array per local replica")
        first = contributions[0]
        if out is None:
            out = np.empty_like(first)
        shared = self._shared.get(id(out))
        call, reduction = self._describe("ordered_all_reduce", name, op, first, -1, shared is not None)
        arrays = flat_contributions(contributions)
        result_array(out, first.shape, first.dtype)
        flat = self._private(out) if shared is None else shared
        refuse_partial_overlap(arrays, flat)
        return self._reduce(call, Reducing(arrays, flat, reduction, is_shared=shared is not None), out)

    def grouped_ordered_all_reduce(
        self,
        contributions: Sequence[Sequence[np.ndarray]],
        outs: Sequence[np.ndarray],
        op: str,
        names: Sequence[str],
    ) -> list[Request[np.ndarray]]:
        """Prepare the reduction of each tensor of a group."""
        _check_group(contributions, outs, names)
        tensors = zip(contributions, outs, names, strict=True)
        group = [self.ordered_all_reduce(arrays, out, op, name) for arrays, out, name in tensors]
        if len(group) > 1:
            refuse_overlaps_in_group([(each.call.name, *each.arguments[0][:2]) for each in group])
        return group

    def broadcast(self, buffer: np.ndarray, root: int, name: str) -> Request[np.ndarray]:
        """Prepare a broadcast."""
        root = checked_root("root", root, self._size, "ranks")
        call, _ = self._describe("broadcast", name, "", buffer, root)
        flat = flat_view(buffer) if self._rank == root else self._private(buffer)
        return Request(call, [flat], 1, collective_ops.broadcast, (flat, root), buffer)

    def all_gather(self, buffer: np.ndarray, out: np.ndarray | None, name: str) -> Request[np.ndarray]:
        """Prepare an all-gather into `out`, one row per rank."""
        call, _ = self._describe("all_gather", name, "", buffer)
        out = result_array(out, (self._size, *buffer.shape), buffer.dtype)
        flat, whole = flat_view(buffer), self._private(out)
        refuse_partial_overlap([whole], flat, self._own(flat.size))
        return Request(call, [flat], 1, collective_ops.all_gather, (flat, whole), out)

    def shift(self, buffer: np.ndarray, out: np.ndarray | None, distance: int, name: str) -> Request[np.ndarray]:
        """Prepare the copy of another rank's buffer into `out`."""
        distance = checked_root("distance", distance, self._size, "ranks")
        call, _ = self._describe("shift", name, "", buffer, distance)
        out = result_array(out, buffer.shape, buffer.dtype)
        flat, received = flat_view(buffer), self._private(out)
        refuse_partial_overlap([received], flat, slice(0, 0))
        return Request(call, [flat], 1, collective_ops.shift, (flat, received, distance), out)

    def gather(self, buffer: np.ndarray, root: int, name: str) -> Request[np.ndarray | None]:
        """Prepare a gather into a new array on the root, one row per rank."""
        root = checked_root("root", root, self._size, "ranks")
        call, _ = self._describe("gather", name, "", buffer, root)
        out = np.empty((self._size, *buffer.shape), buffer.dtype) if self._rank == root else None
        flat = flat_view(buffer)
        return Request(call, [flat], 1, collective_ops.gather, (flat, out, root), out)

    def reduce_scatter(self, buffer: np.ndarray, out: np.ndarray | None, op: str, name: str) -> Request[np.ndarray]:
        """Prepare a reduce-scatter of this rank's block into `out`."""
        call, reduction = self._describe("reduce_scatter", name, op, buffer)
        out = result_array(out, self._block_shape(buffer), buffer.dtype)
        return self._scatter(call, [flat_view(buffer)], out, reduction)

    def ordered_reduce_scatter(
        self, contributions: Sequence[np.ndarray], out: np.ndarray | None, op: str, name: str
    ) -> Request[np.ndarray]:
        """Prepare an ordered reduce-scatter of this rank's block into `out`."""
        if not contributions:
            raise ValueError("ordered_reduce_scatter was called without contributions; give one array per replica")
        first = contributions[0]
        call, reduction = self._describe("ordered_reduce_scatter", name, op, first)
        arrays = flat_contributions(contributions)
        out = result_array(out, self._block_shape(first), first.dtype)
        return self._scatter(call, arrays, out, reduction)

    def barrier(self, name: str) -> Request[None]:
        """Prepare a barrier, which only compares the calls."""
        call, _ = self._describe("barrier", name, "", None)
        return Request(call, (), 0, collective_ops.nothing)

    def _scatter(
        self, call: Call, arrays: list[np.ndarray], out: np.ndarray, reduction: Reduction
    ) -> Request[np.ndarray]:
        flat = self._private(out)
        refuse_partial_overlap(arrays, flat, self._own(flat.size))
        return self._reduce(call, Reducing(arrays, flat, reduction, scatters=True), out)

    def _reduce(self, call: Call, reducing: Reducing, out: np.ndarray) -> Request[np.ndarray]:
        arrays = reducing.contributions
        return Request(call, () if reducing.is_shared else arrays, len(arrays), collective_ops.reduce, (reducing,), out)

    def _describe(
        self,
        operation: str,
        name: str,
        op: str,
        buffer: np.ndarray | None,
        root: int = -1,
        into_shared: bool = False,
    ) -> tuple[Call, Reduction]:
        if buffer is None:
            key: tuple[Any, ...] = (operation, name)
        else:
            try:
                key = (operation, name, op, buffer.dtype, buffer.shape, root, into_shared)
            except AttributeError:
                raise UnsupportedBufferError(
                    f"{operation} takes NumPy arrays, not {type(buffer).__name__}; convert it with np.asarray"
                ) from None
        found = self._calls.get(key)
        if found is None:
            found = self._calls[key] = new_call(operation, name, op, buffer, root, into_shared)
        return found

    def _own(self, size: int) -> slice:
        """Return the slice of this rank's block, for blocks of `size` elements."""
        return slice(self._rank * size, (self._rank + 1) * size)

    def _private(self, out: np.ndarray) -> np.ndarray:
        """Return a flat view of memory that only this rank will write."""
        if self.place_of(out):
            raise UnsupportedBufferError(
                "a part or view of memory from `allocate` cannot receive a result: all ranks would write to it; "
                "give ordered_all_reduce the whole array"
            )
        return flat_view(out, writable=True)

    def _block_shape(self, buffer: np.ndarray) -> tuple[int, ...]:
        if buffer.ndim == 0 or buffer.shape[0] % self._size:
            raise ValueError(
                f"reduce_scatter of shape {list(buffer.shape)} over {self._size} ranks; "
                "the first axis must be a multiple of the number of ranks"
            )
        return (buffer.shape[0] // self._size, *buffer.shape[1:])


def _check_group(
    contributions: Sequence[Sequence[np.ndarray]], outs: Sequence[np.ndarray], names: Sequence[str]
) -> None:
    counts = {len(contributions), len(outs), len(names)}
    if len(counts) > 1:
        raise ValueError(
            f"a group has {len(contributions)} lists of contributions, {len(outs)} outs and {len(names)} names; "
            "give one of each for every tensor"
        )
    shares = sorted({len(arrays) for arrays in contributions})
    if shares[:1] == [0] or len(shares) > 1:
        raise ValueError(
            f"the tensors of a group have {' or '.join(map(str, shares))} contributions; "
            "give one array per local replica for each of them"
        )
