"""A reduction plan: rounds of additions and messages. It says what flows, and nothing of how or how fast."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from collectives.plans.spread import Spread
from collectives.tree import TreeNode, root_of


class Addition(NamedTuple):
    """A rank adds what it has of some neighbouring slices, in the order of the tree.

    Attributes:
        rank: which one.
        first: the first slice.
        stop: the one behind the last slice.
        nodes: what is added, in order; one only where there is one replica, whose contribution is to be finished.
        into: what they come to; the sum of all replicas is the result, and finished.
    """

    rank: int
    first: int
    stop: int
    nodes: tuple[TreeNode, ...]
    into: TreeNode


class Message(NamedTuple):
    """A rank sends another one what it has of some neighbouring slices.

    Attributes:
        source: who sends.
        to: who receives.
        first: the first slice.
        stop: the one behind the last slice.
        node: the sum of which replicas; of all replicas: the finished result.
    """

    source: int
    to: int
    first: int
    stop: int
    node: TreeNode


@dataclass(frozen=True)
class Round:
    """The work of a rank at once: it adds, then sends, then has what others sent it. The next round is its next one.

    Attributes:
        additions: of all ranks.
        messages: of all ranks. Between two ranks they keep this order.
    """

    additions: tuple[Addition, ...]
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Plan:
    """A reduction of all contributions; all ranks have the whole result at the end.

    Until the result of a slice is known nothing of it travels but partial sums, and afterwards nothing but results. In
    one direction two ranks exchange partial sums in one round only, and results in one: so several pieces of an array
    can be under way, each in another round, while messages of one kind between two ranks keep the order of the pieces.

    Attributes:
        name: of the way in which it goes.
        spread: who owns what.
        owners: for each slice who finishes it, in the order in which slices lie in memory; all ranks for -1.
        rounds: see `Round`.
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
        """Whether each slice is finished by one rank, so that the first half is a reduce-scatter."""
        return -1 not in self.owners

    @property
    def scattering(self) -> Plan:
        """Its first half: every rank has the results of its own slices only."""
        if not self.is_scattering:
            raise ValueError(f"{self.name} has every slice finished by all ranks; it has no half that scatters")
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
        """The number of slices of the longest message from host to host; 1 where there is none."""
        hosts = self.spread.hosts
        leaving = (each for each in self.messages() if hosts[each.source] != hosts[each.to])
        return max((each.stop - each.first for each in leaving), default=1)

    def messages(self) -> Iterator[Message]:
        """Yield all messages, round by round."""
        for each in self.rounds:
            yield from each.messages
