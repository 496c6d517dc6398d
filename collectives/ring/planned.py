"""Which plan an array goes through, in which pieces, and what one rank does for each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from collectives.plans.choice import Width, quickest
from collectives.plans.cutting import Piece, pieces_of, pieces_of_blocks
from collectives.plans.plan import Plan
from collectives.plans.planning import possible_ways
from collectives.plans.spread import Spread
from collectives.reduction import Reduction
from collectives.ring.link import Link
from collectives.ring.opening import opening_round
from collectives.ring.program import Program, program_of

_CACHED = 256  # layouts


@dataclass(frozen=True)
class Planned:
    """What one rank does.

    Attributes:
        plan: of what all do.
        programs: for each piece its first element, and what is done for it.
        opens_in: the turn of the first piece whose messages may travel with the comparison of calls; -1 for none.
    """

    plan: Plan
    programs: tuple[tuple[int, Program], ...]
    opens_in: int

    @cached_property
    def room(self) -> int:
        """For partial sums that come, in elements, of the piece that takes most."""
        return max(program.room for _, program in self.programs)

    @cached_property
    def added(self) -> int:
        """The same for those that this rank adds."""
        return max(program.added for _, program in self.programs)


class Planner:
    """Plans reductions of one rank, each layout once.

    Args:
        link: how messages travel.
        pairs: between whom the comparison of calls has messages that leave a host, all in one round; empty if it has
            more rounds of such.
    """

    def __init__(self, link: Link, pairs: Collection[tuple[int, int]]) -> None:
        self._link = link
        self._sizes = link.sizes
        self._hosts = link.hosts or tuple(range(link.size))
        self._pairs = pairs
        self._planned: dict[tuple[object, ...], Planned] = {}

    def planned(self, reduction: Reduction, counts: tuple[int, ...], size: int, scatters: bool) -> Planned:
        """What this rank does.

        Args:
            reduction: the arithmetic.
            counts: how many arrays each rank contributes.
            size: the elements of the result on this rank.
            scatters: whether that is one of equal blocks.
        """
        key = reduction.dtype, reduction.accumulator, counts, size, scatters
        found = self._planned.get(key)
        if found is None:
            if len(self._planned) > _CACHED:
                self._planned.clear()
            found = self._planned[key] = self._plan(reduction, counts, size, scatters)
        return found

    def _plan(self, reduction: Reduction, counts: tuple[int, ...], size: int, scatters: bool) -> Planned:
        spread = Spread(counts, self._hosts)
        width = Width(reduction.dtype.itemsize, reduction.accumulator.itemsize)
        elements = size * self._link.size if scatters else size
        is_whole = elements * width.partial <= self._sizes.whole_bytes
        ways = list(possible_ways(spread) if is_whole or self._link.are_costs_measured else ("direct",))
        if "doubling" in ways and (scatters or elements * width.partial > self._sizes.chunk_bytes):
            ways.remove("doubling")
        is_short = elements * width.partial <= self._sizes.one_column_bytes
        columns = 1 if self._link.nearby and is_short and not scatters else 0
        plan = quickest(spread, elements, width, self._link.costs, tuple(ways), columns)
        if scatters:
            plan = plan.scattering
        in_slice = -(-elements // plan.slices)
        widest = width.leaf if max(counts) == 1 else width.partial
        longest = in_slice if is_whole else max(1, self._sizes.chunk_of(in_slice * widest) // widest)
        longest = -(-in_slice // -(-in_slice // longest))  # pieces are equal: a short one costs as much as a long one
        pieces = pieces_of_blocks(plan, size, longest) if scatters else pieces_of(plan, size, longest * plan.slices)
        programs = {piece.table: program_of(plan, self._link.rank, piece.table) for piece in pieces}
        opens_in = opening_round(plan) if self._opens(plan, pieces[0], width) else -1
        of_pieces = tuple((piece.offset, programs[piece.table]) for piece in pieces)
        return Planned(plan, of_pieces, opens_in)

    def _opens(self, plan: Plan, piece: Piece, width: Width) -> bool:
        """Whether the first messages that leave hosts are between those who compare their calls, and short enough."""
        number = opening_round(plan)
        if number < 0:
            return False
        nbytes: Counter[tuple[int, int]] = Counter()
        for source, to, first, stop, node in plan.rounds[number].messages:
            if self._hosts[source] != self._hosts[to]:
                nbytes[source, to] += piece.table.elements(first, stop) * width.of(node, plan.spread.replicas)
        return nbytes.keys() == set(self._pairs) and max(nbytes.values()) <= self._sizes.opening_bytes
