"""A reduction plan: rounds of additions and messages, independent of how and how fast they are executed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from collectives.plans.spread import Spread
from collectives.tree import TreeNode, root_of


class Addition(NamedTuple):
    """An addition of one rank: it adds values of a run of slices, in the order of the tree.

    Attributes:
        rank: Rank that adds.
        first: First slice.
        stop: Slice after the last one.
        nodes: Nodes that are added, in order. A single node occurs only with one replica in all, whose contribution
            has to be finished.
        into: Node of the sum. If it is the root, the sum is finished into the result.
    """

    rank: int
    first: int
    stop: int
    nodes: tuple[TreeNode, ...]
    into: TreeNode


class Message(NamedTuple):
    """A message: one rank sends another rank its values of a run of slices.

    Attributes:
        source: Sending rank.
        to: Receiving rank.
        first: First slice.
        stop: Slice after the last one.
        node: Node of the values; the root stands for the finished result.
    """

    source: int
    to: int
    first: int
    stop: int
    node: TreeNode


@dataclass(frozen=True)
class Round:
    """One round of all ranks: each rank adds, then sends, then has received the messages to it.

    A rank begins its next round without waiting for other ranks to end theirs.

    Attributes:
        additions: Additions of all ranks.
        messages: Messages of all ranks. Messages between two ranks keep this order.
    """

    additions: tuple[Addition, ...]
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Plan:
    """A reduction of all contributions, at whose end all ranks have the whole result.

    Only partial sums of a slice travel before its result is known, and only results afterwards. In one direction two
    ranks exchange partial sums in only one round, and results in only one round. So several pieces of an array can be
    in progress, each in another round. Messages of one kind between two ranks still keep the order of the pieces.

    Attributes:
        name: Name of the way.
        spread: Spread of replicas over ranks and hosts.
        owners: Rank that finishes each slice, in memory order; -1 if all ranks finish it.
        rounds: Rounds of additions and messages.
    """

    name: str
    spread: Spread
    owners: tuple[int, ...]
    rounds: tuple[Round, ...]

    @property
    def slices(self) -> int:
        """The number of slices into which arrays are cut."""
        return len(self.owners)

    @property
    def is_scattering(self) -> bool:
        """Whether a single rank finishes each slice, so that the first half of the plan is a reduce-scatter."""
        return -1 not in self.owners

    @property
    def scattering(self) -> Plan:
        """The first half of the plan, after which every rank has the results of its own slices only."""
        if not self.is_scattering:
            raise ValueError(f"in plan {self.name} all ranks finish every slice; it has no reduce-scatter half")
        root = root_of(self.spread.replicas)
        rounds = [
            Round(each.additions, tuple(message for message in each.messages if message.node != root))
            for each in self.rounds
        ]
        return Plan(
            self.name, self.spread, self.owners, tuple(each for each in rounds if each.additions or each.messages)
        )

    @property
    def most_slices_leaving(self) -> int:
        """The number of slices in the longest message between hosts, or 1 without such messages."""
        hosts = self.spread.hosts
        leaving = (each for each in self.messages() if hosts[each.source] != hosts[each.to])
        return max((each.stop - each.first for each in leaving), default=1)

    def messages(self) -> Iterator[Message]:
        """Yield all messages, round by round."""
        for each in self.rounds:
            yield from each.messages
