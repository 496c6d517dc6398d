"""The choice of a plan and of pieces for an array, and the work of one rank for each piece."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from collectives.caches import BoundedCache
from collectives.plans.choice import Width, estimated_s, quickest
from collectives.plans.cutting import UNDER_WAY, Piece, pieces_of, pieces_of_blocks
from collectives.plans.plan import Plan
from collectives.plans.planning import plan_for, possible_ways
from collectives.plans.spread import Spread
from collectives.point_to_point.link import Link
from collectives.point_to_point.opening import opening_round
from collectives.point_to_point.program import RankProgram, program_of
from collectives.reduction import Reduction

_FEW = (1, 2, UNDER_WAY)  # candidate numbers of pieces; estimates for more pieces are too optimistic


@dataclass(frozen=True)
class _Sought:
    """The properties of a reduction that determine its plan.

    Attributes:
        spread: Spread of contributions over ranks and hosts.
        width: Bytes per element.
        elements: Number of elements of one array.
        scatters: Whether each rank keeps a block of the result.
    """

    spread: Spread
    width: Width
    elements: int
    scatters: bool

    @property
    def nbytes(self) -> int:
        """The size of a sum of all replicas in bytes."""
        return self.elements * self.width.partial

    @property
    def widest(self) -> int:
        """The size of the widest elements that travel, in bytes."""
        return self.width.leaf if max(self.spread.counts) == 1 else self.width.partial


@dataclass(frozen=True)
class Planned:
    """The work of one rank in a reduction.

    Attributes:
        plan: Plan of all ranks.
        programs: First element and program of each piece.
        opens_in: Turn of the first piece whose messages may travel with the comparison of calls; -1 for none.
    """

    plan: Plan
    programs: tuple[tuple[int, RankProgram], ...]
    opens_in: int

    @cached_property
    def room(self) -> int:
        """The memory that the largest piece needs for received partial sums, in elements."""
        return max(program.room for _, program in self.programs)

    @cached_property
    def added(self) -> int:
        """The memory that the largest piece needs for partial sums of this rank, in elements."""
        return max(program.added for _, program in self.programs)


class Planner:
    """The planner of one rank's reductions; it plans each layout once.

    Args:
        link: Link between the ranks.
        pairs: Pairs of ranks whose messages of the comparison of calls leave a host; empty if these messages take
            several rounds.
    """

    def __init__(self, link: Link, pairs: Collection[tuple[int, int]]) -> None:
        self._link = link
        self._sizes = link.sizes
        self._hosts = link.hosts or tuple(range(link.size))
        self._pairs = pairs
        self._planned: BoundedCache[tuple[object, ...], Planned] = BoundedCache()

    def planned(self, reduction: Reduction, counts: tuple[int, ...], size: int, scatters: bool) -> Planned:
        """Return the work of this rank.

        Args:
            reduction: Arithmetic of the reduction.
            counts: Number of arrays that each rank contributes.
            size: Number of elements of the result on this rank.
            scatters: Whether that result is one of equal blocks.
        """
        key = reduction.dtype, reduction.accumulator, counts, size, scatters
        found = self._planned.get(key)
        if found is None:
            found = self._planned[key] = self._plan(reduction, counts, size, scatters)
        return found

    def _plan(self, reduction: Reduction, counts: tuple[int, ...], size: int, scatters: bool) -> Planned:
        spread = Spread(counts, self._hosts)
        width = Width(reduction.dtype.itemsize, reduction.accumulator.itemsize)
        sought = _Sought(spread, width, size * self._link.size if scatters else size, scatters)
        plan, longest = self._cheapest(sought) if self._link.are_costs_measured else self._usual(sought)
        pieces = _cut(plan, size, longest, scatters)
        programs = {piece.table: program_of(plan, self._link.rank, piece.table) for piece in pieces}
        opens_in = opening_round(plan) if self._opens(plan, pieces[0], width) else -1
        of_pieces = tuple((piece.offset, programs[piece.table]) for piece in pieces)
        return Planned(plan, of_pieces, opens_in)

    def _usual(self, sought: _Sought) -> tuple[Plan, int]:
        """Choose a plan, and the elements of a slice per piece, for a network with unknown costs."""
        ways = self._ways(sought) if self._is_whole(sought) else ("direct",)
        columns = 1 if self._may_have_one_column(sought) else 0
        plan = quickest(sought.spread, sought.elements, sought.width, self._link.costs, ways, columns)
        return plan.scattering if sought.scatters else plan, self._longest(plan, sought)

    def _cheapest(self, sought: _Sought) -> tuple[Plan, int]:
        """Choose the cheapest plan, columns and pieces, for a network with measured costs; same result as `_usual`."""
        columns = (1, 0) if self._may_have_one_column(sought) else (0,)
        pieces = _FEW if self._is_whole(sought) else (1,)
        plans = [plan_for(sought.spread, way, number) for way in self._ways(sought) for number in columns]
        cuts = [
            (plan, -(-self._longest(plan, sought) // number))
            for plan in (plan.scattering if sought.scatters else plan for plan in plans)
            for number in pieces
        ]
        return min(cuts, key=lambda cut: self._estimated_s(cut[0], cut[1], sought))

    def _may_have_one_column(self, sought: _Sought) -> bool:
        """Return whether one rank of each host may send and receive for all its ranks."""
        return bool(self._link.nearby) and not sought.scatters and sought.nbytes <= self._sizes.one_column_bytes

    def _is_whole(self, sought: _Sought) -> bool:
        """Return whether the array may go in one piece."""
        return sought.nbytes <= self._sizes.whole_bytes

    def _ways(self, sought: _Sought) -> tuple[str, ...]:
        """Return the possible ways, without "doubling" if the result is scattered or needs several messages."""
        is_long = sought.scatters or sought.nbytes > self._sizes.chunk_bytes
        return tuple(way for way in possible_ways(sought.spread) if way != "doubling" or not is_long)

    def _longest(self, plan: Plan, sought: _Sought) -> int:
        """Return the number of elements of a slice per piece, for the smallest possible number of pieces."""
        in_slice, widest = -(-sought.elements // plan.slices), sought.widest
        if self._is_whole(sought):
            return in_slice
        at_once = self._sizes.longest_message_bytes // plan.most_slices_leaving
        longest = max(1, min(self._sizes.chunk_of(in_slice * widest), at_once) // widest)
        return -(-in_slice // -(-in_slice // longest))  # equal pieces, because a short one costs as much as a long one

    def _estimated_s(self, plan: Plan, longest: int, sought: _Sought) -> float:
        """Estimate the duration; the first round of a whole array may travel with the comparison of calls."""
        costs, in_slice = self._link.costs, -(-sought.elements // plan.slices)
        pieces = -(-in_slice // longest)
        took = estimated_s(plan, sought.elements, sought.width, costs, pieces)
        if pieces > 1:
            return took
        size = sought.elements // self._link.size if sought.scatters else sought.elements
        return took - costs.latency_s * self._opens(plan, _cut(plan, size, longest, sought.scatters)[0], sought.width)

    def _opens(self, plan: Plan, piece: Piece, width: Width) -> bool:
        """Return whether the first messages that leave hosts may travel with the comparison of calls.

        They must be between the same ranks, and short enough.
        """
        number = opening_round(plan)
        if number < 0:
            return False
        nbytes: Counter[tuple[int, int]] = Counter()
        for source, to, first, stop, node in plan.rounds[number].messages:
            if self._hosts[source] != self._hosts[to]:
                nbytes[source, to] += piece.table.elements(first, stop) * width.of(node, plan.spread.replicas)
        return nbytes.keys() == set(self._pairs) and max(nbytes.values()) <= self._sizes.opening_bytes


def _cut(plan: Plan, size: int, longest: int, scatters: bool) -> list[Piece]:
    """Cut a result of `size` elements into pieces with at most `longest` elements of each slice."""
    return pieces_of_blocks(plan, size, longest) if scatters else pieces_of(plan, size, longest * plan.slices)
