"""The all-gather of short sums: each rank's sums travel to all others with the comparison of calls.

Each rank adds the largest nodes that it owns, sends them to all others, and adds all nodes itself. That takes one round
in place of the two or more of a plan. Between two ranks it moves no more bytes than a plan does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from collectives.caches import BoundedCache
from collectives.plans.spread import Spread
from collectives.reduction import Order, Reduction, order_of
from collectives.transport import Reducing
from collectives.tree import TreeNode


class OwnSum:
    """A node that a rank owns.

    Args:
        node: The node.
        first: Number of its first leaf among the contributions of the rank.
    """

    __slots__ = ("first", "order", "stop")

    def __init__(self, node: TreeNode, first: int) -> None:
        self.first = first
        self.stop = first + node.stop - node.first
        self.order: Order = order_of(tuple(TreeNode(leaf, leaf + 1) for leaf in range(*node)))


@dataclass(frozen=True)
class SumLayout:
    """The sums of all ranks, for one number of elements and dtype.

    Attributes:
        own: Nodes of this rank.
        dtypes: Dtype of each node of each rank.
        nbytes: Size of all nodes of each rank.
        order: Order in which the nodes of all ranks are added.
        replicas: Number of contributions of all ranks.
        elements: Number of elements.
    """

    own: tuple[OwnSum, ...]
    dtypes: tuple[tuple[np.dtype, ...], ...]
    nbytes: tuple[int, ...]
    order: Order
    replicas: int
    elements: int

    def places(self, rank: int, start: int = 0) -> list[tuple[np.dtype, int]]:
        """Return the dtype and the first byte of each sum of a rank in a message, where the sums begin at `start`."""
        dtypes = self.dtypes[rank]
        starts = accumulate((self.elements * dtype.itemsize for dtype in dtypes), initial=start)
        return list(zip(dtypes, starts, strict=False))

    def sums_in(self, message: bytes | np.ndarray, places: Sequence[tuple[np.dtype, int]]) -> list[np.ndarray]:
        """Return the sums at these places of a message, without a copy."""
        return [np.frombuffer(message, dtype, self.elements, start) for dtype, start in places]

    def own_sums(
        self, reduction: Reduction, contributions: Sequence[np.ndarray], rooms: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Add up the nodes of this rank, each into its room; a node of one contribution is that array.

        Args:
            reduction: Arithmetic of the sums.
            contributions: One-dimensional arrays of this rank.
            rooms: Memory for each node, of the accumulator's dtype.
        """
        sums = []
        for own, room in zip(self.own, rooms, strict=True):
            leaves = contributions[own.first : own.stop]
            if len(leaves) == 1:
                sums.append(leaves[0])
                continue
            reduction.fold(leaves, room, own.order)
            sums.append(room)
        return sums


class Layouts:
    """The layouts of sums as one rank sees them; it makes each layout once.

    Args:
        rank: This rank.
        size: Number of ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._known: BoundedCache[tuple[np.dtype, np.dtype, int, int, bool], SumLayout] = BoundedCache()

    def layout(self, reduction: Reduction, count: int, elements: int, adds: bool = True) -> SumLayout:
        """Return the layout if each rank contributes `count` arrays of `elements` elements.

        If `adds` is false, no rank adds its contributions: they are the sums that travel.
        """
        key = reduction.dtype, reduction.accumulator, count, elements, adds
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._new(reduction, count, elements, adds)
        return found

    def _new(self, reduction: Reduction, count: int, elements: int, adds: bool) -> SumLayout:
        spread = Spread.apart((count,) * self._size)
        first = spread.blocks[self._rank].first
        sums = spread.sums if adds else tuple(map(spread.leaves, range(self._size)))
        dtypes = tuple(tuple(map(reduction.dtype_of, nodes)) for nodes in sums)
        return SumLayout(
            tuple(OwnSum(node, node.first - first) for node in sums[self._rank]),
            dtypes,
            tuple(elements * sum(dtype.itemsize for dtype in of_rank) for of_rank in dtypes),
            order_of(tuple(node for nodes in sums for node in nodes)),
            spread.replicas,
            elements,
        )


@dataclass
class GatheredSums:
    """The sums of all ranks in one reduction.

    Attributes:
        layout: Sums of each rank.
        own: Sums of this rank.
        others: Sums of the other ranks, by rank.
    """

    layout: SumLayout
    own: list[np.ndarray]
    others: dict[int, list[np.ndarray]] = field(default_factory=dict)

    def held_for(self, rank: int) -> list[np.ndarray]:
        """Return the sums to send to a rank."""
        return self.own

    def nbytes_from(self, rank: int) -> int:
        """Return the number of bytes that a rank has to deliver."""
        return self.layout.nbytes[rank]

    def deliver(self, source: int, payload: np.ndarray) -> None:
        """Note a rank's sums: the first `nbytes_from(source)` bytes of `payload`."""
        self.others[source] = self.layout.sums_in(payload, self.layout.places(source))

    def finish(self, reducing: Reducing) -> None:
        """Add the sums of all ranks into the result."""
        layout = self.layout
        sources = [each for rank in range(len(layout.nbytes)) for each in self.others.get(rank, self.own)]
        reducing.reduction.reduce(sources, reducing.out, layout.replicas, layout.order)


def add_own(layout: SumLayout, reducing: Reducing, rooms: Sequence[np.ndarray]) -> GatheredSums:
    """Add the contributions of this rank.

    Args:
        layout: Sums of each rank.
        reducing: Reduction; only its contributions are read.
        rooms: Memory for each sum of this rank, as bytes.
    """
    reduction = reducing.reduction
    typed = [room.view(reduction.accumulator) for room in rooms]
    return GatheredSums(layout, layout.own_sums(reduction, reducing.contributions, typed))
