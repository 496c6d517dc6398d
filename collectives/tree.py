"""The summation tree over replicas, which alone determines the order of every sum.

`sum(lo, hi) = sum(lo, mid) + sum(mid, hi)`, `mid = lo + the largest power of two smaller than hi - lo`; a leaf is a
replica. So the nodes are the intervals [k 2^level, (k + 1) 2^level), cut off at the number of replicas. The sum of
seven is ((0+1) + (2+3)) + ((4+5) + 6). The tree depends on the number of replicas alone. A rank may add up every node
that lies inside its block of replicas, and other ranks continue with these sums.

This is pairwise summation. The error of a floating-point sum of n values is at most about log2(n) u (|c0| + ...). For a
chain of additions it is n - 1 in place of log2(n) (Higham, Accuracy and Stability of Numerical Algorithms, 4.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias, TypeVar

_CACHED = 4096

Value = TypeVar("Value")


class TreeNode(NamedTuple):
    """A node of the tree: an interval of replicas, and their sum.

    Attributes:
        first: First replica.
        stop: Replica after the last one.
    """

    first: int
    stop: int

    @property
    def is_leaf(self) -> bool:
        """Whether the node is the contribution of one replica."""
        return self.stop - self.first == 1

    def covers(self, other: TreeNode) -> bool:
        """Return whether `other` is this node or lies inside it."""
        return self.first <= other.first and other.stop <= self.stop


class TreeSum(NamedTuple):
    """An addition of two neighbouring values. Values are numbered: first the given ones, then the results of steps.

    Attributes:
        left: Number of the value with the lower replicas.
        right: Number of the value with the replicas after them.
        register: Position in a stack of accumulators for the sum. If the operands are in accumulators, these are at
            this position or higher.
    """

    left: int
    right: int
    register: int


def root_of(replicas: int) -> TreeNode:
    """Return the root node, the sum of all replicas."""
    return TreeNode(0, replicas)


def halves(node: TreeNode) -> tuple[TreeNode, TreeNode]:
    """Return the two children of a node that is no leaf."""
    middle = node.first + (1 << ((node.stop - node.first - 1).bit_length() - 1))
    return TreeNode(node.first, middle), TreeNode(middle, node.stop)


Add: TypeAlias = Callable[[tuple[TreeNode, TreeNode], Value, Value], Value]
"""A function of two neighbouring nodes and their sums that returns the sum of both."""


def add_last(sums: list[tuple[TreeNode, Value]], covering: Sequence[TreeNode], replicas: int, add: Add[Value]) -> None:
    """Add the last two sums, and again their result, while they are the halves of a node that may be added here.

    Args:
        sums: Nodes with their sums, in order; changed in place.
        covering: Nodes that cover all nodes that may be added here.
        replicas: Total number of replicas.
        add: Function that adds two sums.
    """
    while len(sums) > 1:
        (left, one), (right, other) = sums[-2:]
        size = 2 * (left.stop - left.first)  # of the parent, unless the number of replicas cuts it off
        parent = TreeNode(left.first, min(left.first + size, replicas))
        are_halves = left.first % size == 0 and (left.stop, parent.stop) == (right.first, right.stop)
        if not are_halves or not any(node.covers(parent) for node in covering):
            return
        sums[-2:] = [(parent, add((left, right), one, other))]


@lru_cache(_CACHED)
def subtrees(first: int, stop: int, replicas: int) -> tuple[TreeNode, ...]:
    """Return the largest nodes inside a block of replicas, in order. A block aligned to a power of two has one.

    Args:
        first: First replica of the block.
        stop: Replica after the last one of the block.
        replicas: Total number of replicas.
    """
    return merged([TreeNode(replica, replica + 1) for replica in range(first, stop)], replicas)


def merged(nodes: Iterable[TreeNode], replicas: int) -> tuple[TreeNode, ...]:
    """Return the nodes that remain after all possible additions of `nodes`, in order."""
    left: list[tuple[TreeNode, None]] = []
    for node in sorted(nodes):
        left.append((node, None))
        add_last(left, [root_of(replicas)], replicas, lambda *_: None)
    return tuple(node for node, _ in left)


@lru_cache(_CACHED)
def steps(nodes: tuple[TreeNode, ...]) -> tuple[TreeSum, ...]:
    """Return the additions that combine `nodes` into one node, in the order of the tree; none for a single node.

    Args:
        nodes: Nodes in order that together make up one node.

    Raises:
        ValueError: The nodes do not make up one node, or one of them is no node below it in the tree.
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
    """Return the number of accumulators that the steps need."""
    return max((step.register for step in order), default=-1) + 1


def combined(values: Sequence[Value], combine: Callable[[Value, Value], Value]) -> Value:
    """Combine one value per replica, given in replica order, in the order of the tree."""
    found = list(values)
    for left, right, _ in steps(tuple(TreeNode(replica, replica + 1) for replica in range(len(values)))):
        found.append(combine(found[left], found[right]))
    return found[-1]
