"""The tree in which the contributions of replicas are added: the one place that decides the order of a sum.

`sum(lo, hi) = sum(lo, mid) + sum(mid, hi)`, `mid = lo + the largest power of two smaller than hi - lo`; a leaf is a
replica. So the nodes are the intervals [k 2^level, (k + 1) 2^level), cut off at the number of replicas, and the sum of
seven is ((0+1) + (2+3)) + ((4+5) + 6). It depends on the number of replicas alone. Whoever has some of the replicas may
add up every node that lies inside of them, and others may go on with that.

In a tree of n leaves a sum of floats is wrong by at most about log2(n) u (|c0| + |c1| + ...), in a chain by (n - 1) of
these (Higham, Accuracy and Stability of Numerical Algorithms, 4.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

_CACHED = 4096

Value = TypeVar("Value")


class TreeNode(NamedTuple):
    """The replicas whose sum a node is.

    Attributes:
        first: the first one.
        stop: the one behind the last one.
    """

    first: int
    stop: int

    @property
    def is_leaf(self) -> bool:
        """Whether it is the contribution of one replica."""
        return self.stop - self.first == 1

    def covers(self, other: TreeNode) -> bool:
        """Return whether the other one is part of it, or the same."""
        return self.first <= other.first and other.stop <= self.stop


class TreeSum(NamedTuple):
    """Two neighbours are added. They and the sum are numbers: of what is given, then of what earlier steps came to.

    Attributes:
        left: what has the lower replicas.
        right: what has those behind them.
        register: which of a stack of accumulators receives the sum; both may lie in accumulators from this one on.
    """

    left: int
    right: int
    register: int


def root_of(replicas: int) -> TreeNode:
    """Return the sum of all replicas."""
    return TreeNode(0, replicas)


def halves(node: TreeNode) -> tuple[TreeNode, TreeNode]:
    """Return the two nodes that are added to this one, which is no leaf."""
    middle = node.first + (1 << ((node.stop - node.first - 1).bit_length() - 1))
    return TreeNode(node.first, middle), TreeNode(middle, node.stop)


def parent_of(node: TreeNode, replicas: int) -> TreeNode:
    """Return the node to which this one is added, together with its neighbour; the root itself for the root."""
    size = 1 << (node.stop - node.first - 1).bit_length()
    while True:
        first = node.first & -(size + size)
        found = TreeNode(first, min(replicas, first + size + size))
        if found != node or found == root_of(replicas):
            return found
        size += size


def node_of_halves(left: TreeNode, right: TreeNode, replicas: int) -> TreeNode | None:
    """Return the node of which two nodes are the halves, in this order; None if they are added to others."""
    parent = parent_of(left, replicas)
    are_halves = left.stop == right.first and parent == TreeNode(left.first, right.stop)
    return parent if are_halves else None


@lru_cache(_CACHED)
def subtrees(first: int, stop: int, replicas: int) -> tuple[TreeNode, ...]:
    """Return the largest nodes inside of a block of replicas, in order: one where blocks are aligned to powers of two.

    Args:
        first: where the block begins.
        stop: where it ends.
        replicas: how many there are in all.
    """
    return merged([TreeNode(replica, replica + 1) for replica in range(first, stop)], replicas)


def merged(nodes: Iterable[TreeNode], replicas: int) -> tuple[TreeNode, ...]:
    """Return the nodes that are left after all possible additions: the largest nodes inside of them, in order."""
    left: list[TreeNode] = []
    for node in sorted(nodes):
        left.append(node)
        while len(left) > 1 and (parent := node_of_halves(left[-2], left[-1], replicas)) is not None:
            left[-2:] = [parent]
    return tuple(left)


@lru_cache(_CACHED)
def steps(nodes: tuple[TreeNode, ...]) -> tuple[TreeSum, ...]:
    """Return the additions that make one node of some nodes, in the order of the tree; none for one.

    Args:
        nodes: in order; together they are all of a node.

    Raises:
        ValueError: if they are not, or one of them is no node of the tree below it.
    """
    numbers = {node: number for number, node in enumerate(nodes)}
    order: list[TreeSum] = []

    def add(node: TreeNode, register: int) -> int:
        if node in numbers:
            return numbers[node]
        if node.is_leaf:
            raise ValueError(f"the sum of replica {node.first} is missing among {list(nodes)}")
        left, right = halves(node)
        first = add(left, register)
        second = add(right, register + (first >= len(nodes)))
        order.append(TreeSum(first, second, register))
        return len(nodes) + len(order) - 1

    add(TreeNode(nodes[0].first, nodes[-1].stop), 0)
    if len(order) != len(nodes) - 1:
        raise ValueError(f"{list(nodes)} are not the parts of one node")
    return tuple(order)


def registers(order: Sequence[TreeSum]) -> int:
    """Return how many accumulators some steps take."""
    return max((step.register for step in order), default=-1) + 1


def combined(values: Sequence[Value], combine: Callable[[Value, Value], Value]) -> Value:
    """Anything that replicas have, one value each in their order, combined in the order of the tree."""
    found = list(values)
    for left, right, _ in steps(tuple(TreeNode(replica, replica + 1) for replica in range(len(values)))):
        found.append(combine(found[left], found[right]))
    return found[-1]
