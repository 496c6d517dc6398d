"""Which plan is the quickest, by what messages cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from collectives.plans.network import Network
from collectives.plans.plan import Plan
from collectives.plans.planning import plan_for, possible_ways
from collectives.plans.spread import Spread
from collectives.tree import Node, root_of

_CACHED = 1024


@dataclass(frozen=True)
class Width:
    """How many bytes an element has on its way.

    Attributes:
        leaf: as the contribution of one replica, and as the result.
        partial: as the sum of several replicas.
    """

    leaf: int
    partial: int

    def of(self, node: Node, replicas: int) -> int:
        """Of a node of so many replicas."""
        return self.leaf if node.is_leaf or node == root_of(replicas) else self.partial


@dataclass(frozen=True)
class Load:
    """What a round asks of the one who has most to do.

    Attributes:
        messages: sent and received by a rank, to and from other hosts.
        local_messages: the same inside of its host.
        link_bytes: of an element, through the link of a host, in the direction that has more.
        local_bytes: of an element, to others of the host.
        added: how many of the array's elements a rank reads while it adds.
    """

    messages: int
    local_messages: int
    link_bytes: float
    local_bytes: float
    added: float


@lru_cache(_CACHED)
def loads_of(plan: Plan, width: Width) -> tuple[Load, ...]:
    """The loads of all rounds."""
    hosts, ranks = len(plan.spread.ranks_of), plan.spread.size
    loads = []
    for each in plan.rounds:
        counts, local_counts, local, added = [0] * ranks, [0] * ranks, [0.0] * ranks, [0.0] * ranks
        for rank, first, stop, nodes, _ in each.additions:
            added[rank] += len(nodes) * (stop - first) / plan.slices
        links = [[0.0] * hosts, [0.0] * hosts]  # out of each host, into each host
        for source, to, first, stop, node in each.messages:
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
        most = max(*links[0], *links[1])
        loads.append(Load(max(counts), max(local_counts), most, max(local), max(added)))
    return tuple(loads)


def estimated_s(plan: Plan, elements: int, width: Width, network: Network) -> float:
    """How long a plan takes, one round after another, with every round as slow as its busiest rank and link."""
    return sum(
        (network.latency_s if load.messages else network.local_latency_s if load.local_messages else 0)
        + elements * load.added * width.partial / network.memory_bytes_per_s
        + load.messages * network.message_s
        + load.local_messages * network.local_message_s
        + elements * (load.link_bytes / network.bytes_per_s + load.local_bytes / network.local_bytes_per_s)
        for load in loads_of(plan, width)
    )


@lru_cache(_CACHED)
def quickest(
    spread: Spread,
    elements: int,
    width: Width,
    network: Network,
    ways: Sequence[str] = (),
    columns: int = 0,
) -> Plan:
    """The plan that is estimated to be the quickest; of equals the first of `ways`.

    Args:
        spread: who owns what.
        elements: of the array.
        width: of its elements.
        network: what messages and sums cost.
        ways: the names of those to choose from; default: all that are possible.
        columns: in how many the array goes, see `plan_for`.
    """
    plans = [plan_for(spread, way, columns) for way in ways or possible_ways(spread)]
    return min(plans, key=lambda plan: estimated_s(plan, elements, width, network))
