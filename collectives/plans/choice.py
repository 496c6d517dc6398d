"""The choice of the fastest plan, by the costs of messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from collectives.plans.cutting import UNDER_WAY
from collectives.plans.network import Network
from collectives.plans.plan import Addition, Message, Plan
from collectives.plans.planning import plan_for, possible_ways
from collectives.plans.spread import Spread
from collectives.tree import TreeNode, root_of

_CACHED = 1024


@dataclass(frozen=True)
class Width:
    """The number of bytes per element that travels.

    Attributes:
        leaf: Bytes of an element of one replica's contribution, and of the result.
        partial: Bytes of an element of a partial sum.
    """

    leaf: int
    partial: int

    def of(self, node: TreeNode, replicas: int) -> int:
        """Return the bytes per element of a node, given the total number of replicas."""
        return self.leaf if node.is_leaf or node == root_of(replicas) else self.partial


@dataclass(frozen=True)
class Load:
    """The work of the busiest rank or host in a round.

    Attributes:
        messages: Messages to and from other hosts that a rank sends and receives.
        local_messages: Messages within a host that a rank sends and receives.
        link_bytes: Bytes per array element on the link of a host, in the busier direction.
        local_bytes: Bytes per array element that a rank sends within its host.
        added: Elements that a rank reads for additions, per array element.
    """

    messages: int
    local_messages: int
    link_bytes: float
    local_bytes: float
    added: float


@lru_cache(_CACHED)
def loads_of(plan: Plan, width: Width) -> tuple[Load, ...]:
    """Return the load of each round of a plan."""
    return tuple(_load_of(plan, width, each.additions, each.messages) for each in plan.rounds)


@lru_cache(_CACHED)
def whole_load_of(plan: Plan, width: Width) -> Load:
    """Return the load of all rounds together."""
    additions = [addition for each in plan.rounds for addition in each.additions]
    return _load_of(plan, width, additions, list(plan.messages()))


def _load_of(plan: Plan, width: Width, additions: Sequence[Addition], messages: Sequence[Message]) -> Load:
    hosts, ranks = len(plan.spread.ranks_of), plan.spread.size
    counts, local_counts, local, added = [0] * ranks, [0] * ranks, [0.0] * ranks, [0.0] * ranks
    for rank, first, stop, nodes, _ in additions:
        added[rank] += len(nodes) * (stop - first) / plan.slices
    links = [[0.0] * hosts, [0.0] * hosts]  # out of each host, into each host
    for source, to, first, stop, node in messages:
        share = (stop - first) / plan.slices * width.of(node, plan.spread.replicas)
        one, other = plan.spread.hosts[source], plan.spread.hosts[to]
        of_kind = local_counts if one == other else counts
        of_kind[source] += 1
        of_kind[to] += 1
        if one == other:
            local[source] += share
        else:
            links[0][one] += share
            links[1][other] += share
    return Load(max(counts), max(local_counts), max(*links[0], *links[1]), max(local), max(added))


def estimated_s(plan: Plan, elements: int, width: Width, network: Network, pieces: int = 1) -> float:
    """Estimate the duration of a plan: its rounds run in sequence, each as slow as its busiest rank and link.

    With several pieces, each further piece follows when the busiest rank and the busiest link have finished with the
    piece before it. At most `UNDER_WAY` pieces are in progress at once.
    """
    in_piece = elements / pieces
    first_s = sum(
        (network.latency_s if load.messages else network.local_latency_s if load.local_messages else 0)
        + _rank_s(load, in_piece, width, network)
        + _link_s(load, in_piece, network)
        for load in loads_of(plan, width)
    )
    if pieces == 1:
        return first_s
    whole = whole_load_of(plan, width)
    busiest_s = max(_rank_s(whole, in_piece, width, network), _link_s(whole, in_piece, network))
    return max(first_s + (pieces - 1) * busiest_s, first_s * pieces / UNDER_WAY)


def _rank_s(load: Load, elements: float, width: Width, network: Network) -> float:
    """Return the time that the busiest rank spends on sums and messages."""
    return (
        elements * load.added * width.partial / network.memory_bytes_per_s
        + load.messages * network.message_s
        + load.local_messages * network.local_message_s
        + elements * load.local_bytes / network.local_bytes_per_s
    )


def _link_s(load: Load, elements: float, network: Network) -> float:
    """Return the time that the busiest link is occupied."""
    return elements * load.link_bytes / network.bytes_per_s


@lru_cache(_CACHED)
def quickest(
    spread: Spread,
    elements: int,
    width: Width,
    network: Network,
    ways: Sequence[str] = (),
    columns: int = 0,
) -> Plan:
    """Return the plan with the shortest estimated duration; of equal plans the first one in `ways`.

    Args:
        spread: Spread of replicas over ranks and hosts.
        elements: Number of elements of the array.
        width: Bytes per element.
        network: Costs of messages and sums.
        ways: Names of the ways to consider; default: all possible ways.
        columns: Number of columns, as for `plan_for`.
    """
    plans = [plan_for(spread, way, columns) for way in ways or possible_ways(spread)]
    return min(plans, key=lambda plan: estimated_s(plan, elements, width, network))
